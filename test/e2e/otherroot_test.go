package e2e

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// A node's agent gets another bpf root, as by an edit of its flags. Clients do not notice, open connections go on, and
// the new agent, not what the former left, is in charge: a change of endpoints reaches all clients. The tools name
// what is pinned elsewhere: status and doctor while no agent runs, and cleanup with the former root.
//
//	pod, node-1 ────── web:80 ─────┬─ pod-1-0
//	node-2 ── node port of node-1 ─┴─ pod-2-0
func TestAnotherBPFRoot(t *testing.T) {
	s := mustTestbed(t)
	outside := scene.MustClientIn(t, "outside", s.Lab.Nodes[1].Namespace, nil)
	s.SetEndpoints(t, "web", scene.ReadyAll(s.Local()[0], s.Remote()[0])...)
	web := s.CreateService(t, "web", scene.NodePort)
	clusterIP := scene.At(web.Spec.ClusterIPs[0], 80)
	nodePort := scene.At(s.Lab.Nodes[0].IPv4.String(), web.Spec.Ports[0].NodePort)
	for from, address := range map[*scene.Client]string{s.Pod: clusterIP, s.Node: clusterIP, outside: nodePort} {
		scene.MustReach(t, from.To("tcp", address), s.Local()[0].Name, s.Remote()[0].Name)
	}
	load := scene.MustDial(t, 50, s.Pod.To("tcp", clusterIP), s.Node.To("udp", clusterIP), outside.To("tcp", nodePort))
	var open []*lab.Socket
	for from, address := range map[*scene.Client]string{s.Pod: clusterIP, outside: nodePort} {
		for range 10 {
			socket, err := from.Socket("tcp4")
			lab.Must(t, err)
			lab.Must(t, socket.Connect(address))
			mustAsk(t, socket)
			open = append(open, socket)
		}
	}

	before, after := s.Agent.BPFRoot(), s.Agent.BPFRoot()+"-2"
	t.Cleanup(func() { // the agent's own clean-up knows the former root
		_, err := s.Agent.Run("--bpf-root", after, "cleanup", "--drain", "0s")
		lab.Must(t, err)
	})
	lab.Must(t, s.Agent.Kill())
	for _, verb := range []string{"status", "doctor"} {
		out := new(bytes.Buffer)
		if err := s.Agent.Exec(out, out, "--bpf-root", after, verb); err == nil || !strings.Contains(out.String(), "pinned below "+before) {
			t.Errorf("%s with the next root ends with %v, and does not name %s:\n%s", verb, err, before, out)
		}
	}
	s.Agent.SetArgs("--bpf-root", after)
	lab.Must(t, s.Agent.Start())
	sluice.MustWait(t, s.Agent)
	load.MustKeepUp(t)
	for _, socket := range open {
		mustAsk(t, socket)
	}
	if !strings.Contains(s.Agent.Log(), "moved to "+after) {
		t.Errorf("its log does not say what it took over:\n%s", s.Agent.Log())
	}
	s.mustSeeEvent(t, "default", s.NodeName(s.Lab.Nodes[0]), "OtherSluiceTakenOver", "moved to "+after)

	s.SetEndpoints(t, "web", scene.ReadyAll(s.Local()[1])...)
	for from, address := range map[*scene.Client]string{s.Pod: clusterIP, s.Node: clusterIP, outside: nodePort} {
		scene.MustReach(t, from.To("tcp", address), s.Local()[1].Name)
	}

	lab.Must(t, s.Agent.Kill())
	out := new(bytes.Buffer)
	if err := s.Agent.Exec(out, out, "cleanup", "--drain", "0s"); err == nil || !strings.Contains(out.String(), "sluice --bpf-root "+after+" cleanup") {
		t.Errorf("cleanup with the former root ends with %v, and does not say what it leaves:\n%s", err, out)
	}
	scene.MustReach(t, s.Pod.To("tcp", clusterIP), s.Local()[1].Name)
	if _, err := s.Agent.Run("--bpf-root", after, "cleanup", "--drain", "0s"); err != nil {
		t.Errorf("cleanup: %v", err)
	}
	if _, err := os.Stat(before); !os.IsNotExist(err) {
		t.Errorf("the former root is still there: %v", err)
	}
}
