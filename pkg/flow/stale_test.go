package flow

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// frontend adds a frontend that leads to a service port.
func (w *world) frontend(t testing.TB, at string, proto, scope uint8, servicePortID uint32) {
	t.Helper()
	to := netip.MustParseAddrPort(at)
	pool, err := w.writer.Pool(maps.Pool{ServicePortId: servicePortID}, nil, nil)
	lab.Must(t, err, w.writer.Frontend(maps.FrontendKeyOf(to.Addr(), to.Port(), proto, scope), maps.KindClusterIP, pool))
}

// backend adds a backend with an id.
func (w *world) backend(t testing.TB, id uint32, at string, servicePortID uint32) {
	t.Helper()
	lab.Must(t, w.Backends.Put(maps.Index(id), maps.BackendOf(id, servicePortID, netip.MustParseAddrPort(at), 0)))
}

func (w *world) mustEndStale(t testing.TB, s *Sweeper, want int) {
	t.Helper()
	if ended, err := s.EndStale(); ended.IPv4+ended.IPv6 != uint64(want) || err != nil {
		t.Errorf("%+v flows ended, %v, want %d", ended, err, want)
	}
}

func to(f maps.Flow, vip string) maps.Flow {
	dst := netip.MustParseAddrPort(vip)
	f.OriginalDst, f.OriginalPort = maps.AddrOf(dst.Addr()), maps.Port(dst.Port())

	return f
}

var live = []note{{fromClient, 1, false, 0}, {toClient, 1, false, 0}, {toBackend, 1, false, 0}, {fromBackend, 1, false, 0}}

func TestStale(t *testing.T) {
	const vip, node4, node6 = "10.96.0.1:80", "192.168.50.1:30080", "[fd00::1]:30081"
	for _, test := range []struct {
		name string
		flow maps.Flow
		do   func(*world)
		ends bool
	}{
		{"kept while nothing changes", flowOf(udp, 1), func(*world) {}, false},
		{"kept by either scope, internal", flowOf(udp, 1), func(w *world) {
			lab.Must(t, w.FrontendIDs.Delete(maps.FrontendKeyOf(netip.MustParseAddr("10.96.0.1"), 80, udp, maps.ScopeExternal)))
		}, false},
		{"kept by either scope, external", flowOf(udp, 1), func(w *world) {
			lab.Must(t, w.FrontendIDs.Delete(maps.FrontendKeyOf(netip.MustParseAddr("10.96.0.1"), 80, udp, maps.ScopeInternal)))
		}, false},
		{"kept at a node port", to(flowOf(udp, 1), node4), func(*world) {}, false},
		{"kept at a node port of IPv6", to(flowOf(udp, 1), node6), func(*world) {}, false},
		{"kept though its frontend has no slots", flowOf(udp, 1), func(*world) {}, false},
		{"ended with its backend", flowOf(udp, 1), func(w *world) { lab.Must(t, w.Backends.Put(1, maps.Backend{})) }, true},
		{"ended when the id is a backend of another", flowOf(udp, 1), func(w *world) { w.backend(t, 1, "10.244.2.2:8080", 2) }, true},
		{"ended when the place has another generation", flowOf(udp, 1), func(w *world) { w.backend(t, maps.ID(1, 1), "10.244.2.2:8080", 1) }, true},
		{"ended when the id is at another address", flowOf(udp, 1), func(w *world) { w.backend(t, 1, "10.244.2.3:8080", 1) }, true},
		{"ended when the id is at another port", flowOf(udp, 1), func(w *world) { w.backend(t, 1, "10.244.2.2:8081", 1) }, true},
		{"ended with its frontend", flowOf(udp, 1), func(w *world) {
			for _, scope := range []uint8{maps.ScopeInternal, maps.ScopeExternal} {
				lab.Must(t, w.FrontendIDs.Delete(maps.FrontendKeyOf(netip.MustParseAddr("10.96.0.1"), 80, udp, scope)))
			}
		}, true},
		{"ended when its frontend is another's", flowOf(udp, 1), func(w *world) {
			w.frontend(t, vip, udp, maps.ScopeInternal, 2)
			w.frontend(t, vip, udp, maps.ScopeExternal, 2)
		}, true},
		{"ended when a frontend takes a node port's address", to(flowOf(udp, 1), node4), func(w *world) {
			w.frontend(t, node4, udp, maps.ScopeInternal, 2)
			w.frontend(t, node4, udp, maps.ScopeExternal, 2)
		}, true},
		{"ended if only TCP has the frontend", to(flowOf(udp, 1), "10.96.0.1:443"), func(w *world) {
			w.frontend(t, "10.96.0.1:443", tcp, maps.ScopeInternal, 1)
		}, true},
		{"kept if its socket had another backend, which is no frontend", resteered(to(flowOf(udp, 1), "10.244.2.9:8080")), func(*world) {}, false},
		{"ended with the backend that its socket got then", resteered(to(flowOf(udp, 1), "10.244.2.9:8080")),
			func(w *world) { lab.Must(t, w.Backends.Put(1, maps.Backend{})) }, true},
		{"kept if it is of TCP, without a backend", flowOf(tcp, 1), func(w *world) { lab.Must(t, w.Backends.Put(1, maps.Backend{})) }, false},
		{"kept if it is of SCTP, without a backend", flowOf(sctp, 1), func(w *world) { lab.Must(t, w.Backends.Put(1, maps.Backend{})) }, false},
	} {
		for _, halfOpen := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, half open %v", test.name, halfOpen), func(t *testing.T) {
				w := newWorld(t, 1024)
				w.backend(t, 1, "10.244.2.2:8080", 1)
				for _, at := range []string{vip, "0.0.0.0:30080", "[::]:30081"} {
					w.frontend(t, at, udp, maps.ScopeInternal, 1)
					w.frontend(t, at, udp, maps.ScopeExternal, 1)
				}
				f := masqueraded(test.flow)
				for _, n := range live {
					n.halfOpen = halfOpen
					w.put(t, f, n)
				}
				test.do(w)
				s := w.sweeper(t)
				ended, left := 0, 4
				if test.ends {
					ended, left = 1, 0
				}
				w.mustEndStale(t, s, ended)
				if n := w.count(t, f); n != left {
					t.Errorf("%d entries are left, want %d", n, left)
				}
				if status := w.mustSweep(t, s); status.Stale != uint64(ended) {
					t.Errorf("the status has %d stale flows, want %d", status.Stale, ended)
				}
			})
		}
	}
}

// resteered is a flow of a socket that had another backend first.
func resteered(f maps.Flow) maps.Flow {
	f.Flags |= maps.FlowResteered

	return f
}

// The flow of a datagram of a process of this node ends with both of its entries, of which one is at the hook of
// other answers.
func TestStaleFlowOfAProcess(t *testing.T) {
	w := newWorld(t, 1024)
	f := masqueraded(flowOf(udp, 1))
	f.Flags |= maps.FlowOfNode | maps.FlowTurned | maps.FlowSent
	w.put(t, f, note{fromClient, maps.FlowOpen, false, 0}, note{fromBackend, maps.FlowOpen, false, 0})
	if from, to := f.Key(fromClient).Hook, f.Key(fromBackend).Hook; from != maps.HookEgress || to != maps.HookIngress {
		t.Fatalf("the entries are at hooks %d and %d", from, to)
	}
	w.mustEndStale(t, w.sweeper(t), 1) // there is no backend
	if n := w.count(t, f); n != 0 {
		t.Errorf("%d entries are left", n)
	}
}

// Over random tables: exactly the UDP flows whose backend or frontend is gone end, with all their
// entries.
func TestStaleIsExact(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			w, r := newWorld(t, 1<<14), rand.New(rand.NewPCG(seed, 0))
			gone := map[uint32]bool{}
			for i := range uint32(40) {
				gone[i] = r.IntN(3) == 0
				if !gone[i] {
					w.backend(t, i+1, fmt.Sprintf("10.244.3.%d:8080", i), i/4)
				}
			}
			closed := map[string]bool{}
			for i := range uint32(20) {
				at := fmt.Sprintf("10.96.0.%d:80", i)
				closed[at] = r.IntN(4) == 0
				if !closed[at] {
					w.frontend(t, at, udp, uint8(r.IntN(2)+1), i/2)
				}
			}
			all, dead := mustMake(t, w, r, 0), map[int]bool{}
			for i := range 1500 {
				id := uint32(r.IntN(40))
				at := fmt.Sprintf("10.96.0.%d:80", id/4*2+uint32(r.IntN(2)))
				f := to(flowOf([]uint8{udp, tcp}[r.IntN(2)], i+1), at)
				f.ServicePortId, f.BackendId, f.Backend = id/4, id+1, addr(fmt.Sprintf("10.244.3.%d", id))
				if r.IntN(2) == 0 {
					f = masqueraded(f)
				}
				m := made{flow: f}
				for _, role := range f.Roles() {
					if r.IntN(8) > 0 {
						m.notes = append(m.notes, note{role, 1, r.IntN(2) == 0, 25 * time.Hour})
					}
				}
				m.put(t, w, false)
				all = append(all, m)
				if f.Proto == udp && (gone[id] || closed[at]) && len(m.notes) > 0 {
					dead[i] = true
				}
			}
			w.mustEndStale(t, w.sweeper(t), len(dead))
			for i := range all {
				want := len(all[i].notes)
				if dead[i] {
					want = 0
				}
				if left := all[i].left(t, w); len(left) != want {
					t.Errorf("flow %d has %d entries left, want %d", i, len(left), want)
				}
			}
		})
	}
}

// A backend is gone while all flows are read. If it exists again when they are to be ended, they stay.
func TestStaleNoMore(t *testing.T) {
	w := newWorld(t, 1024)
	w.frontend(t, "10.96.0.1:80", udp, maps.ScopeInternal, 1)
	f := flowOf(udp, 1)
	w.put(t, f, live[:2]...)
	s := w.sweeper(t)
	s.hook(false, &hooked{read: func() { w.backend(t, 1, "10.244.2.2:8080", 1) }})
	w.mustEndStale(t, s, 0)
	if n := w.count(t, f); n != 2 {
		t.Errorf("%d entries are left of 2", n)
	}
}

// A backend that is gone can still answer earlier requests: the entries of the client's packets are
// deleted first, those of the replies later.
func TestStaleAnswers(t *testing.T) {
	w := newWorld(t, 1024)
	f := masqueraded(flowOf(udp, 1))
	w.put(t, f, live...)
	s := w.sweeper(t)
	var first maps.FlowKey
	var turned time.Time
	s.hook(false, &hooked{remove: func(k maps.FlowKey) {
		if turned.IsZero() {
			first, turned = k, time.Now()
		} else if after := time.Since(turned); after < lateAnswers {
			t.Errorf("entry %v is deleted %v after the first one", k, after)
		}
	}})
	w.mustEndStale(t, s, 1)
	if first != f.Key(fromClient) {
		t.Errorf("the first to be deleted is %v", first)
	}
	if n := w.count(t, f); n != 0 {
		t.Errorf("%d entries are left", n)
	}
}

// A packet of a stale flow writes an entry again while others are deleted.
func TestStalePutBack(t *testing.T) {
	w := newWorld(t, 1024)
	f := masqueraded(flowOf(udp, 1))
	w.put(t, f, live...)
	s := w.sweeper(t)
	packets := 0
	s.hook(false, &hooked{remove: func(k maps.FlowKey) {
		if packets++; k == f.Key(fromBackend) && packets <= 4 {
			w.put(t, f, live[:2]...)
		}
	}})
	w.mustEndStale(t, s, 1)
	if n := w.count(t, f); n != 0 {
		t.Errorf("%d entries are left", n)
	}
}
