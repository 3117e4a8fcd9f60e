package devices

import (
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// mustOffload switches an offload on or off for every device that packets start
// from.
func (w *world) mustOffload(t *testing.T, offload lab.Offload, on bool) {
	t.Helper()
	set := func(ns *lab.Namespace, device string) {
		if err := ns.SetOffload(device, offload, on); err != nil {
			t.Fatal(err)
		}
	}
	set(w.Client.Namespace, "eth0")
	for _, node := range w.Nodes {
		set(node.Namespace, "eth0")
	}
	for _, pod := range w.Pods() {
		set(pod.Namespace, "eth0")
		set(pod.Node.Namespace, pod.Device)
	}
}
