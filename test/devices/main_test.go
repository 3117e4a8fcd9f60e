// Package devices shows that Sluice's device hooks work on a network as nodes
// have it: VXLAN between the nodes, pods behind bridges and behind veths of their
// own, a firewall that drops what it finds invalid, and clients that no socket
// hook saw. Everything is real traffic through real agents.
package devices

import (
	"os"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}
