package lb

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// mustTouch checks which Services of the namespace have been touched since the
// last call.
func mustTouch(t *testing.T, s *State, want ...string) {
	t.Helper()
	var got []string
	for _, name := range s.Touched() {
		got = append(got, name.Name)
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Fatalf("touched %v, want %v", got, want)
	}
}

// mustLead checks the backends of a Service's ClusterIP.
func mustLead(t *testing.T, s *State, service, want string) {
	t.Helper()
	r, ok := s.Resolve(ServiceName{"ns", service})
	if !ok {
		t.Fatalf("there is no Service %s", service)
	}
	if got := target(r.Frontends[0]); got != want {
		t.Fatalf("%s leads to %s, want %s", service, got, want)
	}
}

// service returns a Service like web under another name.
func service(name string, options ...func(*Service)) Service {
	svc := web(options...)
	svc.Name.Name = name
	return *svc
}

// sliceOf returns a slice like [slice] of another Service.
func sliceOf(service, name string, endpoints ...Endpoint) EndpointSlice {
	s := slice(name, endpoints...)
	s.Service.Name = service
	return *s
}

// A Service comes, gets endpoints, changes and goes away; its slices come
// before it and stay after it.
func TestLifeOfAService(t *testing.T) {
	s := NewState(testNode)
	mustTouch(t, s)

	s.SetSlice(sliceOf("a", "a-1", endpoint("10.0.0.1")))
	mustTouch(t, s)
	if _, ok := s.Resolve(ServiceName{"ns", "a"}); ok {
		t.Fatal("a slice made a Service")
	}

	s.SetService(service("a"))
	mustTouch(t, s, "a")
	mustTouch(t, s)
	mustLead(t, s, "a", "10.0.0.1:8080")

	s.SetSlice(sliceOf("a", "a-2", endpoint("10.0.0.2")))
	mustTouch(t, s, "a")
	mustLead(t, s, "a", "10.0.0.1:8080 10.0.0.2:8080")

	s.SetSlice(sliceOf("a", "a-2", endpoint("10.0.0.3")))
	mustTouch(t, s, "a")
	mustLead(t, s, "a", "10.0.0.1:8080 10.0.0.3:8080")

	s.DeleteSlice(SliceName{"ns", "a-1"})
	mustTouch(t, s, "a")
	mustLead(t, s, "a", "10.0.0.3:8080")

	s.DeleteService(ServiceName{"ns", "a"})
	mustTouch(t, s, "a")
	if _, ok := s.Resolve(ServiceName{"ns", "a"}); ok {
		t.Fatal("a deleted Service resolves")
	}

	s.SetService(service("a"))
	mustTouch(t, s, "a")
	mustLead(t, s, "a", "10.0.0.3:8080")

	s.DeleteService(ServiceName{"ns", "a"})
	s.DeleteSlice(SliceName{"ns", "a-2"})
	mustTouch(t, s, "a")
	mustBeEmpty(t, s)

	s.SetService(service("a"))
	s.DeleteService(ServiceName{"ns", "a"})
	mustTouch(t, s, "a")
	mustBeEmpty(t, s)

	s.SetService(service("a"))
	s.DeleteService(ServiceName{"ns", "a"})
	s.SetService(service("a"))
	mustTouch(t, s, "a")
	mustTouch(t, s)
}

func mustBeEmpty(t *testing.T, s *State) {
	t.Helper()
	if len(s.services)+len(s.slices) != 0 {
		t.Fatalf("something is left: %v, %v", s.services, s.slices)
	}
}

// Whether there are Services of SCTP is known as they come, change and go.
func TestHasSCTP(t *testing.T) {
	s := NewState(testNode)
	sctp := func(svc *Service) { svc.Ports[0].Protocol = SCTP }
	for i, step := range []struct {
		act  func()
		want bool
	}{
		{func() { s.SetService(service("a")) }, false},
		{func() { s.SetService(service("b", sctp)) }, true},
		{func() { s.SetService(service("a", sctp)) }, true},
		{func() { s.SetService(service("b")) }, true},
		{func() { s.DeleteService(ServiceName{"ns", "a"}) }, false},
		{func() { s.DeleteService(ServiceName{"ns", "b"}) }, false},
	} {
		if step.act(); s.HasSCTP() != step.want {
			t.Errorf("step %d: it is %v, want %v", i, s.HasSCTP(), step.want)
		}
	}
}

func TestWhatTouchesNothing(t *testing.T) {
	s := NewState(testNode)
	s.SetService(service("a", balanced))
	s.SetSlice(sliceOf("a", "a-1", endpoint("10.0.0.1", zones("za"))))
	s.Touched()

	s.SetService(service("a", balanced))
	s.SetSlice(sliceOf("a", "a-1", endpoint("10.0.0.1", zones("za"))))
	s.SetNode(Node{Name: "n1", Zone: "za", PrimaryIPs: ips("192.168.0.2", "2001:db8::2")})
	s.DeleteService(ServiceName{"ns", "b"})
	s.DeleteSlice(SliceName{"ns", "b-1"})
	s.SetSlice(sliceOf("b", "b-1", endpoint("10.0.0.1")))
	s.DeleteService(ServiceName{"ns", "b"})
	s.DeleteSlice(SliceName{"ns", "b-1"})
	mustTouch(t, s)
}

func TestSliceThatChangesItsService(t *testing.T) {
	s := NewState(testNode)
	s.SetService(service("a"))
	s.SetService(service("b"))
	s.SetSlice(sliceOf("a", "x", endpoint("10.0.0.1")))
	s.Touched()

	s.SetSlice(sliceOf("b", "x", endpoint("10.0.0.1")))
	mustTouch(t, s, "a", "b")
	mustLead(t, s, "a", "reject")
	mustLead(t, s, "b", "10.0.0.1:8080")
}

func TestNodeTouchesAll(t *testing.T) {
	s := NewState(testNode)
	s.SetService(service("b"))
	s.SetService(service("a"))
	s.SetService(service("c", func(s *Service) { s.Name.Namespace = "earlier" }))
	s.SetSlice(sliceOf("a", "a-1", endpoint("10.0.0.1", zones("za")), endpoint("10.0.0.2", zones("zb"))))
	s.SetSlice(sliceOf("absent", "absent-1", endpoint("10.0.0.1")))
	s.Touched()
	mustLead(t, s, "a", "10.0.0.1:8080")

	s.SetNode(Node{Name: "n1", Zone: "zb", PrimaryIPs: testNode.PrimaryIPs})
	mustTouch(t, s, "c", "a", "b")
	mustLead(t, s, "a", "10.0.0.2:8080")

	s.SetNode(Node{Name: "n1", Zone: "zb", PrimaryIPs: ips("192.168.0.3")})
	mustTouch(t, s, "c", "a", "b")
}

// Which of two slices counts does not depend on the order in which they were set.
func TestOrderOfSlices(t *testing.T) {
	on := func(node string) Endpoint {
		return endpoint("10.0.0.1", on(node))
	}
	slices := []EndpointSlice{sliceOf("a", "a-1", on("n1")), sliceOf("a", "a-2", on("n2")), sliceOf("a", "a-3", on("n3"))}
	for _, order := range [][]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
		s := NewState(testNode)
		s.SetService(service("a"))
		for _, i := range order {
			s.SetSlice(slices[i])
		}
		r, _ := s.Resolve(ServiceName{"ns", "a"})
		if len(r.Endpoints) != 1 || r.Endpoints[0].Place().NodeName != "n3" {
			t.Errorf("order %v: %+v", order, r.Endpoints)
		}
	}
}

func TestSnapshots(t *testing.T) {
	s := NewState(testNode)
	for _, name := range []string{"b", "c", "a"} {
		s.SetService(service(name))
	}
	s.SetSlice(sliceOf("absent", "absent-1"))
	s.SetSlice(sliceOf("b", "b-1", Endpoint{Addr: netip.MustParseAddr("10.0.0.1"), Ready: true, Serving: true}))
	var got []string
	var kept Snapshot
	for _, svc := range slices.SortedFunc(s.Snapshots(), Snapshot.Compare) {
		got = append(got, svc.Service.Name.Name)
		if svc.Service.Name.Name == "b" {
			kept = svc
		}
	}
	checkLines(t, got, "a", "b", "c")
	for range s.Snapshots() {
		break // which ends it
	}
	if s.DeleteService(ServiceName{Namespace: kept.Service.Name.Namespace, Name: "c"}); s.Len() != 2 {
		t.Errorf("%d Services are left, want 2", s.Len())
	}

	for _, change := range []func(){
		func() { s.SetSlice(sliceOf("b", "b-1", endpoint("10.0.0.9"), endpoint("10.0.0.10"))) },
		func() { s.SetSlice(sliceOf("b", "b-0", endpoint("10.0.0.8"))) },
		func() { s.SetNode(Node{Name: "n2", MasqueradeAll: true}) },
		func() { s.DeleteSlice(SliceName{Namespace: kept.Service.Name.Namespace, Name: "b-1"}) },
	} {
		change()
		if r := kept.Resolve(); len(r.Endpoints) != 1 || r.Endpoints[0].Addr.Addr() != ip("10.0.0.1") || r.Frontends[0].Masquerade {
			t.Errorf("a change of the State reached a Snapshot: %+v", r)
		}
	}
}

// The estimates of a Snapshot are exact for ordinary Services.
func TestEstimates(t *testing.T) {
	s := NewState(testNode)
	svc := service("a")
	named("a", "b")(&svc)
	svc.ExternalIPs = ips("192.0.2.1", "192.0.2.2")
	s.SetService(svc)
	two := sliceOf("a", "a-1", endpoint("10.0.0.1"), endpoint("10.0.0.2"), endpoint("10.0.0.3"))
	two.Ports = []EndpointPort{{Name: "a", Protocol: TCP, Port: 8080}, {Name: "b", Protocol: TCP, Port: 8081}}
	s.SetSlice(two)
	snapshot, _ := s.Snapshot(svc.Name)
	r := snapshot.Resolve()
	if got, want := snapshot.Frontends(), len(r.Frontends); got != want {
		t.Errorf("the estimate is %d frontends, there are %d", got, want)
	}
	if got, want := snapshot.Endpoints(), len(r.Endpoints); got != want {
		t.Errorf("the estimate is %d endpoints, there are %d", got, want)
	}
}

// Every field of the types that a State compares makes a difference. A change of a field
// that equal forgets would be lost.
func TestEqualForgetsNoField(t *testing.T) {
	differ(t, EndpointSlice{}, func(a, b EndpointSlice) bool { return a.equal(&b) })
	differ(t, Node{}, func(a, b Node) bool { return a.equal(&b) })
	differ(t, Service{}, func(a, b Service) bool { return a.equal(&b) })
}

// differ checks that a value with any one field set is not equal to zero.
func differ[T any](t *testing.T, zero T, equal func(a, b T) bool) {
	t.Helper()
	if !equal(zero, zero) {
		t.Errorf("%T is not equal to itself", zero)
	}
	for i := range reflect.TypeFor[T]().NumField() {
		changed := zero
		field := reflect.ValueOf(&changed).Elem().Field(i)
		field.Set(someValue(t, field.Type()))
		if equal(zero, changed) || equal(changed, zero) {
			t.Errorf("%T: %s makes no difference", zero, reflect.TypeFor[T]().Field(i).Name)
		}
	}
}

func someValue(t *testing.T, of reflect.Type) reflect.Value {
	t.Helper()
	some := reflect.New(of).Elem()
	switch of {
	case reflect.TypeFor[netip.Addr]():
		some.Set(reflect.ValueOf(ip("10.0.0.1")))
		return some
	case reflect.TypeFor[time.Time]():
		some.Set(reflect.ValueOf(time.Unix(1, 0)))
		return some
	}
	switch of.Kind() {
	case reflect.String:
		some.SetString("x")
	case reflect.Bool:
		some.SetBool(true)
	case reflect.Uint8, reflect.Uint16:
		some.SetUint(1)
	case reflect.Int, reflect.Int64:
		some.SetInt(1)
	case reflect.Slice:
		some.Set(reflect.MakeSlice(of, 1, 1))
	case reflect.Struct:
		some.Field(0).Set(someValue(t, of.Field(0).Type))
	default:
		t.Fatalf("there is no value of %v for the test", of)
	}
	return some
}

func TestSameMomentIsEqual(t *testing.T) {
	now := time.Unix(1e9, 0)
	a, b := web(), web()
	a.Created, b.Created = now, now.In(time.FixedZone("elsewhere", 3600))
	if !a.equal(b) {
		t.Error("a Service differs by the time zone of its creation")
	}
}

func TestEqualLooksIntoEndpoints(t *testing.T) {
	a, b := slice("a", endpoint("10.0.0.1")), slice("a", endpoint("10.0.0.1", draining))
	if a.equal(b) {
		t.Error("an endpoint's condition makes no difference")
	}
}

// An address at which an API server answers is no Service's that leads elsewhere, neither by an
// external IP nor by a load balancer, whichever came first; other ports and protocols of it are.
func TestAPIServersKeepTheirAddresses(t *testing.T) {
	t.Run("IPv4", func(t *testing.T) { testAPIServersKeep(t, IPv4, "192.0.2.1", "192.0.2.2", "10.0.0.1") })
	t.Run("IPv6", func(t *testing.T) { testAPIServersKeep(t, IPv6, "2001:db8::1", "2001:db8::2", "fd00:1::1") })
}

func testAPIServersKeep(t *testing.T, family Family, address, other, pod string) {
	t.Helper()
	sliceOf := func(service, name string, endpoints ...Endpoint) EndpointSlice {
		s := sliceOf(service, name, endpoints...)
		s.Family = family
		return s
	}
	server := sliceOf("kubernetes", "kubernetes", endpoint(address))
	server.Service, server.Name.Namespace = KubernetesService, KubernetesService.Namespace
	server.Ports[0].Port = 6443
	at := netip.AddrPortFrom(ip(address), 6443).String()

	external := func(s *Service) {
		s.ExternalIPs = ips(address, other)
		s.Ports = []ServicePort{{"http", TCP, 6443, 0}, {"http", UDP, 6443, 0}, {"other", TCP, 80, 0}}
	}
	balancer := func(s *Service) {
		s.Type, s.LoadBalancers = LoadBalancer, vips(address)
		s.Ports = []ServicePort{{"http", TCP, 6443, 0}}
	}
	s := NewState(testNode)
	s.SetService(service("external", dualStack, external))
	s.SetService(service("balancer", dualStack, balancer))
	s.SetService(service("empty", dualStack, balancer))
	s.SetService(service("front", dualStack, balancer)) // a load balancer in front of the API servers
	s.SetSlice(sliceOf("external", "external", endpoint(pod)))
	s.SetSlice(sliceOf("balancer", "balancer", endpoint(address), endpoint(pod)))
	front := sliceOf("front", "front", endpoint(address))
	front.Ports[0].Port = 6443
	s.SetSlice(front)
	s.Touched()

	check := func(service string, has, told bool) {
		t.Helper()
		r, _ := s.Resolve(ServiceName{"ns", service})
		var keys []string
		for _, f := range r.Frontends {
			if f.Key.Scope == Internal {
				keys = append(keys, fmt.Sprint(netip.AddrPortFrom(f.Key.Addr, f.Key.Port), "/", f.Key.Protocol))
			}
		}
		if got := slices.Contains(keys, at+"/TCP"); got != has {
			t.Errorf("%s has %s: %v, want %v", service, at, got, has)
		}
		if service == "external" && !(slices.Contains(keys, at+"/UDP") && slices.Contains(keys, netip.AddrPortFrom(ip(address), 80).String()+"/TCP") && slices.Contains(keys, netip.AddrPortFrom(ip(other), 6443).String()+"/TCP")) {
			t.Errorf("%s has %v: too few", service, keys)
		}
		if got := strings.Contains(fmt.Sprint(r.Problems), at+" is not in use: an API server answers there"); got != told {
			t.Errorf("%s: problems are %v", service, r.Problems)
		}
	}
	all := []string{"balancer", "empty", "external", "front"}
	for _, name := range all {
		check(name, true, false)
	}

	s.SetSlice(server)
	mustTouch(t, s, all...)
	for _, name := range all {
		check(name, name == "front", name != "front")
	}

	s.DeleteSlice(server.Name)
	mustTouch(t, s, all...)
	node := testNode
	node.Dialed = []netip.AddrPort{netip.MustParseAddrPort(at)}
	s.SetNode(node)
	mustTouch(t, s, all...)
	for _, name := range all { // it is not known that front leads there
		check(name, false, true)
	}

	s.SetSlice(server)
	s.SetNode(testNode) // the endpoints are kept
	for _, name := range all {
		check(name, name == "front", name != "front")
	}
}
