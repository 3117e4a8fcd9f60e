package migrate

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/realproxy"
	"github.com/sluice-lb/sluice/test/scene"
)

// Each step of docs/migrate.md, there and back, under load: no connection that is open ends, and no new one fails. The
// commands are those that the page prints, in its order.
//
//	pod, guest (without socket hooks), node ── ClusterIP, node port ─┬─ pod-1-0 on node-1
//	                                 outside ── node port of node-1 ─┴─ pod-2-0 on node-2
func TestMigrate(t *testing.T) {
	for _, mode := range []realproxy.Mode{realproxy.NFTables, realproxy.IPTables} {
		t.Run(string(mode), func(t *testing.T) {
			w := mustBuild(t, mode, "ClusterCIDR")
			w.SetEndpoints(t, "web", scene.ReadyAll(w.Local()[0], w.Remote()[0])...)
			w.CreateService(t, "web", scene.NodePort)
			w.mustStartKubeProxy(t)
			w.mustSync(t)
			l := w.mustBegin(t)
			for _, step := range w.steps(t) {
				begin := time.Now()
				l.mustOpen(t)
				if strings.HasPrefix(step.command, "sluice cleanup --drain") {
					l.mustEndDuring(t, step.do)
				} else {
					lab.Must(t, step.do())
				}
				moved := l.mustGoOn(t)
				t.Logf("%s: %d open connections, %d of %d UDP sockets have got another backend, %v: %s", begin.Format("15:04:05.000"),
					len(l.open), moved, len(l.datagrams), time.Since(begin).Round(time.Millisecond), step.command)
			}
			l.mustEnd(t)
			if rules, err := lab.Output(w.Lab.Nodes[0].Namespace, nil, "nft", "list", "tables"); err != nil || strings.Contains(rules, "sluice") {
				t.Errorf("tables that are left: %s, %v", rules, err)
			}
		})
	}
}

// page is what an operator reads.
const page = "../../docs/migrate.md"

// step is one command of the page.
type step struct {
	command string
	do      func() error
}

// steps returns the commands of the page, in its order. Those of sluice run as they are printed. There is no kubelet
// here, so those of kubectl do to the node what a DaemonSet would.
func (w *world) steps(t *testing.T) []step {
	t.Helper()
	text, err := os.ReadFile(page)
	lab.Must(t, err)
	daemonSets := map[string]func() error{
		"kubectl -n kube-system get daemonset,configmap kube-proxy -o yaml > kube-proxy.yaml": func() error { return nil },
		"kubectl apply -k .": func() error { w.mustStartSluice(t); return nil },
		"kubectl -n kube-system delete daemonset kube-proxy": func() error { return w.proxy.Close() },
		"kubectl apply -f kube-proxy.yaml":                   func() error { w.mustStartKubeProxy(t); w.mustAgree(t); return nil },
		"kubectl -n kube-system delete daemonset sluice":     w.Agent.Stop,
	}
	var all []step
	for _, block := range regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
		for line := range strings.Lines(block[1]) {
			command := strings.TrimSpace(line)
			if command == "" {
				continue // a block in a list is indented, and so is its end
			}
			do, known := daemonSets[command]
			verb, isSluice := strings.CutPrefix(command, "sluice ")
			switch {
			case isSluice:
				do = func() error {
					printed, err := w.Agent.Run(strings.Fields(verb)...)
					t.Logf("$ %s\n%s", command, printed)

					return err
				}
			case !known:
				t.Fatalf("%s has a command that this test does not know: %q", page, command)
			}
			all = append(all, step{command, do})
		}
	}
	if len(all) < 8 {
		t.Fatalf("%s has %d commands only", page, len(all))
	}

	return all
}

// traffic is what goes on all the time: new connections at a steady rate, some that stay open and take turns in asking,
// and some that are opened before each step, and only asked after it and those that follow.
type traffic struct {
	*world
	dials       []scene.Dial
	fresh, kept []*lab.RunningLoad // of each dial
	open        []*scene.Connection
	datagrams   []*scene.Connection // connected UDP sockets, opened at the beginning
}

// The new connections of each dial a second, and those that stay open.
const (
	rate = 20
	kept = 4
)

// mustBegin starts the loads, while only kube-proxy translates.
func (w *world) mustBegin(t *testing.T) *traffic {
	t.Helper()
	svc, err := w.Client.CoreV1().Services(w.Objects.Namespace).Get(t.Context(), "web", metav1.GetOptions{})
	lab.Must(t, err)
	node, l := w.Lab.Nodes[0], &traffic{world: w}
	for i, network := range []string{"tcp", "udp"} {
		nodePort := svc.Spec.Ports[i].NodePort
		for family, ip := range svc.Spec.ClusterIPs {
			l.dials = append(l.dials, scene.Dials([]*scene.Client{w.Pod, w.Guest, w.Node}, network, scene.At(ip, scene.ServicePort))...)
			address := []netip.Addr{node.IPv4, node.IPv6}[family]
			l.dials = append(l.dials, scene.Dials([]*scene.Client{w.Pod, w.Outside}, network, scene.At(address.String(), nodePort))...)
		}
	}
	for _, d := range l.dials {
		scene.MustReach(t, d, w.Local()[0].Name, w.Remote()[0].Name)
		fresh, err := d.From.StartLoad(lab.Load{Exchange: d.Exchange(), Rate: rate})
		lab.Must(t, err)
		lasting, err := d.From.StartLoad(lab.Load{Exchange: d.Exchange(), Rate: 2 * kept, Keep: kept})
		lab.Must(t, err)
		l.fresh, l.kept = append(l.fresh, fresh), append(l.kept, lasting)
		if d.Network == "udp" {
			l.datagrams = append(l.datagrams, d.MustOpen(t), d.MustOpen(t))
		}
	}

	return l
}

// mustOpen opens two more TCP connections of each dial, one to each backend as a rule.
func (l *traffic) mustOpen(t *testing.T) {
	t.Helper()
	for _, d := range l.dials {
		if d.Network == "tcp" {
			l.open = append(l.open, d.MustOpen(t), d.MustOpen(t))
		}
	}
}

// mustGoOn fails the test unless the backend that answered first still answers on each open connection, and some backend
// on each UDP socket. It returns how many of these another backend answers than before.
func (l *traffic) mustGoOn(t *testing.T) (moved int) {
	t.Helper()
	dead := make([]string, len(l.open))
	var asking sync.WaitGroup
	for i, c := range l.open {
		asking.Go(func() {
			if answer, err := c.Ask(); err != nil || answer.Name != c.Pod {
				dead[i] = fmt.Sprintf("%s: %q answers, %v, want %s", c.Dial, answer.Name, err, c.Pod)
			}
		})
	}
	asking.Wait()
	dead = slices.DeleteFunc(dead, func(text string) bool { return text == "" })
	if len(dead) > 0 {
		t.Fatalf("%d of %d open connections are dead:\n%s", len(dead), len(l.open), strings.Join(dead[:min(len(dead), 10)], "\n"))
	}
	for _, c := range l.datagrams {
		answer, err := c.Ask()
		if err != nil {
			t.Fatalf("%s: %v", c.Dial, err)
		}
		if answer.Name != c.Pod {
			moved++
			c.Pod = answer.Name
		}
	}

	return moved
}

// mustEndDuring gives back: while the command waits for connections of devices, all go on, and then end by themselves.
// Those that were translated at a socket stay open, and so do those of kube-proxy's rules.
func (l *traffic) mustEndDuring(t *testing.T, giveBack func() error) {
	t.Helper()
	given := make(chan error, 1)
	go func() { given <- giveBack() }()
	time.Sleep(3 * time.Second)
	l.mustGoOn(t)
	l.mustBeReserved(t)
	select {
	case err := <-given:
		t.Fatalf("it has not waited for open connections: %v", err)
	default:
	}
	var stay []*scene.Connection
	for _, c := range l.open {
		if c.From.AtSocket {
			stay = append(stay, c)
		} else {
			scene.MustClose(t, c)
		}
	}
	l.open = stay
	for i, d := range l.dials {
		if d.Network == "udp" {
			l.mustStop(t, "kept open", d, l.kept[i])
			l.kept[i] = nil
		}
	}
	lab.Must(t, <-given)
}

// mustBeReserved waits until netfilter knows the ports by which devices masquerade open connections, so that it uses them
// for no other one.
func (w *world) mustBeReserved(t *testing.T) {
	t.Helper()
	lab.Eventually(t, "ports of masquerades are reserved", func() error {
		text, err := w.Agent.Run("flows", "-o", "json")
		if err != nil {
			return err
		}
		var flows []flow.Flow
		if err := json.Unmarshal([]byte(text), &flows); err != nil {
			return err
		}
		known, err := w.tracked()
		masqueraded := 0
		for _, f := range flows {
			if !f.Masquerade.IsValid() || f.State == flow.Closed {
				continue
			}
			masqueraded++
			protocol := map[string]uint8{"TCP": unix.IPPROTO_TCP, "UDP": unix.IPPROTO_UDP}[f.Protocol]
			if !known[fmt.Sprint(protocol, f.Masquerade.Addr(), f.Masquerade.Port(), f.Backend.Addr(), f.Backend.Port())] {
				err = errors.Join(err, fmt.Errorf("%s to %s", f.Masquerade, f.Backend))
			}
		}
		if masqueraded < 10 {
			err = errors.Join(err, fmt.Errorf("only %d flows are masqueraded", masqueraded))
		}

		return err
	})
}

// tracked returns the connections that netfilter knows on the first node: protocol, source and destination.
func (w *world) tracked() (map[string]bool, error) {
	known := make(map[string]bool)
	err := w.Lab.Nodes[0].Do(func() error {
		for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
			entries, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
			if err != nil {
				return err
			}
			for _, e := range entries {
				known[fmt.Sprint(e.Forward.Protocol, e.Forward.SrcIP, e.Forward.SrcPort, e.Forward.DstIP, e.Forward.DstPort)] = true
			}
		}

		return nil
	})

	return known, err
}

// mustEnd ends all, and fails the test if a single exchange has failed.
func (l *traffic) mustEnd(t *testing.T) {
	t.Helper()
	for i, d := range l.dials {
		l.mustStop(t, "new", d, l.fresh[i])
		if l.kept[i] != nil {
			l.mustStop(t, "kept open", d, l.kept[i])
		}
	}
	scene.MustClose(t, l.open...)
}

func (l *traffic) mustStop(t *testing.T, what string, d scene.Dial, load *lab.RunningLoad) {
	t.Helper()
	report, err := load.Stop()
	lab.Must(t, err)
	t.Logf("%s, %s: %d exchanges, %d failed, the longest took %v", d, what, report.Started, len(report.Failures), report.Longest.Round(time.Millisecond))
	if n := len(report.Failures); n > 0 || report.Succeeded < rate {
		t.Errorf("%s, %s: %d of %d exchanges failed: %v", d, what, n, report.Started, report.Failures[:min(n, 5)])
	}
}

// A UDP socket that has connected while kube-proxy translated follows its Service when kube-proxy is gone, as it has done
// before.
func TestDatagramsFollow(t *testing.T) {
	for _, mode := range []realproxy.Mode{realproxy.NFTables, realproxy.IPTables} {
		t.Run(string(mode), func(t *testing.T) {
			w := mustBuild(t, mode, "ClusterCIDR")
			first, second := w.Local()[0], w.Remote()[0]
			w.SetEndpoints(t, "web", scene.ReadyAll(first)...)
			svc := w.CreateService(t, "web", scene.NodePort)
			w.mustStartKubeProxy(t)
			w.mustSync(t)
			var sockets []*scene.Connection
			for _, ip := range svc.Spec.ClusterIPs {
				for _, d := range scene.Dials([]*scene.Client{w.Pod, w.Guest, w.Node}, "udp", scene.At(ip, scene.ServicePort)) {
					scene.MustReach(t, d, first.Name)
					sockets = append(sockets, d.MustOpen(t))
				}
			}
			lab.Must(t, w.proxy.Close())
			w.mustStartSluice(t)
			printed, err := w.Agent.Run("cleanup", "--kube-proxy", "--drain", "0s")
			lab.Must(t, err)
			t.Log(printed)
			w.SetEndpoints(t, "web", scene.ReadyAll(second)...)
			for _, c := range sockets {
				lab.Eventually(t, fmt.Sprintf("%s: answered by %s", c.Dial, second.Name), func() error {
					answer, err := c.Ask()
					if err == nil && answer.Name != second.Name {
						err = fmt.Errorf("answered by %s", answer.Name)
					}
					return err
				})
			}
		})
	}
}

// Another program takes the table that keeps connections of kube-proxy's rules alive, with all other rules. It is put back,
// and the connections go on.
func TestFlushOfTheKeeper(t *testing.T) {
	w := mustBuild(t, realproxy.NFTables, "ClusterCIDR")
	w.SetEndpoints(t, "web", scene.ReadyAll(w.Local()[0], w.Remote()[0])...)
	svc := w.CreateService(t, "web", scene.NodePort)
	w.mustStartKubeProxy(t)
	w.mustSync(t)
	node := w.Lab.Nodes[0]
	l := &traffic{world: w}
	for family, ip := range svc.Spec.ClusterIPs {
		nodePort := scene.At([]netip.Addr{node.IPv4, node.IPv6}[family].String(), svc.Spec.Ports[0].NodePort)
		l.dials = append(l.dials, w.Guest.To("tcp", scene.At(ip, scene.ServicePort)), w.Node.To("tcp", scene.At(ip, scene.ServicePort)), w.Outside.To("tcp", nodePort))
	}
	for _, d := range l.dials {
		scene.MustReach(t, d, w.Local()[0].Name, w.Remote()[0].Name)
	}
	l.mustOpen(t)
	lab.Must(t, w.proxy.Close())
	w.mustStartSluice(t)
	printed, err := w.Agent.Run("cleanup", "--kube-proxy", "--drain", "0s")
	lab.Must(t, err)
	t.Log(printed)
	l.mustGoOn(t)

	for range 3 {
		if out, err := lab.Output(node.Namespace, nil, "nft", "flush", "ruleset"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		lab.Eventually(t, "the table is back", func() bool {
			tables, err := lab.Output(node.Namespace, nil, "nft", "list", "tables")

			return err == nil && strings.Contains(tables, "sluice-keeper")
		})
		l.mustGoOn(t)
	}
	if !strings.Contains(w.Agent.Log(), "it is put back") {
		t.Error("the agent does not log it")
	}
	for _, c := range l.open {
		lab.Must(t, c.Socket.Close())
	}
	if out, err := w.Agent.Run("cleanup", "--kube-proxy", "--drain", "60s"); err != nil || !strings.Contains(out, "removed: the table") {
		t.Errorf("when the connections have ended: %v, %s", err, out)
	}
	time.Sleep(time.Second)
	if tables, err := lab.Output(node.Namespace, nil, "nft", "list", "tables"); err != nil || strings.Contains(tables, "sluice-keeper") {
		t.Errorf("it is put back though no connection needs it: %s, %v", tables, err)
	}
}
