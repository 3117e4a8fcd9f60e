package reconcile

import (
	"flag"
	"fmt"
	stdmaps "maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/tools/txtar"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/lab"
)

var update = flag.Bool("update", false, "rewrite what the scripts in testdata expect")

// defaultCapacities are the capacities of maps in scripts.
var defaultCapacities = map[string]uint32{
	maps.NameFrontendIDs: 1000, maps.NameSlots: 1000, maps.NameBackends: 1000, maps.NameServicePorts: 1000,
	maps.NameFrontends: 1000, maps.NamePools: 1000,
	maps.NameAddrs: 1000, maps.NameAffinity: 16, maps.NameUDPPins: 16,
	maps.NameFlows: 16, maps.NameHalfOpen: 16, maps.NameFragments: 16, maps.NameICMPBudgets: 16,
}

// TestScripts runs testdata/*.txtar. A script is a list of steps; steps with output (maps, writes,
// status, drift, repair, gone) are compared with the expected output. The other steps are:
//
//	capacity    how many entries maps have room for: "backends 3"
//	want        all Services there are: see mustParseDesired
//	node-addrs  addresses of the node: see mustParseNodeAddrs
//	devices     devices of the node: see mustParseDevices
//	cidrs       ranges of ClusterIPs
//	local-cidrs ranges of pods
//	apply       nothing else
//	flows       original destinations of flows: none before this step
//	grace       a grace period passes
//	wait 1s     time passes, and all grace periods, then all flows are scanned
//	restart     the agent starts again; nothing is wanted yet
//	upgrade     a build with another layout starts: it finds only what maps.Create inherits
//	prune       every Service that is wanted is known
//	tamper      another program writes: see script.tamper
func TestScripts(t *testing.T) {
	for _, path := range mustGlob(t) {
		t.Run(scriptName(path), func(t *testing.T) {
			t.Parallel()
			runScript(t, path, fakeTables)
		})
	}
}

// TestScriptsOnRealMaps runs the same scripts on maps in the kernel.
func TestScriptsOnRealMaps(t *testing.T) {
	if *update {
		t.Skip("scripts are updated on fake maps")
	}
	for _, path := range mustGlob(t) {
		t.Run(scriptName(path), func(t *testing.T) {
			runScript(t, path, mustCreateTables)
		})
	}
}

func mustGlob(t *testing.T) []string {
	t.Helper()
	paths, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(paths) == 0 {
		t.Fatal("no scripts", err)
	}

	return paths
}

func scriptName(path string) string { return strings.TrimSuffix(filepath.Base(path), ".txtar") }

func fakeTables(_ testing.TB, capacities map[string]uint32) maps.Tables {
	f := maps.NewFakes(int(capacities[maps.NameSlots]))
	f.FrontendIDs.Size = int(capacities[maps.NameFrontendIDs])
	f.ServicePorts.Size = int(capacities[maps.NameServicePorts])
	f.Addrs.Size = int(capacities[maps.NameAddrs])
	limitArrays(f.Tables, capacities)

	return f.Tables
}

// limitArrays sets the capacities of arrays, place 0 not counted.
func limitArrays(t maps.Tables, capacities map[string]uint32) {
	t.Frontends.SetLimit(int(capacities[maps.NameFrontends]) + 1)
	t.Pools.SetLimit(int(capacities[maps.NamePools]) + 1)
	t.Slots.SetLimit(int(capacities[maps.NameSlots]) + 1)
	t.Backends.SetLimit(int(capacities[maps.NameBackends]) + 1)
}

// mustCreateTables returns maps in the kernel that are closed with the test.
func mustCreateTables(t testing.TB, capacities map[string]uint32) maps.Tables {
	t.Helper()
	hashes := stdmaps.Clone(capacities)
	for _, name := range []string{maps.NameFrontends, maps.NamePools, maps.NameSlots, maps.NameBackends} {
		delete(hashes, name)
	}
	pinned := mapstest.MustCreate(t, hashes)
	limitArrays(pinned.Tables, capacities)

	return pinned.Tables
}

// script is one run of a script.
type script struct {
	t      *testing.T
	create func() maps.Tables // empty ones
	tables maps.Tables
	clock  *testClock
	log    writeLog
	r      *Reconciler
	set    []lb.ServiceName
	flows  map[maps.Addr]struct{}
}

func runScript(t *testing.T, path string, tables func(testing.TB, map[string]uint32) maps.Tables) {
	archive, err := txtar.ParseFile(path)
	lab.Must(t, err)
	capacities := make(map[string]uint32)
	for name, n := range defaultCapacities {
		capacities[name] = n
	}
	for _, file := range archive.Files {
		if file.Name == "capacity" {
			mustParseCapacities(t, string(file.Data), capacities)
		}
	}
	s := &script{t: t, create: func() maps.Tables { return tables(t, capacities) }, clock: newTestClock()}
	s.tables = s.create()
	s.restart()
	for i, file := range archive.Files {
		output, has := s.step(file.Name, string(file.Data))
		if !has {
			continue
		}
		if *update {
			archive.Files[i].Data = []byte(output)

			continue
		}
		if diff := cmp.Diff(lines(string(file.Data)), lines(output), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("step %d, %s (-want +got):\n%s", i+1, file.Name, diff)
		}
	}
	if *update {
		lab.Must(t, os.WriteFile(path, txtar.Format(archive), 0o644))
	}
}

func mustParseCapacities(t *testing.T, text string, capacities map[string]uint32) {
	t.Helper()
	for line := range strings.Lines(text) {
		var name string
		var n uint32
		if _, err := fmt.Sscan(line, &name, &n); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		capacities[name] = n
	}
}

func lines(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == '\n' })
}

// step executes one step. It returns its output, and whether it has any.
func (s *script) step(name, body string) (string, bool) {
	verb, argument, _ := strings.Cut(name, " ")
	switch verb {
	case "capacity":
	case "want":
		s.want(body)
	case "node-addrs":
		s.r.SetNodeAddrs(mustParseNodeAddrs(s.t, body))
		s.apply()
	case "cidrs":
		// Single addresses are those of Services of another proxy.
		var others []netip.Addr
		prefixes := mustParsePrefixes(s.t, body)
		for _, prefix := range prefixes {
			if prefix.IsSingleIP() {
				others = append(others, prefix.Addr())
			}
		}
		s.r.SetServiceCIDRs(prefixes, others)
		s.apply()
	case "local-cidrs":
		s.r.SetLocalCIDRs(mustParsePrefixes(s.t, body))
		s.apply()
	case "opted-out":
		s.r.SetOptedOut(lines(body))
		s.apply()
	case "devices":
		s.r.SetDevices(mustParseDevices(s.t, body))
		s.apply()
	case "flows":
		s.flows = make(map[maps.Addr]struct{})
		for line := range strings.Lines(body) {
			s.flows[maps.AddrOf(netip.MustParseAddr(strings.TrimSpace(line)))] = struct{}{}
		}
	case "wait":
		d, err := time.ParseDuration(argument)
		lab.Must(s.t, err)
		s.clock.pass(d)
		s.apply()
		graces(s.r)
		s.clock.pass(1)
		s.r.PruneAddrs(s.flows, s.clock.now)
		s.apply()
	case "grace":
		s.r.BeginGrace()
		s.r.EndGrace()
		s.apply()
	case "apply":
		s.apply()
	case "restart":
		s.restart()
	case "upgrade":
		s.upgrade()
	case "prune":
		s.r.Prune()
		s.apply()
	case "tamper":
		s.tamper(body)
	default:
		return s.say(verb), true
	}

	return "", false
}

func (s *script) say(what string) string {
	s.t.Helper()
	switch what {
	case "maps":
		return dump(s.t, s.tables)
	case "writes":
		return s.log.take()
	case "status":
		return s.status()
	case "drift":
		return s.drift(false)
	case "repair":
		return s.drift(true)
	case "gone":
		return s.gone()
	default:
		s.t.Fatalf("there is no step %q", what)

		return ""
	}
}

func (s *script) restart() {
	s.r = mustNew(s.t, loggedTables(s.tables, &s.log), s.clock)
	s.set = nil
}

func (s *script) upgrade() {
	s.t.Helper()
	before := s.tables
	s.tables = s.create()
	s.tables.Loads = before.Loads
	mustCopy(s.t, s.tables.ServicePorts, before.ServicePorts)
	mustCopy(s.t, s.tables.Addrs, before.Addrs)
	for place, v := range before.Backends.All() {
		lab.Must(s.t, s.tables.Backends.Put(place, v))
	}
	s.restart()
}

func mustCopy[K comparable, V any](t *testing.T, to, from maps.Table[K, V]) {
	t.Helper()
	for e, err := range from.All() {
		if err == nil {
			err = to.Put(e.Key, e.Value)
		}
		lab.Must(t, err)
	}
}

// apply ignores errors: the step status prints them.
func (s *script) apply() { _ = s.r.Apply() }

func (s *script) want(body string) {
	services := mustParseDesired(s.t, body)
	var names []lb.ServiceName
	for _, w := range services {
		names = append(names, w.name)
	}
	for _, name := range s.set {
		if !slices.Contains(names, name) {
			s.r.Delete(name)
		}
	}
	for _, w := range services {
		s.r.Set(w.name, w.created, w.res)
	}
	s.set = names
	s.apply()
}

func (s *script) status() string {
	all := slices.SortedFunc(s.r.Statuses(), func(a, b Status) int { return compareNames(a.Service, b.Service) })
	var out []string
	for _, status := range all {
		words := "programmed"
		if !status.Programmed {
			words = fmt.Sprintf("not programmed, retry in %v", status.Retry.Sub(s.clock.now).Round(time.Millisecond))
		}
		out = append(out, fmt.Sprintf("%s: %s", status.Service, words))
		for _, failure := range status.Failures {
			out = append(out, "  "+failure.Error())
		}
		for _, loss := range status.Lost {
			out = append(out, fmt.Sprintf("  %s belongs to %s", loss.Frontend, loss.Owner))
		}
		for _, o := range status.Overlaps {
			what := "ClusterIP"
			if o.NodePort {
				what = "node port"
			}
			out = append(out, fmt.Sprintf("  %s is at the %s of %s", o.Frontend, what, o.Other))
		}
	}

	return strings.Join(out, "\n")
}

func (s *script) drift(repair bool) string {
	found, err := s.r.Drift(repair)
	if err != nil {
		s.t.Error(err)
	}
	var out []string
	for _, d := range found {
		if d.Repaired != repair {
			s.t.Errorf("%s: repaired is %v", d, d.Repaired)
		}
		out = append(out, d.String())
	}

	return strings.Join(out, "\n")
}

func (s *script) gone() string {
	gone := s.r.Gone()
	var out []string
	for _, b := range gone.Backends {
		out = append(out, fmt.Sprintf("backend %d of id %d: %s", b.BackendID, b.ServicePortID, b.Addr))
	}
	for _, f := range gone.Frontends {
		out = append(out, fmt.Sprintf("frontend %s of id %d", f.Key, f.ServicePortID))
	}
	slices.Sort(out)

	return strings.Join(out, "\n")
}
