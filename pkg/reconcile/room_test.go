package reconcile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/heavy"
	"github.com/sluice-lb/sluice/test/lab"
)

// slicesPerSecond is how many times Apply is called within a second: a slice takes less than 10 ms.
const slicesPerSecond = 100

// greedy is a Service with as many external IPs as it may have. Turn makes it another set of addresses.
func greedy(number, turn int) (lb.ServiceName, lb.Resolution) {
	h := life{heavy.New(1, 0, 32_766, 0)}
	h.Name.Name = fmt.Sprint("greedy-", number)
	h.LoadBalancers = nil
	h.ClusterIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 9, byte(number)})}
	for i := range h.ExternalIPs {
		var addr [4]byte
		binary.BigEndian.PutUint32(addr[:], 20<<24|uint32(turn%8*9+number)<<16|uint32(i))
		h.ExternalIPs[i] = netip.AddrFrom4(addr)
	}

	return h.Name, lb.Resolve(&h.Service.Service, nil, &lb.Node{Name: "n1", Limits: DefaultLimits})
}

// tenant is a Service of another namespace with a ClusterIP and a node port.
func tenant(number int) (lb.ServiceName, lb.Resolution) {
	svc := lb.Service{
		Name: lb.ServiceName{Namespace: fmt.Sprint("tenant-", number), Name: "web"}, Type: lb.NodePort,
		ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 8, byte(number)})}, Families: []lb.Family{lb.IPv4},
		Ports: []lb.ServicePort{{Name: "http", Protocol: lb.TCP, Port: 80, NodePort: uint16(30000 + number)}},
	}

	return svc.Name, lb.Resolve(&svc, nil, &lb.Node{Name: "n1"})
}

// Nine Services of as many external IPs as there may be replace all of them every few seconds: more than there
// is room for. Within a second, ClusterIPs and node ports of others are in the maps, and so is a new address of
// the node.
func TestRestlessExternalIPs(t *testing.T) {
	const restless, seconds = 9, 25
	fakes, clock := maps.NewFakes(1<<20), newTestClock()
	fakes.FrontendIDs.Size, fakes.Addrs.Size = 524288, 262144
	r, err := New(Config{Tables: fakes.Tables, Now: clock.read})
	lab.Must(t, err)
	r.Prune()
	apply := func() {
		if err := r.Apply(); err != nil && !errors.Is(err, maps.ErrFull) {
			t.Fatal(err)
		}
	}
	node := make(map[netip.Addr]maps.AddrUse)
	var swept time.Time // when the scan of flows began that has ended last
	for second := range seconds {
		if second%5 == 0 {
			for n := range restless {
				name, res := greedy(n, second/5)
				r.Set(name, time.Time{}, res)
			}
		}
		if second%10 == 9 {
			r.PruneAddrs(nil, swept)
			swept = clock.now
		}
		r.EndGrace()
		r.BeginGrace()
		for range slicesPerSecond / 2 {
			apply()
		}
		for n := 2 * second; n < 2*second+2; n++ {
			name, res := tenant(n)
			r.Set(name, time.Time{}, res)
		}
		addr := netip.AddrFrom4([4]byte{192, 168, 1, byte(1 + second)})
		node[addr] = maps.AddrUse{Ifindex: 2, Flags: maps.AddrNodePort}
		r.SetNodeAddrs(node)
		for range slicesPerSecond / 2 {
			apply()
		}
		for n := range 2*second + 2 {
			name, _ := tenant(n)
			if status, _ := r.Status(name); !status.Programmed {
				t.Errorf("second %d: %s is not programmed: %v", second, name, status.Failures)
			}
		}
		if !r.NodePortAddrs()[addr] {
			t.Errorf("second %d: %s is not an address of the node", second, addr)
		}
		clock.pass(time.Second)
	}
}

// A hundred large Services of one namespace are due. That of another one waits for a turn of one of them.
func TestNamespacesTakeTurns(t *testing.T) {
	clock := newTestClock()
	r, err := New(Config{Tables: maps.NewFakes(1 << 20).Tables, Now: clock.read, Slice: 500})
	lab.Must(t, err)
	r.Prune()
	for n := range 100 {
		h := newHeavy(1, 0, 1000, 2)
		h.Name.Name = fmt.Sprint("large-", n)
		h.ClusterIPs[0] = netip.AddrFrom4([4]byte{10, 96, 1, byte(n)})
		for i := range h.ExternalIPs {
			h.ExternalIPs[i] = netip.AddrFrom4([4]byte{20, byte(n), byte(i >> 8), byte(i)})
		}
		r.Set(h.Name, time.Time{}, h.resolve())
	}
	name, res := tenant(1)
	r.Set(name, time.Time{}, res)
	for range 4 {
		mustApply(t, r)
	}
	if status, _ := r.Status(name); !status.Programmed {
		t.Error("the other Service waits for all of them")
	}
}

// A machine of 8 GiB has room for 100,000 dual-stack Services with a node port each: a share of that room for as many
// of them.
func TestManyServices(t *testing.T) {
	const share, count = 16, 100_000
	fakes, room := maps.NewFakes(1<<20), maps.LeastCapacities(8<<30)
	fakes.FrontendIDs.Size, fakes.Addrs.Size = int(room[maps.NameFrontendIDs])/share, int(room[maps.NameAddrs])/share
	fakes.Tables.Frontends.SetLimit(fakes.FrontendIDs.Size)
	r, err := New(Config{Tables: fakes.Tables, Slice: 1 << 20})
	lab.Must(t, err)
	r.Prune()
	for n := range count / share {
		number, number6 := [4]byte{10, 96, byte(n >> 8), byte(n)}, [16]byte{0: 0xfd, 14: byte(n >> 8), 15: byte(n)}
		svc := lb.Service{
			Name: lb.ServiceName{Namespace: fmt.Sprint("ns-", n%100), Name: fmt.Sprint("service-", n)}, Type: lb.NodePort,
			ClusterIPs: []netip.Addr{netip.AddrFrom4(number), netip.AddrFrom16(number6)}, Families: []lb.Family{lb.IPv4, lb.IPv6},
			Ports: []lb.ServicePort{{Name: "web", Protocol: lb.TCP, Port: 80, NodePort: uint16(1 + n)}},
		}
		r.Set(svc.Name, time.Time{}, lb.Resolve(&svc, nil, &lb.Node{Name: "n1", Limits: DefaultLimits}))
		mustApply(t, r)
	}
	if n := len(fakes.FrontendIDs.Entries); n != 12*count/share {
		t.Errorf("%d frontends are in the map, want %d", n, 12*count/share)
	}
	if n := share * len(fakes.ServicePorts.Entries); n > maps.MaxServicePorts {
		t.Errorf("%d service ports, and ids for %d", n, maps.MaxServicePorts)
	}
}

// Services with many source ranges leave the last quarter of the map to those with few, and a Service without room is told
// who has the most.
func TestManySourceRanges(t *testing.T) {
	fakes := maps.NewFakes(1 << 20)
	fakes.SourceRanges.Size = 4096
	r := mustNew(t, fakes.Tables, newTestClock())
	set := func(namespace, name string, number, ranges int) lb.ServiceName {
		h := newHeavy(1, ranges, 0, 0)
		h.Name = lb.ServiceName{Namespace: namespace, Name: name}
		h.ClusterIPs[0] = netip.AddrFrom4([4]byte{10, 96, 1, byte(number)})
		h.LoadBalancers[0].Addr = netip.AddrFrom4([4]byte{192, 0, 2, byte(number)})
		r.Set(h.Name, time.Time{}, h.resolve())
		for range 50 {
			if err := r.Apply(); err != nil && !errors.Is(err, maps.ErrFull) {
				t.Fatal(err)
			}
		}

		return h.Name
	}
	for n := range 8 {
		set("greedy", fmt.Sprint("many-", n), n, 1000)
	}
	few := set("tenant", "few", 100, 200)
	if status, _ := r.Status(few); !status.Programmed {
		t.Errorf("a Service with few source ranges is not programmed: %v", status.Failures)
	}
	many := set("tenant", "many", 101, 1000)
	status, _ := r.Status(many)
	if want := (Holder{"greedy", "source ranges"}); status.Holder != want {
		t.Errorf("a Service with many source ranges: %+v has the most, want %+v", status.Holder, want)
	}
}

// Of the Services without room as many are tried again as entries were freed, and rounds of that have a pause.
func TestRefusedServicesAreTriedSparingly(t *testing.T) {
	const fit, waiting = 10, 1000
	fakes, clock := maps.NewFakes(1<<20), newTestClock()
	fakes.FrontendIDs.Size = 4 * fit // two scopes of a ClusterIP and of its catch-all
	r := mustNew(t, fakes.Tables, clock)
	apply := func() {
		for range 20 {
			if err := r.Apply(); err != nil && !errors.Is(err, maps.ErrFull) {
				t.Fatal(err)
			}
			graces(r)
		}
	}
	name := func(n int) lb.ServiceName {
		return lb.ServiceName{Namespace: fmt.Sprint("ns-", n%3), Name: fmt.Sprint("service-", n)}
	}
	for n := range fit + waiting {
		svc := lb.Service{
			Name: name(n), ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(n >> 8), byte(n)})}, Families: []lb.Family{lb.IPv4},
			Ports: []lb.ServicePort{{Protocol: lb.TCP, Port: 80}},
		}
		r.Set(svc.Name, time.Time{}, lb.Resolve(&svc, nil, &lb.Node{Name: "n1"}))
		apply()
	}
	clock.pass(100 * time.Millisecond) // no backoff is over
	if allocs := testing.AllocsPerRun(10, func() { r.Next() }); allocs > 1 {
		t.Errorf("to find when to go on takes %v allocations beside %d Services that wait", allocs, waiting)
	}
	r.Delete(name(0))
	apply()
	programmed, again := 0, 0
	for n := range fit + waiting {
		if status, _ := r.Status(name(n)); status.Programmed {
			programmed++
		} else if svc := r.services[name(n)]; svc != nil && svc.retry.delay > firstRetry {
			again++
		}
	}
	if programmed != fit || again > 20 {
		t.Errorf("%d Services are programmed after one was deleted, want %d; and %d were refused again", programmed, fit, again)
	}
}

// Services that lack source ranges do not keep those from their turn that lack frontends, of which some were freed.
func TestFreedFrontendsAreForThoseThatLackThem(t *testing.T) {
	const ranges, unranged = 4, 40
	fakes, clock := maps.NewFakes(1<<20), newTestClock()
	fakes.SourceRanges.Size = ranges
	r := mustNew(t, fakes.Tables, clock)
	apply := func() {
		for range 20 {
			if err := r.Apply(); err != nil && !errors.Is(err, maps.ErrFull) {
				t.Fatal(err)
			}
			graces(r)
		}
	}
	set := func(name lb.ServiceName, res lb.Resolution) lb.ServiceName {
		r.Set(name, time.Time{}, res)
		apply()

		return name
	}
	first := set(tenant(1))
	var lacking []lb.ServiceName
	for n := range unranged {
		h := newHeavy(1, ranges+1, 0, 0)
		h.Name = lb.ServiceName{Namespace: fmt.Sprint("ns-", n), Name: "web"}
		h.ClusterIPs[0] = netip.AddrFrom4([4]byte{10, 96, 1, byte(n)})
		h.LoadBalancers[0].Addr = netip.AddrFrom4([4]byte{192, 0, 2, byte(n)})
		lacking = append(lacking, set(h.Name, h.resolve()))
	}
	fakes.FrontendIDs.Size = len(fakes.FrontendIDs.Entries)
	last := set(tenant(2))
	if status, _ := r.Status(last); status.Programmed {
		t.Fatal("there is room for the last Service")
	}
	clock.pass(roomPause) // every backoff was that long
	apply()
	clock.pass(roomPause / 2) // no backoff is over
	r.Delete(first)
	apply()
	clock.pass(roomPause / 2)
	apply()
	if status, _ := r.Status(last); !status.Programmed {
		t.Errorf("frontends were freed, and the Service that lacks some has none: %v", status.Failures)
	}
	for _, name := range append(lacking, last) {
		r.Delete(name)
	}
	apply()
	if n := r.blocked.count(); n != 0 {
		t.Errorf("%d Services that are gone wait for room", n)
	}
}
