// Package deploy tests what is in deploy/ and the image: its tests are the
// API server and the kubelet of a node of the lab. The manifests are applied to
// a real API server, and the agent runs from the image with what they grant it,
// and with nothing else.
package deploy

import (
	"os"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	becomeNode()
	becomeContainer()
	lab.Main()
	os.Exit(m.Run())
}
