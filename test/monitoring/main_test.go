// Package monitoring tests the alerts and the dashboard of deploy/monitoring: the alerts by
// promtool, and all queries by a Prometheus that scrapes a real agent.
package monitoring

import (
	"flag"
	"testing"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
)

const folder = "../../deploy/monitoring/"

func TestMain(m *testing.M) {
	lab.Main()
	lab.UseProfile("mptcp")
	flag.Parse()
	cluster.Run(m)
}
