// Package differential shows that Sluice does what the real kube-proxy does. Both
// run at once, each on a node of a lab of its own; the labs are alike down to the
// addresses, and both watch the same API server. Random Services and
// EndpointSlices are written there, clients dial every frontend in both labs, and
// the outcomes must be the same but for the differences in
// differences_test.go.
//
// A run is a matter of seconds a round. A longer one, by hand:
//
//	go test ./test/differential -run TestLikeKubeProxy -timeout 0 -seed 7 -rounds 10 -duration 30m
package differential

import (
	"flag"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
)

var (
	firstSeed = flag.Uint64("seed", 0, "the first seed")
	rounds    = flag.Int("rounds", 3, "rounds of changes a seed")
	duration  = flag.Duration("duration", 0, "go on with further seeds for so long")
	binary    = flag.String("sluice", "", "another binary of Sluice, such as a mutant")
)

// waitTimeout limits waits for what has to become true, on a machine that is
// busy with other tests.
const waitTimeout = time.Minute

func TestMain(m *testing.M) {
	lab.Main()
	lab.UseProfile("tuned")
	flag.Parse()
	cluster.Run(m)
}
