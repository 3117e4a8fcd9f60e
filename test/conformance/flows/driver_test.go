package flows

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/pkg/explain"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// driver sends flows from the places of a scenario in which Sluice runs.
type driver struct {
	world     *world
	cgroup    *lab.Cgroup
	maps      *datapathMaps
	callers   map[origin]*lab.Caller
	explainer *explain.Explainer
	ports     []uint16 // that no client had yet whose packets come by a device
}

// origin is where a process runs.
type origin struct {
	ns     *lab.Namespace
	hooked bool // in the cgroup that Sluice has its hooks on
}

func mustDriver(t *testing.T, s *scenario) *driver {
	t.Helper()
	d := &driver{
		world:   mustWorld(t, s),
		cgroup:  lab.MustCgroup(t, "flows"),
		callers: map[origin]*lab.Caller{},
		ports:   s.clientPorts(),
	}
	d.mustStart(t, s)

	return d
}

// mustStart starts the agent and waits until it has all objects of the scenario.
func (d *driver) mustStart(t *testing.T, s *scenario) {
	t.Helper()
	cfg := sluice.Config{
		Binary:     sluice.MustBinary(t),
		Namespace:  d.world.node,
		Cgroup:     d.cgroup,
		NodeName:   s.Node.Name,
		Args:       s.Node.flags(),
		Kubeconfig: mustAPIServer(t, d.world.node, s),
	}
	node, err := sluice.NewNode(cfg)
	lab.Must(t, err)
	t.Cleanup(func() {
		if err := node.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			lab.KeepLog(t, "agent", node.Log())
		}
	})
	lab.Must(t, node.Start())
	d.mustBeProgrammed(t, node, s)
	d.explainer = explain.New(explain.Config{Maps: d.maps.pinned, BPFRoot: node.BPFRoot(), Agent: node.Client()})
	t.Cleanup(func() { lab.Must(t, d.explainer.Close()) })
}

// caller is a process where a flow starts: in the cgroup of the node, in a child
// of it for a pod, or in neither if its packets come by a device.
func (d *driver) caller(t *testing.T, f flow, p path) *lab.Caller {
	t.Helper()
	at := origin{d.world.start(f, p.from), p.socket}
	if d.callers[at] == nil {
		var cgroup *lab.Cgroup
		switch {
		case p.socket && p.from == onNode:
			cgroup = d.cgroup
		case p.socket:
			child, err := d.cgroup.Child(fmt.Sprintf("pod%d", len(d.callers)))
			lab.Must(t, err)
			cgroup = child
		}
		d.callers[at] = lab.MustCaller(t, at.ns, cgroup)
	}

	return d.callers[at]
}

// drive sends a flow on a path in all ways, often enough. It returns what a reader
// of the verdict should know, or what is wrong.
func (d *driver) drive(t *testing.T, s *scenario, f flow, p path) (detail, wrong string) {
	t.Helper()
	d.world.mustAnnounce(t, f.SourceIP, p.from)
	defer d.world.mustAnnounce(t, f.SourceIP, d.world.home(f.SourceIP))
	want := s.expect(f, p)
	var names []string
	for _, w := range s.ways(f, p, want) {
		w.masquerades = func(target netip.AddrPort) (netip.Addr, bool) {
			if !s.masquerades(f, p, target) {
				return netip.Addr{}, false
			}

			return d.world.sourceTo(target.Addr()), true
		}
		names = append(names, w.name)
		if wrong := d.driveOne(t, f, w, want); wrong != "" {
			return "", w.name + ": " + wrong
		}
	}
	note, wrong := s.checkMasquerade(f, p, want)
	if wrong != "" {
		return "", wrong
	}
	detail = fmt.Sprintf("%s (%s)", strings.Join(want.outcomes, " "), strings.Join(names, ", "))
	if p.socket && !slices.Contains(names, "bound") {
		detail += "; a socket bound to " + f.SourceIP.String() + " cannot leave the node"
	}
	for _, note := range []string{want.note, note} {
		if note != "" {
			detail += "; " + note
		}
	}

	return detail, ""
}

// driveOne sends a flow in one way. Silence alone is no proof that Sluice dropped,
// nor is a refusal one that Sluice refused: what it counted is.
func (d *driver) driveOne(t *testing.T, f flow, w way, want expected) (wrong string) {
	t.Helper()
	seen := map[string]int{}
	n := attempts(len(want.outcomes))
	before := d.maps.counts(t)
	switch w.Timeout {
	case silence:
		seen = d.attemptAtOnce(t, f, w, n)
	default:
		for i := 0; i < n && want.stray(seen) == ""; i++ {
			if slices.Contains(want.outcomes, reject) {
				d.maps.forgetBudgets(t)
			}
			seen[d.attempt(t, f, w)()]++
		}
	}
	if wrong := want.check(seen); wrong != "" {
		return wrong
	}
	if wrong := d.explained(t, f, w, want, seen); wrong != "" {
		return wrong
	}

	return want.checkCounts(n, before, d.maps.counts(t))
}

// attemptAtOnce runs attempts in parallel: they wait more than they compute.
func (d *driver) attemptAtOnce(t *testing.T, f flow, w way, n int) map[string]int {
	t.Helper()
	outcomes := make(chan string, n)
	for range n {
		attempt := d.attempt(t, f, w)
		go func() { outcomes <- attempt() }()
	}
	seen := map[string]int{}
	for range n {
		seen[<-outcomes]++
	}

	return seen
}

// attempt returns a function that sends a flow once and returns the outcome. What comes by
// a device has a port that nothing had before: what Sluice knows of an earlier flow
// is not asked about.
func (d *driver) attempt(t *testing.T, f flow, w way) func() string {
	t.Helper()
	if !w.path.socket {
		port := d.mustPort(t)
		w.From = netip.AddrPortFrom(f.SourceIP, port).String()
		if isRaw(f.Protocol) {
			ns := d.world.start(f, w.path.from)

			return func() string { return w.outcome(exchangeRaw(ns, f, port, w.Timeout)) }
		}
	}
	caller := d.caller(t, f, w.path)

	return func() string { return w.outcome(caller.Exchange(w.Exchange)) }
}

// mustPort returns a port that no client had before.
func (d *driver) mustPort(t *testing.T) uint16 {
	t.Helper()
	if len(d.ports) == 0 {
		t.Fatal("this flow has too many targets: all ports of clients are used up")
	}
	port := d.ports[0]
	d.ports = d.ports[1:]

	return port
}
