package e2e

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// What the configuration names and is not there is told by every answer about the node: status with its exit code, /readyz
// where connections fail, the log, an Event, the metrics and doctor. It ends when the thing appears.
//
//	node-1 192.168.50.1, and 192.168.50.77 later; another program has 127.0.0.1:10249 for a while
func TestNotAsConfigured(t *testing.T) {
	s := mustTestbed(t)
	node := s.NodeName(s.Lab.Nodes[0])
	lab.Must(t, s.Agent.Stop())
	taken, err := s.Lab.Nodes[0].Namespace.Listen("tcp4", metricsAddress)
	lab.Must(t, err)
	defer taken.Close()
	// Rules of kube-proxy are no evidence that it is kube-proxy which has the address.
	lab.Must(t, s.Lab.Nodes[0].Netfilter("table ip kube-proxy { chain services { }; }"))
	s.Agent.SetArgs("--flow-table-memory=4Mi", "--bind-address=192.168.50.77", "--nodeport-addresses=primary",
		"--healthz-bind-address=127.0.0.1:10256")
	lab.Must(t, s.Agent.Start())

	const (
		address = "configuration: bindAddress 192.168.50.77: no device of this node has this address: node ports do not answer on IPv4"
		server  = "configuration: metricsBindAddress 127.0.0.1:10249: nothing answers there: "
	)
	mustTell := func(texts ...string) {
		t.Helper()
		lab.EventuallyIn(t, eventTimeout, "sluice status ends with 1 and tells what is missing", func() bool {
			shown, err := s.Agent.Run("status")
			for _, text := range texts {
				if !strings.Contains(shown, "problem: "+text) {
					return false
				}
			}

			return err != nil
		})
	}
	mustTell(address, server)
	status, err := s.Agent.Status()
	if err != nil || status.Well() {
		t.Errorf("the agent is well: %v", err)
	}
	mustAnswer(t, of(s.Node), "127.0.0.1:10256", "/readyz", 503, `"ready":false`, address)
	mustAnswer(t, of(s.Node), "127.0.0.1:10256", "/livez", 200)
	if shown, err := s.Agent.Run("doctor"); err == nil || !strings.Contains(shown, "bindAddress 192.168.50.77") || !strings.Contains(shown, "metricsBindAddress 127.0.0.1:10249") {
		t.Errorf("doctor (%v):\n%s", err, shown)
	}
	s.mustSeeEvent(t, "default", node, "NodeNotAsConfigured", address)
	s.mustSeeEvent(t, "default", node, "NodeNotAsConfigured", server)

	lab.Must(t, taken.Close())
	s.mustMeasure(t, "sluice_node_problems", 1)
	mustTell(address)
	lab.Must(t, s.Lab.Nodes[0].AddAddress("eth0", netip.MustParsePrefix("192.168.50.77/24")))
	lab.EventuallyIn(t, eventTimeout, "all is well", func() bool { _, err := s.Agent.Run("status"); return err == nil })
	mustAnswer(t, of(s.Node), "127.0.0.1:10256", "/readyz", 200)
	s.mustSeeEvent(t, "default", node, "NodeAsConfigured", "configuration: bindAddress is as it should be again")
	s.mustMeasure(t, "sluice_node_problems", 0)
	log := s.Agent.Log()
	for _, text := range []string{"not as it should be", "as it should be again", "field=bindAddress", "value=192.168.50.77"} {
		if !strings.Contains(log, text) {
			t.Errorf("the log has no %q:\n%s", text, log)
		}
	}
}

// A node whose name no Node has serves no endpoint where a policy is Local, and says so.
func TestNodeNameOfNoNode(t *testing.T) {
	s := mustTestbed(t)
	lab.Must(t, s.Agent.Stop())
	s.Agent.SetArgs("--flow-table-memory=4Mi", "--hostname-override=no-such-node", "--healthz-bind-address=127.0.0.1:10256")
	lab.Must(t, s.Agent.Start())
	const told = "configuration: hostnameOverride no-such-node: the cluster has no Node of this name"
	lab.EventuallyIn(t, eventTimeout, "sluice status tells that there is no such Node", func() bool {
		shown, err := s.Agent.Run("status")

		return err != nil && strings.Contains(shown, told)
	})
	mustAnswer(t, of(s.Node), "127.0.0.1:10256", "/readyz", 503, told)
}
