package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/status"
)

func TestStatusOfHooks(t *testing.T) {
	hooks := []datapath.HookState{{Name: "connect4", Problem: "not attached"}, {Name: "connect6"}}
	for _, test := range []struct {
		name   string
		status status.Status
		want   string
	}{
		{"effective", status.Status{Hooks: hooks[1:]}, "hooks     1 of 1 attached to /cgroup, effective\n"},
		{
			"not effective",
			status.Status{Hooks: hooks, Effective: fmt.Errorf("%w: connect4: connect to 192.0.0.8:9", datapath.ErrNotEffective).Error()},
			"hooks     1 of 2 attached to /cgroup, but NOT effective: sockets are not translated: connect4: connect to 192.0.0.8:9\n" +
				"          connect4: not attached\n",
		},
		{
			"not known to be effective",
			status.Status{Hooks: hooks[1:], Effective: fmt.Errorf("%w: fork", datapath.ErrNotProbed).Error()},
			"hooks     1 of 1 attached to /cgroup, but hooks could not be tried: fork\n",
		},
		{
			"on a machine that is too slow",
			status.Status{Hooks: hooks[1:], Untried: datapath.ErrSlow.Error()},
			"hooks     1 of 1 attached to /cgroup, but hooks could not be tried: the trial takes too long\n",
		},
		{
			"of an agent whose watches are heard from",
			status.Status{Running: true, Synced: true, Silence: map[string]time.Duration{"services": 50 * time.Second, "nodes": 2 * time.Second}},
			"heard     all watches, 50s ago or later\n",
		},
		{
			"of an agent whose watches are silent",
			status.Status{Running: true, Synced: true, Silence: map[string]time.Duration{"services": 3 * time.Minute, "nodes": 121 * time.Second, "servicecidrs": 0}},
			"heard     but the API server has been silent about nodes for 2m1s\n          the API server has been silent about services for 3m0s\n",
		},
		{"of an agent that lets packets past the stack", status.Status{Running: true}, "forwarding: what goes to backends on other nodes does not pass the network stack\n"},
		{"of an agent that does not", status.Status{Running: true, ThroughStack: "--forwarding stack"}, "forwarding: stack, because --forwarding stack\n"},
		{
			"on a kernel that lacks something", status.Status{Missing: []string{"no tcx: clsact", "no storage: not measured"}},
			"kernel    no tcx: clsact\nkernel    no storage: not measured\n",
		},
		{
			"of an agent that does not know all of its configuration",
			status.Status{Running: true, Ignored: []string{"featureGates[NoSuch]: Sluice knows no such gate"}},
			"ignored   featureGates[NoSuch]: Sluice knows no such gate\n",
		},
		{
			"of ports to masquerade with", status.Status{Running: true, MasqueradePorts: "1024-29999 (28976 ports)"},
			"masquerade: with the ports 1024-29999 (28976 ports)\n",
		},
		{
			"of ports that sockets get as well", status.Status{Running: true, MasqueradePorts: "1024-29999 (28976 ports)", PortsProblem: "sockets get them"},
			"masquerade: with the ports 1024-29999 (28976 ports); sockets get them\n",
		},
		{
			"of a node where some is not translated", status.Status{Running: true, Limits: []string{"SCTP of its processes"}},
			"not translated: SCTP of its processes\n",
		},
		{
			"effective in a part of the machine",
			status.Status{Hooks: hooks[1:], NotCovered: "sockets of processes outside of this cgroup"},
			"hooks     1 of 1 attached to /cgroup, effective\n" +
				"          not covered: sockets of processes outside of this cgroup\n",
		},
	} {
		test.status.CgroupRoot = "/cgroup"
		test.status.Counts = map[string]uint64{"sent to a backend": 7}
		var out bytes.Buffer
		if err := newOutput().print(&out, nil, func(t *table) { drawStatus(t, test.status) }); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out.String(), test.want) {
			t.Errorf("%s: got\n%swant\n%s", test.name, out.String(), test.want)
		}
		if want := "COUNT   OUTCOME\n7       sent to a backend\n"; !strings.HasSuffix(out.String(), want) {
			t.Errorf("%s: got\n%swant at its end\n%s", test.name, out.String(), want)
		}
	}
}
