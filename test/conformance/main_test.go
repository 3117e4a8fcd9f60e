// Package conformance shows kube-proxy's contract row by row, with objects in a
// real API server, the real agent, and real traffic from pods, the node and
// outside. What shows which row is in [rows].
package conformance

import (
	"flag"
	"testing"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	lab.UseProfile("two-uplinks")
	flag.Parse()
	// Tests wait more than they compute. Those with a crowd
	// are not parallel.
	parallel := flag.Lookup("test.parallel")
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f == parallel })
	if !given {
		_ = parallel.Value.Set("4") // a number
	}
	cluster.Run(m)
}
