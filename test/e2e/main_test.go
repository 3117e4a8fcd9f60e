// Package e2e runs the real binary against a real API server, with real
// traffic, through what happens in the life of a cluster.
//
// A test has a [testbed] of its own: nodes, pods and an agent. All scenes share
// one API server, in which each has a namespace.
package e2e

import (
	"flag"
	"testing"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
)

var (
	update   = flag.Bool("update", false, "rewrite what the scripts in testdata want")
	restarts = flag.Int("restarts", 6, "how many restarts TestCountersOnlyGrow plays at the least")
)

func TestMain(m *testing.M) {
	lab.Main()
	lab.UseProfile("wide-ports")
	flag.Parse()
	cluster.Run(m)
}
