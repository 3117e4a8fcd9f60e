package reconcile

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/maps"
)

// nodeTables are the maps of what belongs to no Service, with a function that sets one entry of each.
var nodeTables = map[string]func(*Reconciler){
	maps.NameAddrs: func(r *Reconciler) {
		r.SetNodeAddrs(map[netip.Addr]maps.AddrUse{netip.MustParseAddr("192.168.1.2"): {Ifindex: 2}})
	},
	maps.NameDevices: func(r *Reconciler) { r.SetDevices(map[uint32]maps.Device{2: {Bridge: 7}}) },
	maps.NameServiceCIDRs: func(r *Reconciler) {
		r.SetServiceCIDRs([]netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")}, nil)
	},
	maps.NameOptedOut: func(r *Reconciler) { r.SetOptedOut([]string{strings.Repeat("0", 36)}) },
	maps.NameLocalCIDRs: func(r *Reconciler) {
		r.SetLocalCIDRs([]netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")})
	},
}

// Failed writes of node state are tried again, with a backoff for each map.
func TestNodeBackoff(t *testing.T) {
	for name, set := range nodeTables {
		t.Run(name, func(t *testing.T) {
			clock := newTestClock()
			fakes := maps.NewFakes(100)
			failing := true
			fakes.Observe(func(table, _ string) error {
				if failing && table == name {
					return errInjected
				}

				return nil
			}, nil)
			r := mustNew(t, fakes.Tables, clock)
			for _, set := range nodeTables {
				set(r)
			}
			if err := r.Apply(); err == nil {
				t.Fatal("no error")
			}
			for other := range nodeTables {
				if used := r.Counters().Fill[other].Used; used == 0 && other != name {
					t.Errorf("%s was not written", other)
				}
			}
			at, ok := r.Next()
			if !ok || at.Sub(clock.now) != time.Second {
				t.Fatalf("due at %v, %v", at, ok)
			}
			failing = false
			r.PruneAddrs(nil, clock.now)
			mustApply(t, r)
			if used := r.Counters().Fill[name].Used; used != 0 {
				t.Fatal("did not wait")
			}
			clock.now = at
			mustApply(t, r)
			if _, ok := r.Next(); ok {
				t.Error("something is due still")
			}
			set(r)
			mustApply(t, r)
			for other := range nodeTables {
				if got := r.Counters().Writes[other]; got != (Writes{Puts: 1}) {
					t.Errorf("%s: %d puts and %d deletes, want one put", other, got.Puts, got.Deletes)
				}
				if used := r.Counters().Fill[other].Used; used != 1 {
					t.Errorf("%s: counts %d in use, want 1", other, used)
				}
			}
		})
	}
}

// A caller may change what it has passed, and pass unmasked prefixes.
func TestNodeIsCopied(t *testing.T) {
	fakes := maps.NewFakes(100)
	r := mustNew(t, fakes.Tables, newTestClock())
	addr := netip.MustParseAddr("192.168.1.2")
	addrs := map[netip.Addr]maps.AddrUse{addr: {Ifindex: 2, Flags: maps.AddrService | maps.AddrNodePort}}
	devices := map[uint32]maps.Device{2: {Bridge: 7}}
	r.SetNodeAddrs(addrs)
	r.SetDevices(devices)
	r.SetLocalCIDRs([]netip.Prefix{netip.MustParsePrefix("10.244.1.2/16")})
	clear(addrs)
	clear(devices)
	mustApply(t, r)
	want := maps.AddrUse{Ifindex: 2, Flags: maps.AddrNode | maps.AddrNodePort}
	if got := fakes.Addrs.Entries[maps.AddrOf(addr)]; got != want {
		t.Errorf("the address is %+v, want %+v", got, want)
	}
	if got := fakes.Devices.Entries[2].Bridge; got != 7 {
		t.Errorf("the bridge of device 2 is %d, want 7", got)
	}
	cidr := maps.CIDRKeyOf(netip.MustParsePrefix("10.244.0.0/16"))
	if _, ok := fakes.LocalCIDRs.Entries[cidr]; !ok || len(fakes.LocalCIDRs.Entries) != 1 {
		t.Errorf("local CIDRs are %v", fakes.LocalCIDRs.Entries)
	}
}

// The address of a backend that Services have left is marked until no socket has dialled it any more, also by the
// next writer, and beside what else the address is.
func TestLeft(t *testing.T) {
	fakes := maps.NewFakes(100)
	pod, node := maps.AddrOf(netip.MustParseAddr("10.244.1.2")), maps.AddrOf(netip.MustParseAddr("192.168.1.2"))
	check := func(when string, want map[maps.Addr]maps.AddrUse) {
		t.Helper()
		if diff := cmp.Diff(want, fakes.Addrs.Entries); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	r := mustNew(t, fakes.Tables, newTestClock())
	r.SetNodeAddrs(map[netip.Addr]maps.AddrUse{node.IP(): {Ifindex: 2}})
	r.SetLeft(map[maps.Addr]struct{}{pod: {}, node: {}})
	mustApply(t, r)
	both := map[maps.Addr]maps.AddrUse{pod: {Flags: maps.AddrLeft}, node: {Ifindex: 2, Flags: maps.AddrNode | maps.AddrLeft}}
	check("marked", both)

	next := mustNew(t, fakes.Tables, newTestClock())
	mustApply(t, next)
	next.SetNodeAddrs(map[netip.Addr]maps.AddrUse{node.IP(): {Ifindex: 2}})
	mustApply(t, next)
	check("adopted", both)
	next.SetLeft(map[maps.Addr]struct{}{node: {}})
	mustApply(t, next)
	check("when the sockets of one are closed", map[maps.Addr]maps.AddrUse{node: both[node]})
	next.SetLeft(nil)
	mustApply(t, next)
	check("when all are", map[maps.Addr]maps.AddrUse{node: {Ifindex: 2, Flags: maps.AddrNode}})
}

func TestEveryMapIsNeeded(t *testing.T) {
	for i := range reflect.TypeFor[maps.Tables]().NumField() {
		tables := maps.NewFakes(100).Tables
		reflect.ValueOf(&tables).Elem().Field(i).SetZero()
		if _, err := New(Config{Tables: tables}); err == nil {
			t.Errorf("no error without %s", reflect.TypeFor[maps.Tables]().Field(i).Name)
		}
	}
}
