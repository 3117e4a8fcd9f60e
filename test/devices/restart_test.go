package devices

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// TestRestart has agents go and come back under a client that dials 300 new
// connections a second and keeps some others: nothing fails, also while there are
// no agents.
//
//	client ─┬─ node port, load balancer ─┬─ pod-1-1
//	pod-1-0 ┴─ cluster IP ───────────────┴─ pod-2-0
func TestRestart(t *testing.T) {
	newer, err := sluice.Build(t.TempDir(), "newer")
	lab.Must(t, err)
	otherLayout, err := sluice.BuildOtherLayout(t.TempDir())
	lab.Must(t, err)
	for _, attach := range []string{"tcx", "clsact"} {
		t.Run(attach, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{
				Config: lab.Config{OverlayMTU: 1450, Attachment: lab.Routed},
				filter: bridgeCNI,
				agent:  []string{"--device-attach", attach, "--flow-table-memory", "16Mi"},
			})
			w.mustBeStrict(t)
			c := casesOf(w)
			w.start(t, c.local, c.remote)
			load := w.mustLoad(t, c)
			for _, test := range []struct {
				name string
				end  func(*sluice.Node) error
			}{
				{"killed", (*sluice.Node).Kill},
				{"stopped", (*sluice.Node).Stop},
				{"upgraded", func(agent *sluice.Node) error {
					err := agent.Stop()
					agent.SetBinary(newer)
					return err
				}},
				{"upgraded to another layout of the maps", func(agent *sluice.Node) error {
					err := agent.Stop()
					agent.SetBinary(otherLayout)
					return err
				}},
				{"downgraded", func(agent *sluice.Node) error {
					err := agent.Stop()
					agent.SetBinary(newer)
					return err
				}},
				{"stopped, with another size of flow tables", func(agent *sluice.Node) error {
					agent.SetArgs(w.args("--device-attach", attach, "--flow-table-memory", "64Mi")...)
					return agent.Stop()
				}},
			} {
				for _, agent := range w.agents {
					lab.Must(t, test.end(agent))
				}
				time.Sleep(300 * time.Millisecond) // without an agent
				w.restart(t)
				time.Sleep(200 * time.Millisecond)
				t.Logf("%s, and started again", test.name)
			}
			load.mustHaveWorked(t)
			if log := w.agents[0].Log(); !strings.Contains(log, "keeps the size that it was created with") {
				t.Error("the agent does not log that the flow tables keep their size")
			}
		})
	}
}

// loads are under way at once.
type loads []*lab.RunningLoad

// mustLoad starts new connections, and some that stay, from the client and from a
// pod that no socket hook sees, each to both Services.
func (w *world) mustLoad(t *testing.T, c *cases) loads {
	t.Helper()
	var all loads
	start := func(from *lab.Caller, network, address string, rate, keep int) {
		load, err := from.StartLoad(lab.Load{
			Exchange: lab.Exchange{Network: network, Address: address, Timeout: dialTimeout},
			Rate:     rate,
			Keep:     keep,
		})
		lab.Must(t, err)
		all = append(all, load)
	}
	client, pod := w.outside(t), w.optedOut(t, w.Nodes[0].Pods[0])
	for i, s := range []service{c.local, c.remote} {
		f := families[i]
		start(client, "tcp", s.at(nodePort, f, w.Nodes[0]), 80, 0)
		start(client, "udp", s.at(loadBalancer, f, nil), 40, 0)
		start(client, "tcp", s.at(loadBalancer, f, nil), 40, 10)
		start(client, "udp", s.at(nodePort, f, w.Nodes[0]), 40, 10)
		start(pod, "tcp", s.at(clusterIP, f, nil), 30, 0)
		start(pod, "tcp", s.at(clusterIP, f, nil), 20, 5)
	}

	return all
}

// mustHaveWorked stops the loads. The test fails if one exchange has failed.
func (l loads) mustHaveWorked(t *testing.T) {
	t.Helper()
	var errs error
	for i, load := range l {
		report, err := load.Stop()
		errs = errors.Join(errs, err)
		if report.Succeeded == 0 || len(report.Failures) > 0 {
			t.Errorf("load %d: %d of %d exchanges succeeded; failures: %v", i, report.Succeeded, report.Started, first(report.Failures))
		}
	}
	lab.Must(t, errs)
}

// first is enough to see what went wrong.
func first(failures []lab.LoadFailure) []lab.LoadFailure { return failures[:min(len(failures), 5)] }

// TestPortOfASwitch has a pod ask a node port from one port, first while its device translates datagrams, then as its
// socket does. The device still has the flow of the former, and the answer to the latter reaches its socket.
func TestPortOfASwitch(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, agent: []string{"--udp=off"}})
	pods := []service{
		{number: 44, backends: []backend{onPod(w.Nodes[0].Pods[1])}},
		{number: 45, backends: []backend{onPod(w.Nodes[1].Pods[0])}},
	}
	w.start(t, pods...)
	client := w.Nodes[0].Pods[0]
	caller := lab.MustCaller(t, client.Namespace, w.cgroups[0])
	ask := func(when string) {
		t.Helper()
		for _, s := range pods {
			for _, f := range families {
				from := netip.AddrPortFrom([2]netip.Addr{client.IPv4, client.IPv6}[f], 50000+uint16(s.number))
				for _, way := range []way{nodePort, clusterIP} {
					answer, err := answerTo(caller, lab.Exchange{Network: "udp", Address: s.at(way, f, w.Nodes[0]), From: from.String(), Timeout: dialTimeout})
					if err != nil || answer.Name != s.backends[0].name {
						t.Errorf("%s: %s, %s of %s: %q, %v", when, f, way, s.name(), answer.Name, err)
					}
				}
			}
		}
	}
	ask("at the device")
	sluice.MustRestart(t, w.agents[0], w.args("--udp=all")...)
	ask("at the socket")
	sluice.MustRestart(t, w.agents[0], w.args("--udp=off")...)
	ask("at the device again")
}
