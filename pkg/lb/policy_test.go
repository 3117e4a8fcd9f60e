package lb

import (
	"net/netip"
	"testing"
)

func TestTrafficPolicies(t *testing.T) {
	both := slice("a", endpoint("10.0.1.1", here), endpoint("10.0.2.1"))
	remote := slice("a", endpoint("10.0.2.1"))
	noneReady := slice("a", endpoint("10.0.2.1", unready))
	const all = "10.0.1.1:8080 10.0.2.1:8080"
	for _, test := range []struct {
		name    string
		svc     *Service
		slice   *EndpointSlice
		cluster string // what the ClusterIP leads to, in both scopes
		inside  string // what the others lead to, from inside
		outside string // and from outside
	}{
		{"all backends under Cluster", web(balanced), both, all, all, all},
		{"remote backends under Cluster", web(balanced), remote, "10.0.2.1:8080", "10.0.2.1:8080", "10.0.2.1:8080"},
		{"refused under Cluster if none is ready", web(balanced), noneReady, "reject", "reject", "reject"},
		{"local from outside only under external Local", web(balanced, externalLocal), both, all, all, "10.0.1.1:8080"},
		{"dropped from outside only if all are elsewhere", web(balanced, externalLocal), remote, "10.0.2.1:8080", "10.0.2.1:8080", "drop"},
		{"refused under external Local if none is ready on any node", web(balanced, externalLocal), noneReady, "reject", "reject", "reject"},
		{"local at the ClusterIP only under internal Local", web(balanced, internalLocal), both, "10.0.1.1:8080", all, all},
		{"dropped at the ClusterIP only if all are elsewhere", web(balanced, internalLocal), remote, "drop", "10.0.2.1:8080", "10.0.2.1:8080"},
		{"refused under internal Local if none is ready", web(balanced, internalLocal), noneReady, "reject", "reject", "reject"},
		{"local but for the way out under both", web(balanced, internalLocal, externalLocal), both, "10.0.1.1:8080", all, "10.0.1.1:8080"},
		{"all under an unknown policy", web(balanced, func(s *Service) { s.InternalPolicy, s.ExternalPolicy = 7, 7 }), both, all, all, all},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.svc.ExternalIPs = ips("192.0.2.1")
			checkLines(t, lines(Resolve(test.svc, []*EndpointSlice{test.slice}, &testNode)),
				"10.96.0.1:80/TCP internal -> "+test.cluster,
				"10.96.0.1:80/TCP external -> "+test.cluster,
				"1.2.3.4:80/TCP internal -> "+test.inside,
				"1.2.3.4:80/TCP external -> "+test.outside,
				"192.0.2.1:80/TCP internal -> "+test.inside,
				"192.0.2.1:80/TCP external -> "+test.outside,
				"0.0.0.0:30080/TCP internal -> "+test.inside,
				"0.0.0.0:30080/TCP external -> "+test.outside,
			)
		})
	}
}

func TestExternalPolicyCounts(t *testing.T) {
	nodePort := func(s *Service) { s.Ports[0].NodePort = 30080 }
	for _, test := range []struct {
		name  string
		svc   *Service
		local bool
	}{
		{"for a load balancer", web(func(s *Service) { s.Type = LoadBalancer }), true},
		{"for a node port", web(func(s *Service) { s.Type = NodePort }), true},
		{"not for a ClusterIP", web(), false},
		{"not for a ClusterIP with a load balancer's address", web(func(s *Service) { s.LoadBalancers = vips("1.2.3.4") }), false},
		{"for a ClusterIP with external IPs", web(func(s *Service) { s.ExternalIPs = ips("192.0.2.1") }), true},
		{"for a ClusterIP with an external IP of the other family", web(func(s *Service) { s.ExternalIPs = ips("2001:db8::9") }), true},
		{"for a ClusterIP with an external IP that is none", web(func(s *Service) { s.ExternalIPs = []netip.Addr{{}} }), true},
	} {
		t.Run(test.name, func(t *testing.T) {
			nodePort(test.svc)
			externalLocal(test.svc)
			want := "10.0.2.1:8080"
			if test.local {
				want = "drop"
			}
			r := Resolve(test.svc, []*EndpointSlice{slice("a", endpoint("10.0.2.1"))}, &testNode)
			if got := target(mustFrontend(t, r, "0.0.0.0:30080/TCP external")); got != want {
				t.Errorf("the node port leads to %s, want %s", got, want)
			}
		})
	}
}

func TestLocality(t *testing.T) {
	for _, test := range []struct {
		name  string
		node  string
		ep    Endpoint
		local bool
	}{
		{"our node's", "n1", endpoint("10.0.0.1", on("n1")), true},
		{"not another's", "n1", endpoint("10.0.0.1", on("n2")), false},
		{"not one that differs in case", "n1", endpoint("10.0.0.1", on("N1")), false},
		{"not that of no node", "n1", endpoint("10.0.0.1", on("")), false},
		{"not that of no node if we have no name either", "", endpoint("10.0.0.1", on("")), false},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := Resolve(web(), []*EndpointSlice{slice("a", test.ep)}, &Node{Name: test.node})
			if r.Endpoints[0].Local != test.local || r.Frontends[0].Backends[0].Local != test.local {
				t.Errorf("local is %v, want %v", r.Endpoints[0].Local, test.local)
			}
		})
	}
}
