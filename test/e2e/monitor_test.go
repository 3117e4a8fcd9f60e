package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/monitor"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// monitoring is a `sluice monitor -o json` that runs.
type monitoring struct {
	cmd    *exec.Cmd
	events chan monitor.Event // closed when it has ended
}

// mustMonitor starts `sluice monitor` on node-1, and returns when it listens.
func mustMonitor(t testing.TB, s *testbed, flags ...string) *monitoring {
	t.Helper()
	args := append([]string{"--bpf-root", s.Agent.BPFRoot(), "--cgroup-root", s.Cgroup.Path(), "monitor", "-o", "json"}, flags...)
	m := &monitoring{cmd: exec.Command(s.Agent.Binary(), args...), events: make(chan monitor.Event, 1000)}
	out, err := m.cmd.StdoutPipe()
	lab.Must(t, err)
	before := listeners(t, s)
	lab.Must(t, lab.Start(s.Lab.Nodes[0].Namespace, s.Agent.AgentCgroup(), m.cmd))
	t.Cleanup(func() { m.cmd.Process.Kill() }) // it may have ended
	go func() {
		defer close(m.events)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			var e monitor.Event
			if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
				t.Errorf("monitor prints %q: %v", lines.Text(), err)
			}
			m.events <- e
		}
		m.cmd.Wait() // a test that wants its exit code kills it
	}()
	lab.Eventually(t, "monitor listens", func() bool { return listeners(t, s) > before })

	return m
}

// listeners returns how many listen on node-1, also those that were killed lately.
func listeners(t testing.TB, s *testbed) (n int) {
	t.Helper()
	pinned, err := maps.Load(s.Agent.BPFRoot())
	lab.Must(t, err)
	defer pinned.Close()
	lab.Must(t, pinned.FreeListeners())
	var value struct{ Until, Lost [maps.MaxListeners]uint64 }
	lab.Must(t, pinned.Replacements()["sl_listeners"].Lookup(uint32(0), &value))
	for _, until := range value.Until {
		if until != 0 {
			n++
		}
	}

	return n
}

// short is an event in a few words.
func short(e monitor.Event) string {
	text := fmt.Sprintf("%s %s %s", e.Outcome, e.Reason, e.Service)
	if e.Device != "" {
		text += " at a device"
	}

	return text
}

// mustPrint waits until an event is printed that is, in a few words, as wanted, and returns it.
func (m *monitoring) mustPrint(t testing.TB, want string) monitor.Event {
	t.Helper()
	var seen []string
	for timeout := time.After(time.Minute); ; {
		select {
		case e, goesOn := <-m.events:
			if !goesOn {
				t.Fatalf("monitor has ended; it printed %q, and not %q", seen, want)
			}
			if short(e) == want {
				return e
			}
			seen = append(seen, short(e))
		case <-timeout:
			t.Fatalf("within a minute monitor printed %q, and not %q", seen, want)
		}
	}
}

// `sluice monitor` prints what each client gets, with and without an agent; what happened before is
// printed with --since. One that is killed makes room for another.
func TestMonitor(t *testing.T) {
	s := mustTestbed(t)
	backend := s.Local()[0]
	// Before clients wait for endpoints of web: their refusals are many, and of those only some are kept.
	empty := s.CreateService(t, "empty")
	nowhere := scene.At(empty.Spec.ClusterIPs[0], 80)
	scene.MustFail(t, s.Node.To("tcp", nowhere), scene.Rejected)
	web := s.CreateService(t, "web", scene.NodePort)
	s.SetEndpoints(t, "web", scene.ReadyAll(backend)...)
	at := scene.At(web.Spec.ClusterIPs[0], 80)
	nodePort := scene.At(s.Lab.Nodes[0].IPv4.String(), web.Spec.Ports[0].NodePort)
	scene.MustReach(t, s.Pod.To("tcp", at), backend.Name)
	all, of := mustMonitor(t, s), mustMonitor(t, s, "--service", "empty", "--refused", "--since", "10m")
	name := web.Namespace + "/web:" + web.Spec.Ports[0].Name
	refused := "refused reject_no_backend " + empty.Namespace + "/empty:" + empty.Spec.Ports[0].Name
	of.mustPrint(t, refused) // from before it was started

	for _, test := range []struct {
		client *scene.Client
		dials  string
		want   string
	}{
		{s.Pod, at, "translated translated " + name},
		{s.Node, at, "translated translated " + name},
		{s.Guest, at, "translated translated " + name + " at a device"},
		{s.Outside, nodePort, "translated translated " + name + " at a device"},
	} {
		t.Run(test.client.Name, func(t *testing.T) {
			test.client.To("tcp", test.dials).MustAsk(t)
			e := all.mustPrint(t, test.want)
			if e.Destination.String() != test.dials || e.Backend != netip.AddrPortFrom(backend.IPv4, 8080) {
				t.Errorf("it is printed as %+v", e)
			}
			if test.client.AtSocket && e.PID != uint32(test.client.PID()) {
				t.Errorf("the process is %d %q, want %d", e.PID, e.Process, test.client.PID())
			}
			if !test.client.AtSocket && e.ClientIP != test.client.IPv4 {
				t.Errorf("the client is %s, want %s", e.ClientIP, test.client.IPv4)
			}
		})
	}

	lab.Must(t, s.Agent.Kill())
	for _, client := range []*scene.Client{s.Pod, s.Guest} {
		scene.MustFail(t, client.To("tcp", nowhere), scene.Rejected)
	}
	for _, m := range []*monitoring{all, of} {
		m.mustPrint(t, refused)
		m.mustPrint(t, refused+" at a device")
	}
	out, err := s.Agent.Run("monitor", "--since", "10m", "--no-follow", "--ip", s.Guest.IPv4.String())
	if lines := strings.Count(out, "\n"); err != nil || lines < 2 || !strings.Contains(out, "refused: the Service has no usable endpoint") {
		t.Errorf("monitor --since prints %q, %v", out, err)
	}

	lab.Must(t, of.cmd.Process.Signal(unix.SIGTERM))
	for range of.events {
	}
	if code := of.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("monitor that is interrupted exits with %d", code)
	}
	lab.Must(t, all.cmd.Process.Kill())
	for range all.events {
	}
	if n := listeners(t, s); n != 1 {
		t.Errorf("%d listen after one has ended and one was killed, want its place for some seconds", n)
	}
	lab.Eventually(t, "its place is free", func() bool { return listeners(t, s) == 0 })
}
