package bpf

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// A lookup can miss a frontend in the instant in which the agent replaces it. Here
// the first one of every connect does: each kind of frontend is found all the same.
func TestMissedFrontend(t *testing.T) {
	eachFamily(t, func(t *testing.T, f family) {
		w := newWorld(t, f)
		const backend, external = "8.0.50.1:8080", "8.0.51.1:443" // both the node's
		lab.MustServe(t, w.node, "backend", "tcp/"+w.family.addrPort(at(backend)).String())
		w.serve(t, service{at: []string{clusterIP}, to: []string{backend}})
		w.serve(t, service{at: []string{balancer}, kind: maps.KindLoadBalancer, to: []string{backend}})
		w.serve(t, service{at: []string{external}, kind: maps.KindExternalIP, to: []string{backend}})
		cgroup := lab.MustCgroup(t, "missed")
		w.attachMissing(t, cgroup)
		caller := lab.MustCaller(t, w.node, cgroup)
		dial := func(to string) error {
			_, err := caller.Exchange(lab.Exchange{Network: "tcp", Address: w.family.addrPort(at(to)).String()})

			return err
		}
		for _, frontend := range []string{clusterIP, balancer, external} {
			if err := dial(frontend); err != nil {
				t.Errorf("%s: %v", frontend, err)
			}
		}
		if err := dial("8.0.51.1:444"); lab.Errno(err) != unix.ECONNREFUSED {
			t.Errorf("another port of the node: %v, want %v", err, unix.ECONNREFUSED)
		}
	})
}

// attachMissing attaches connect hooks whose first lookup of a frontend finds
// nothing, until the test ends.
func (w *world) attachMissing(t *testing.T, cgroup *lab.Cgroup) {
	t.Helper()
	spec, err := sockSpec(Config{UDP: UDPAll, SetRetval: atLeast(t, 6, 1)})
	must(t, err)
	for name, attach := range map[string]ebpf.AttachType{
		sockProgSluiceConnect4: ebpf.AttachCGroupInet4Connect, sockProgSluiceConnect6: ebpf.AttachCGroupInet6Connect,
	} {
		own := newLoader(w.maps, nil).single(spec, name)
		missFirst(t, own.Programs[name], "sl_frontends")
		program, err := newLoader(w.maps, nil).loadOne(own, name)
		must(t, err)
		t.Cleanup(func() { program.Close() })
		attached, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup.Path(), Attach: attach, Program: program})
		must(t, err)
		t.Cleanup(func() { attached.Close() })
	}
}

// missFirst makes NULL of the result of a program's first lookup in a map.
func missFirst(t *testing.T, program *ebpf.ProgramSpec, name string) {
	t.Helper()
	for i, in := range program.Instructions {
		if in.Reference() != name {
			continue
		}
		for ; i < len(program.Instructions); i++ {
			if in := &program.Instructions[i]; in.IsBuiltinCall() && in.Constant == int64(asm.FnMapLookupElem) {
				*in = asm.Mov.Imm(asm.R0, 0).WithMetadata(in.Metadata)

				return
			}
		}
	}
	t.Fatalf("program %s looks nothing up in %s", program.Name, name)
}
