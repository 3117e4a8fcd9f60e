package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// The scripts of testdata run the commands that a user types, and check their output.
// Each has a node of its own, with the manifests that the script has.
//
//	node-1 192.168.50.1, without pods
//
// Beside the commands of package testscript there are
//
//	[!] sluice VERB…              one verb
//	agent start | kill            the agent; it has started when it has synced
//	until PATTERN VERB…           a verb again and again, until its output matches
//	delete-frontend ADDRESS       a frontend out of the map, by hand
//	lead-astray BACKEND ADDRESS   a backend in the map, by hand
//	restyle MAP                   a pinned map, by one of another layout
//
// $HOOKS is how many hooks this kernel has.
func TestScripts(t *testing.T) {
	binary := sluice.MustBinary(t)
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			return setUp(env, binary)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"sluice":          runVerb,
			"agent":           runAgent,
			"until":           runUntil,
			"delete-frontend": deleteFrontend,
			"detach":          detach,
			"lead-astray":     leadAstray,
			"restyle":         restyle,
		},
		UpdateScripts: *update,
	})
}

// setUp makes a script's node. Nothing runs on it yet.
func setUp(env *testscript.Env, binary string) error {
	nodes, err := lab.New(lab.Config{Nodes: 1})
	if err != nil {
		return err
	}
	env.Defer(func() { nodes.Close() })
	cgroup, err := lab.NewCgroup("e2e")
	if err != nil {
		return err
	}
	env.Defer(func() { cgroup.Close() })
	node, err := sluice.NewNode(sluice.Config{
		Binary:    binary,
		Namespace: nodes.Nodes[0].Namespace,
		Cgroup:    cgroup,
		NodeName:  "node-1",
		Manifests: env.Getenv("WORK"),
	})
	if err != nil {
		return err
	}
	env.Defer(func() { node.Close() })
	env.Values["node"] = node
	env.Setenv("CGROUP", cgroup.Path())
	env.Setenv("PINS", node.BPFRoot())
	hooks := len(bpf.SockHooks()) - 1 // one is optional
	traces, err := bpf.KnowsTracing()
	if err != nil {
		return err
	}
	if traces {
		hooks += len(bpf.TraceHooks(bpf.Config{Handshakes: true}))
	}
	env.Setenv("HOOKS", strconv.Itoa(hooks))
	env.Setenv("HOOKS_LESS_ONE", strconv.Itoa(hooks-1))

	return nil
}

func nodeOf(ts *testscript.TestScript) *sluice.Node { return ts.Value("node").(*sluice.Node) }

func runVerb(ts *testscript.TestScript, neg bool, args []string) {
	err := nodeOf(ts).Exec(ts.Stdout(), ts.Stderr(), args...)
	if neg && err == nil {
		ts.Fatalf("it succeeds")
	}
	if !neg {
		ts.Check(err)
	}
}

func runAgent(ts *testscript.TestScript, _ bool, args []string) {
	node := nodeOf(ts)
	switch strings.Join(args, " ") {
	case "kill":
		ts.Check(node.Kill())
	case "start":
		logged := len(node.Log())
		ts.Check(node.Start())
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // see sluice.MustWait
		defer cancel()
		ts.Check(node.WaitSynced(ctx))
		// Or what a script does to a device could still be undone by the first attempt.
		for !strings.Contains(node.Log()[logged:], "attached to devices") {
			ts.Check(ctx.Err())
			time.Sleep(10 * time.Millisecond)
		}
	default:
		ts.Fatalf("usage: agent start | kill")
	}
}

func runUntil(ts *testscript.TestScript, _ bool, args []string) {
	pattern, err := regexp.Compile("(?m)" + args[0])
	ts.Check(err)
	for deadline := time.Now().Add(waitTimeout); ; time.Sleep(10 * time.Millisecond) {
		var out strings.Builder
		_ = nodeOf(ts).Exec(&out, &out, args[1:]...) // its output counts, and not its exit code
		if pattern.MatchString(out.String()) {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("not after %v; last was\n%s", waitTimeout, &out)
		}
	}
}

// pinnedOf opens a node's maps until the script ends.
func pinnedOf(ts *testscript.TestScript) *maps.Pinned {
	pinned, err := maps.Load(nodeOf(ts).BPFRoot())
	ts.Check(err)
	ts.Defer(func() { pinned.Close() })

	return pinned
}

func deleteFrontend(ts *testscript.TestScript, _ bool, args []string) {
	addr := netip.MustParseAddrPort(args[0])
	for _, scope := range []uint8{maps.ScopeInternal, maps.ScopeExternal} {
		ts.Check(pinnedOf(ts).FrontendIDs.Delete(maps.FrontendKeyOf(addr.Addr(), addr.Port(), 6, scope)))
	}
}

// detach detaches the links whose pins match, as another program might.
func detach(ts *testscript.TestScript, _ bool, args []string) {
	pins, err := filepath.Glob(filepath.Join(nodeOf(ts).BPFRoot(), "links", args[0]))
	ts.Check(err)
	if len(pins) == 0 {
		ts.Fatalf("no link is pinned as %s", args[0])
	}
	for _, pin := range pins {
		ts.Check(detachLink(pin))
	}
}

func leadAstray(ts *testscript.TestScript, _ bool, args []string) {
	from, to := netip.MustParseAddrPort(args[0]), netip.MustParseAddrPort(args[1])
	backends := pinnedOf(ts).Backends
	for i, b := range backends.All() {
		if b.Id != 0 && b.AddrPort() == from {
			ts.Check(backends.Put(i, maps.BackendOf(b.Id, b.ServicePortId, to, b.Flags)))

			return
		}
	}
	ts.Check(fmt.Errorf("there is no backend %s", from))
}

func restyle(ts *testscript.TestScript, _ bool, args []string) {
	pin := maps.PinOf(nodeOf(ts).BPFRoot(), args[0])
	ts.Check(os.Remove(pin))
	other, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	ts.Check(err)
	defer other.Close()
	ts.Check(other.Pin(pin))
}
