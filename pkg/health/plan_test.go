package health

import (
	"fmt"
	"net/netip"
	"testing"
	"unique"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// TestCheckOf shows which Services have a health check, and what it answers.
func TestCheckOf(t *testing.T) {
	name := lb.ServiceName{Namespace: "ns", Name: "web"}
	here, there := unique.Make(lb.Place{NodeName: "node-1"}), unique.Make(lb.Place{NodeName: "node-2"})
	v4 := lb.EndpointSlice{
		Name: lb.SliceName{Namespace: "ns", Name: "web-1"}, Service: name, Family: lb.IPv4,
		Ports: []lb.EndpointPort{{Name: "http", Protocol: lb.TCP, Port: 8080}},
		Endpoints: []lb.Endpoint{
			{Addr: netip.MustParseAddr("10.0.1.10"), Place: here, Ready: true, Serving: true},
			{Addr: netip.MustParseAddr("10.0.1.9"), Place: there, Ready: true, Serving: true},
			{Addr: netip.MustParseAddr("10.0.1.11"), Place: here},
		},
	}
	v6 := lb.EndpointSlice{
		Name: lb.SliceName{Namespace: "ns", Name: "web-6"}, Service: name, Family: lb.IPv6,
		Ports: []lb.EndpointPort{{Name: "http", Protocol: lb.TCP, Port: 8080}, {Name: "dns", Protocol: lb.UDP, Port: 53}},
	}
	for i := range 3 {
		v6.Endpoints = append(v6.Endpoints, lb.Endpoint{
			Addr: netip.MustParseAddr(fmt.Sprintf("fd00:1::%d", i+1)), Place: here, Ready: i < 2, Serving: true, Terminating: i == 2,
		})
	}
	for _, test := range []struct {
		name string
		edit func(*lb.Service)
		want *Check
	}{
		{"by ready local endpoints, for each family", func(*lb.Service) {}, &Check{Port: 30000, Ready: map[lb.Family]int{lb.IPv4: 1, lb.IPv6: 2}}},
		{"of one family", func(s *lb.Service) {
			s.ClusterIPs, s.Families = s.ClusterIPs[1:], s.Families[1:]
		}, &Check{Port: 30000, Ready: map[lb.Family]int{lb.IPv6: 2}}},
		{"not without a port", func(s *lb.Service) { s.HealthCheckNodePort = 0 }, nil},
		{"not with policy Cluster", func(s *lb.Service) { s.ExternalPolicy = lb.Cluster }, nil},
		{"not of another type", func(s *lb.Service) { s.Type = lb.NodePort }, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			svc := &lb.Service{
				Name: name, Type: lb.LoadBalancer, ExternalPolicy: lb.Local, HealthCheckNodePort: 30000,
				ClusterIPs:    []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00::1")},
				Families:      []lb.Family{lb.IPv4, lb.IPv6},
				LoadBalancers: []lb.LoadBalancerIP{{Addr: netip.MustParseAddr("192.0.2.1")}},
				Ports: []lb.ServicePort{
					{Name: "http", Protocol: lb.TCP, Port: 80, NodePort: 30080}, {Name: "dns", Protocol: lb.UDP, Port: 53},
				},
			}
			test.edit(svc)
			res := lb.Resolve(svc, []*lb.EndpointSlice{&v4, &v6}, &lb.Node{Name: "node-1"})
			if diff := cmp.Diff(test.want, CheckOf(svc, res)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	if got := CheckOf(nil, lb.Resolution{}); got != nil {
		t.Errorf("of no Service it is %+v", got)
	}
}

// A check that is planned is answered once its Service is in force, and gone only once the end of the
// check is in force, too.
func TestPublishesWhatIsInForce(t *testing.T) {
	name := lb.ServiceName{Namespace: "ns", Name: "web"}
	s := NewServices(ServicesConfig{})
	mustAnswer := func(when string, inForce, want bool) {
		t.Helper()
		s.Publish(func(lb.ServiceName) bool { return inForce })
		if got := len(s.wanted()) > 0; got != want {
			t.Errorf("%s, there is a check: %t, want %t", when, got, want)
		}
	}
	s.PlanAddresses([]netip.Addr{netip.IPv4Unspecified()})
	s.Plan(name, nil)
	mustAnswer("without a check", true, false)
	s.Plan(name, &Check{Port: 30000, Ready: map[lb.Family]int{lb.IPv4: 1}})
	mustAnswer("before it is in force", false, false)
	mustAnswer("when it is in force", true, true)
	s.Plan(name, nil)
	mustAnswer("before its end is in force", false, true)
	mustAnswer("when its end is in force", true, false)
	s.Plan(name, &Check{Port: 30000, Ready: map[lb.Family]int{lb.IPv4: 1}})
	mustAnswer("planned again", false, false)
	s.Plan(name, nil)
	mustAnswer("when its Service is gone before it was in force", true, false)
}
