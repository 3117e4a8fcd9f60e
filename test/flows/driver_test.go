package flows

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// driver sends flows from the places of a scenario in which Sluice runs.
type driver struct {
	world   *world
	cgroup  *lab.Cgroup
	callers map[*lab.Namespace]*lab.Caller
}

func mustDriver(t *testing.T, s *scenario) *driver {
	t.Helper()
	d := &driver{
		world:   mustWorld(t, s),
		cgroup:  lab.MustCgroup(t, "flows"),
		callers: map[*lab.Namespace]*lab.Caller{},
	}
	d.mustStart(t, s)

	return d
}

// mustStart starts the agent and waits until it knows all that the scenario says.
func (d *driver) mustStart(t *testing.T, s *scenario) {
	t.Helper()
	cfg := sluice.Config{
		Binary:    sluice.MustBinary(t),
		Namespace: d.world.node,
		Cgroup:    d.cgroup,
		NodeName:  s.Node.Name,
		Args:      []string{"--nodeport-addresses", s.Node.nodePortAddresses()},
	}
	if s.completedByManifests() {
		cfg.Kubeconfig = mustAPIServer(t, d.world.node, s)
	} else {
		cfg.Manifests = mustManifests(t, s)
	}
	node, err := sluice.NewNode(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := node.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("agent:\n%s", node.Log())
		}
	})
	if err := node.Start(); err != nil {
		t.Fatal(err)
	}
	mustKnow(t, node, s)
}

// mustKnow waits until the agent is at work and has heard of the node's addresses,
// which come from the kernel and not with the objects. If the Node object names no
// address, it first waits half a minute for one, as kube-proxy does. All need not
// be well with it: two Services that want one address are a scenario, too.
func mustKnow(t *testing.T, node *sluice.Node, s *scenario) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := node.WaitSynced(ctx); err != nil {
		t.Fatal(err)
	}
	for ctx.Err() == nil {
		status, err := node.Status()
		if err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(status.Maps, func(m agent.MapFill) bool {
			return m.Name == "addrs" && m.Entries >= len(s.Node.LocalIPs)
		}) {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatal("agent does not know the node's addresses")
}

// caller is a process where a flow starts: in the cgroup of the node, or in a
// child of it for a pod.
func (d *driver) caller(t *testing.T, f flow) *lab.Caller {
	t.Helper()
	ns := d.world.place(f)
	if d.callers[ns] == nil {
		cgroup := d.cgroup
		if ns != d.world.node {
			child, err := d.cgroup.Child(fmt.Sprintf("pod%d", len(d.callers)))
			if err != nil {
				t.Fatal(err)
			}
			cgroup = child
		}
		d.callers[ns] = lab.MustCaller(t, ns, cgroup)
	}

	return d.callers[ns]
}

// drive sends a flow in all ways, often enough. It returns what a reader of the
// verdict should know, or what is wrong.
func (d *driver) drive(t *testing.T, s *scenario, f flow, want expected) (detail, wrong string) {
	t.Helper()
	caller := d.caller(t, f)
	var names []string
	for _, w := range s.ways(f, want) {
		names = append(names, w.name)
		seen := map[string]int{}
		for range attempts(len(want.outcomes)) {
			seen[dial(caller, w)]++
			if wrong = want.stray(seen); wrong != "" {
				return "", w.name + ": " + wrong
			}
		}
		if wrong = want.judge(seen); wrong != "" {
			return "", w.name + ": " + wrong
		}
	}
	detail = fmt.Sprintf("%s (%s)", strings.Join(want.outcomes, " "), strings.Join(names, ", "))
	if !slices.Contains(names, "bound") {
		detail += "; a socket bound to " + f.SourceIP.String() + " cannot leave the node"
	}
	if want.note != "" {
		detail += "; " + want.note
	}

	return detail, ""
}
