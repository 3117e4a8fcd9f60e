package proxy

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/bench/objects"
	"github.com/sluice-lb/sluice/bench/stand"
	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/realproxy"
	"github.com/sluice-lb/sluice/test/sluice"
)

func TestMain(m *testing.M) {
	lab.Main()
	load.Main()
	cluster.Run(m)
}

// world is a side of the benchmark, with an API server that is filled, and a probe in place of its client.
type world struct {
	*stand.Side
	api   *cluster.Cluster
	plan  objects.Plan
	probe *load.Probe
}

// filled is the one API server of all tests, once there is one. They have the same plan.
var filled *cluster.Cluster

func mustWorld(t *testing.T) *world {
	t.Helper()
	side, err := stand.New()
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, side.Close()) })
	w := &world{Side: side, plan: objects.Plan{Services: 20, Endpoints: 2}}
	w.plan.Local, w.plan.Remote = side.Places()
	if filled == nil {
		api := cluster.Start(cluster.Lasting(t), "--service-cluster-ip-range="+objects.ServiceRange)
		writer, err := objects.NewWriter(api.Config())
		lab.Must(t, err)
		lab.Must(t, writer.Fill(t.Context(), w.plan, nil))
		filled = api
	}
	w.api = filled
	w.api.MustTunnel(t, side.Node().Namespace)
	w.probe, err = load.StartProbe(side.Pod().Namespace, side.Cgroup)
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, w.probe.Close()) })

	return w
}

// config is that of a proxy on the first node.
func (w *world) config(t *testing.T, kind Kind) Config {
	t.Helper()
	binary := w.api.Binary("kube-proxy")
	if kind == Sluice {
		binary = sluice.MustBinary(t)
	}

	return Config{
		Kind: kind, Namespace: w.Node().Namespace, Cgroup: w.Cgroup, NodeName: w.Node().Name,
		Kubeconfig: w.api.Kubeconfig(), Binary: binary, Directory: t.TempDir(),
	}
}

// answers returns an error unless both endpoints of a Service answer at its ClusterIP.
func (w *world) answers(t *testing.T, i int) error {
	t.Helper()
	for e := range w.plan.Endpoints {
		err := w.probe.Await(t.Context(), netip.AddrPortFrom(w.plan.ClusterIP(i), objects.Port), w.plan.EndpointAddress(i, e, 0), 5*time.Second)
		lab.Must(t, err)
		if _, err := w.probe.Wait(t.Context()); err != nil {
			return fmt.Errorf("endpoint %d of Service %d: %w", e, i, err)
		}
	}

	return nil
}

// Every proxy programs what the API server has, reports its costs, and leaves
// nothing behind.
func TestProxies(t *testing.T) {
	for _, kind := range []Kind{Sluice, IPTables, IPTablesLegacy, NFTables} {
		t.Run(string(kind), func(t *testing.T) {
			lab.Must(t, Missing(kind))
			w := mustWorld(t)
			p, err := Start(w.config(t, kind))
			lab.Must(t, err)
			t.Cleanup(func() { p.Close() })
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
			defer cancel()
			lab.Must(t, p.Synced(ctx), w.answers(t, 0), w.answers(t, 7), w.answers(t, 19))
			result, err := load.Run(t.Context(), w.Pod().Namespace, w.Cgroup, load.Work{
				Kind: load.UDPNew, Clients: 1, Rate: 20, Duration: time.Second, Targets: []netip.AddrPort{
					netip.AddrPortFrom(w.plan.ClusterIP(0), objects.DNSPort), netip.AddrPortFrom(w.plan.ClusterIP(19), objects.DNSPort),
				},
			})
			lab.Must(t, err)
			if result.Failed > 1 { // kube-proxy loses a datagram now and then
				t.Errorf("%d of %d datagrams failed: %s", result.Failed, result.Started, result.FirstError)
			}
			checkReports(t, w, kind, p)
			traces := []string{fmt.Sprintf("/proc/%d", p.PID()), p.Cgroup().Path()}
			if sluice, ok := p.(*agent); ok {
				traces = append(traces, sluice.node.BPFRoot())
			}
			lab.Must(t, p.Close())
			for _, trace := range traces {
				if _, err := os.Stat(trace); err == nil {
					t.Errorf("%s is still there", trace)
				}
			}
			if rules := mustRules(t, w.Node().Namespace); strings.Contains(rules, "KUBE") || strings.Contains(rules, "kube") {
				t.Errorf("there are rules left: %s", rules)
			}
			if w.answers(t, 7) == nil {
				t.Error("a Service answers without a proxy")
			}
		})
	}
}

// checkReports checks what a proxy reports about itself.
func checkReports(t *testing.T, w *world, kind Kind, p Proxy) {
	t.Helper()
	costs, err := ReadCosts(p)
	lab.Must(t, err)
	if costs.CPU < time.Millisecond || costs.RSS < 1<<20 || costs.PeakRSS < costs.RSS {
		t.Errorf("the costs are %+v", costs)
	}
	program := "v1.37.2"
	if kind == Sluice {
		program = "sluice"
	}
	if !strings.Contains(p.Version(), program) {
		t.Errorf("the version is %q, want one with %s", p.Version(), program)
	}
	t.Logf("%s: %+v", p.Version(), costs)

	var all []netip.Addr
	for i := range w.plan.Services {
		all = append(all, w.plan.ClusterIP(i))
	}
	ordered, err := p.Order(all)
	lab.Must(t, err)
	if !slices.Equal(slices.SortedFunc(slices.Values(ordered), netip.Addr.Compare), all) {
		t.Errorf("the order is %v, want all of %v", ordered, all)
	}
	// By chance, once in 20!.
	if inOrder, byChain := slices.Equal(ordered, all), strings.HasPrefix(string(kind), "iptables"); inOrder == byChain {
		t.Errorf("the order is %v, want another one than %v: %t", ordered, all, byChain)
	}

	writes, counted, err := Writes(p)
	lab.Must(t, err)
	// Two backends and one frontend for each Service, at least.
	if sluice := kind == Sluice; counted != sluice || sluice && writes < 60 {
		t.Errorf("map writes: %d (%t)", writes, counted)
	}
}

// mustRules returns the namespace's rules of all kinds.
func mustRules(t *testing.T, ns *lab.Namespace) string {
	t.Helper()
	var all string
	for _, command := range [][]string{
		{"nft", "list", "ruleset"}, {"iptables-legacy-save"}, {"ip6tables-legacy-save"},
	} {
		path, err := realproxy.FindProgram(command[0])
		lab.Must(t, err)
		rules, err := lab.Output(ns, nil, path, command[1:]...)
		lab.Must(t, err)
		all += rules
	}

	return all
}

// Waiting for a proxy that ends returns an error with the reason.
func TestSyncedOfEnded(t *testing.T) {
	for _, kind := range []Kind{Sluice, NFTables} {
		t.Run(string(kind), func(t *testing.T) {
			cfg := mustWorld(t).config(t, kind)
			cfg.Kubeconfig = "/nonexistent/kubeconfig"
			p, err := Start(cfg)
			lab.Must(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
			defer cancel()
			if err := p.Synced(ctx); err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), cfg.Kubeconfig) {
				t.Errorf("the error is %v, want one with the reason why it ended", err)
			}
			lab.Must(t, p.Close())
		})
	}
}

// The costs include those of processes that have ended.
func TestReadCPU(t *testing.T) {
	cgroup := lab.MustCgroup(t, "cpu")
	_, err := lab.Output(nil, cgroup, "sh", "-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done")
	lab.Must(t, err)
	got, err := ReadCPU(cgroup)
	lab.Must(t, err)
	if got < time.Millisecond || got > time.Minute {
		t.Errorf("it took %v", got)
	}
}

// The kernel's memory includes maps, also when it is read until late frees are done. Other programs use the
// machine meanwhile, so it may take several looks.
func TestKernelMemory(t *testing.T) {
	const size = 64 << 20
	for name, read := range map[string]func() (int64, error){
		"at once": ReadKernelMemory,
		"stable":  func() (int64, error) { return StableKernelMemory(t.Context()) },
	} {
		t.Run(name, func(t *testing.T) {
			var all []int64
			for range 10 {
				without, err := read()
				lab.Must(t, err)
				array, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 1 << 20, MaxEntries: size >> 20})
				lab.Must(t, err)
				with, err := read()
				lab.Must(t, err, array.Close())
				if got := with - without; got > size*9/10 && got < size*11/10 {
					return
				}
				all = append(all, (with-without)>>20)
			}
			t.Errorf("%d MiB in the kernel count as %d MiB", size>>20, all)
		})
	}
}
