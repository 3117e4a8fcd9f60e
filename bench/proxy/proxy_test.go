package proxy

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/bench/objects"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/realproxy"
)

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
			mustSync(t, p)

			for _, i := range []int{0, 7, 19} {
				lab.Must(t, w.answers(i, "tcp", objects.Port))
			}
			lab.Must(t, w.answers(0, "udp", objects.DNSPort), w.answers(19, "udp", objects.DNSPort))
			checkReports(t, w, p)
			traces := tracesOf(p)
			lab.Must(t, p.Close(), p.Close())
			for _, trace := range traces {
				if exists(trace) {
					t.Errorf("%s is still there", trace)
				}
			}
			if rules := mustRules(t, w.Nodes[0].Namespace); strings.Contains(rules, "KUBE") || strings.Contains(rules, "kube") {
				t.Errorf("there are rules left: %s", rules)
			}
			if err := w.answers(7, "tcp", objects.Port); err == nil {
				t.Error("a Service answers without a proxy")
			}
		})
	}
}

// checkReports checks what a proxy reports about itself.
func checkReports(t *testing.T, w *world, p *Proxy) {
	t.Helper()
	costs, err := p.Costs()
	lab.Must(t, err)
	if costs.CPU < time.Millisecond || costs.RSS < 1<<20 || costs.PeakRSS < costs.RSS {
		t.Errorf("the costs are %+v", costs)
	}
	program := "v1.36.3"
	if p.cfg.Kind == Sluice {
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
	if inOrder, byChain := slices.Equal(ordered, all), strings.HasPrefix(string(p.cfg.Kind), "iptables"); inOrder == byChain {
		t.Errorf("the order is %v, want another one than %v: %t", ordered, all, byChain)
	}

	writes, counted, err := p.Writes()
	lab.Must(t, err)
	// Two backends and one frontend for each Service, at least.
	if sluice := p.cfg.Kind == Sluice; counted != sluice || sluice && writes < 60 {
		t.Errorf("map writes: %d (%t)", writes, counted)
	}
}

// tracesOf are files that are there as long as a proxy is.
func tracesOf(p *Proxy) []string {
	traces := []string{fmt.Sprintf("/proc/%d", p.PID()), p.Cgroup().Path()}
	if sluice, ok := p.program.(*agent); ok {
		traces = append(traces, sluice.node.BPFRoot())
	}

	return traces
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

func TestUnknownKind(t *testing.T) {
	if _, err := Start(Config{Kind: "userspace"}); err == nil {
		t.Error("a proxy of an unknown kind has started")
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

// The kernel's memory includes maps. Other programs use the machine meanwhile, so it
// may take several looks.
func TestReadKernelMemory(t *testing.T) {
	const size = 64 << 20
	var all []int64
	for range 20 {
		before, err := ReadKernelMemory()
		lab.Must(t, err)
		array, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 1 << 20, MaxEntries: size >> 20})
		lab.Must(t, err)
		after, err := ReadKernelMemory()
		lab.Must(t, err, array.Close())
		got := after - before
		if got > size*9/10 && got < size*11/10 {
			return
		}
		all = append(all, got>>20)
	}
	t.Errorf("%d MiB in the kernel count as %d MiB", size>>20, all)
}

// StableKernelMemory waits until late frees are done.
func TestStableKernelMemory(t *testing.T) {
	const size = 64 << 20
	var all []int64
	for range 5 {
		array, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 1 << 20, MaxEntries: size >> 20})
		lab.Must(t, err)
		before, err := StableKernelMemory(t.Context())
		lab.Must(t, err, array.Close())
		after, err := StableKernelMemory(t.Context())
		lab.Must(t, err)
		got := before - after
		if got > size*9/10 && got < size*11/10 {
			return
		}
		all = append(all, got>>20)
	}
	t.Errorf("%d MiB that are freed count as %d MiB", size>>20, all)
}
