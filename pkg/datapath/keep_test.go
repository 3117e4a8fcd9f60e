package datapath

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// programIDs returns the kernel's ids of the programs that a Datapath has loaded.
func programIDs(t *testing.T, d *Datapath, device Device) map[string]ebpf.ProgramID {
	t.Helper()
	programs, err := d.programs()
	lab.Must(t, err)
	ofDevice, err := d.loadDevice(device)
	lab.Must(t, err)
	all := map[string]*ebpf.Program{"socks": programs.Socks, "ingress": ofDevice.Ingress, "egress": ofDevice.Egress}
	for _, hook := range slices.Concat(programs.Sock, programs.Trace) {
		all[hook.Name] = hook.Program
	}
	ids := make(map[string]ebpf.ProgramID)
	for name, program := range all {
		info, err := program.Info()
		lab.Must(t, err)
		ids[name], _ = info.ID()
	}

	return ids
}

// An agent reuses the programs that one of the same build has pinned, without verifying them
// again. With another configuration, without the pins or with other maps it loads them, and
// removes pins that are not used any more.
func TestKeptPrograms(t *testing.T) {
	w := newWorld(t)
	device := Device{Class: maps.DevicePods}
	first := programIDs(t, w.Datapath, device)
	kept := func() int {
		entries, err := os.ReadDir(programDir(w.cfg.BPFRoot))
		lab.Must(t, err)

		return len(entries)
	}
	if have, want := kept(), len(first); have != want {
		t.Fatalf("%d programs are kept, want %d", have, want)
	}
	open := func(change func(*Config)) map[string]ebpf.ProgramID {
		t.Helper()
		cfg := w.cfg
		change(&cfg)
		next := w.mustOpen(t, cfg)
		ids := programIDs(t, next, device)
		lab.Must(t, next.Attach(), next.removeKept())
		if have := kept(); have != len(ids) {
			t.Errorf("%d programs are kept, want %d", have, len(ids))
		}

		return ids
	}
	same := func(a, b map[string]ebpf.ProgramID) (n int) {
		for name, id := range a {
			if b[name] == id {
				n++
			}
		}

		return n
	}

	again := open(func(*Config) {})
	if n := same(first, again); n != len(first) {
		t.Errorf("%d of %d programs are those of before", n, len(first))
	}
	other := open(func(c *Config) { c.UDP = bpf.UDPOff })
	if n := same(again, other); n != 2 { // those of devices have nothing to do with it
		t.Errorf("configured otherwise, %d programs are those of before, want 2", n)
	}
	pins, err := filepath.Glob(filepath.Join(programDir(w.cfg.BPFRoot), "sluice_connect4-*"))
	lab.Must(t, err)
	if len(pins) != 1 {
		t.Fatalf("%q are kept", pins)
	}
	lab.Must(t, os.Remove(pins[0]))
	// Beside those of devices: the iterator, and those at tracepoints.
	want := 3 + len(bpf.TraceHooks(w.config))
	if n := same(other, open(func(c *Config) { c.UDP = bpf.UDPOff })); n != want {
		t.Errorf("after a pin was lost, %d programs are those of before, want %d", n, want)
	}
}
