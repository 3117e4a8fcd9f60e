package lb

import "testing"

// A Service with all kinds of addresses and the external traffic policy Local, as clients outside see it on a node that has a
// usable endpoint, and on one that has none.
func TestFailover(t *testing.T) {
	remote, local := endpoint("10.0.0.1"), endpoint("10.0.0.2", here)
	ending := endpoint("10.0.0.3", here, draining)
	for _, test := range []struct {
		name      string
		failover  Failover
		endpoints []Endpoint
		want      map[Kind]string
	}{
		{"none, without an endpoint here", NoFailover, []Endpoint{remote}, map[Kind]string{KindLoadBalancer: "drop", KindNodePort: "drop"}},
		{"fallback, with one", Fallback, []Endpoint{remote, local}, map[Kind]string{KindLoadBalancer: "10.0.0.2:8080", KindNodePort: "10.0.0.2:8080"}},
		{"fallback, with one that terminates", Fallback, []Endpoint{remote, ending}, map[Kind]string{KindLoadBalancer: "10.0.0.3:8080", KindNodePort: "10.0.0.3:8080"}},
		{"fallback, without", Fallback, []Endpoint{remote}, map[Kind]string{KindLoadBalancer: "10.0.0.1:8080", KindNodePort: "10.0.0.1:8080"}},
		{"fallback, without one on any node", Fallback, []Endpoint{endpoint("10.0.0.1", unready)}, map[Kind]string{KindLoadBalancer: "reject", KindNodePort: "reject"}},
		{"passthrough, with one", Passthrough, []Endpoint{remote, local}, map[Kind]string{KindLoadBalancer: "10.0.0.2:8080", KindNodePort: "10.0.0.2:8080"}},
		{"passthrough, without", Passthrough, []Endpoint{remote}, map[Kind]string{KindLoadBalancer: "pass", KindNodePort: "drop"}},
		{"passthrough, without one on any node", Passthrough, nil, map[Kind]string{KindLoadBalancer: "pass", KindNodePort: "reject"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			svc := web(balanced, externalLocal, func(s *Service) { s.Failover = test.failover })
			r := Resolve(svc, []*EndpointSlice{slice("web-1", test.endpoints...)}, &testNode)
			inside := "reject"
			for _, f := range r.Frontends {
				if f.Key.Port == 0 {
					continue
				}
				got := target(f)
				if f.PassIfEmpty {
					got = "pass"
				}
				if want, outside := test.want[f.Kind]; outside && f.Key.Scope == External {
					if got != want {
						t.Errorf("%s leads to %s, want %s", f.Key, got, want)
					}
				} else if inside = got; f.PassIfEmpty {
					t.Errorf("%s passes its clients inside", f.Key)
				}
			}
			if usable := len(test.endpoints) > 0 && test.endpoints[0].Ready; usable != (inside != "reject" && inside != "drop") {
				t.Errorf("inside it leads to %s", inside)
			}
			if got, want := r.LocalReady(IPv4), 0; len(test.endpoints) < 2 && got != want {
				t.Errorf("load balancers are told of %d endpoints here, want %d", got, want)
			}
		})
	}
}

// With masqueradeAll, clients outside are masqueraded as under the policy Cluster, and those inside as under Local.
func TestFallbackIsMasqueraded(t *testing.T) {
	node := testNode
	node.MasqueradeAll = true
	svc := web(balanced, externalLocal, func(s *Service) { s.Failover = Fallback })
	for _, f := range Resolve(svc, []*EndpointSlice{slice("web-1", endpoint("10.0.0.1"))}, &node).Frontends {
		want := f.Kind == KindClusterIP || f.Key.Scope == External
		if f.Key.Port != 0 && f.Masquerade != want {
			t.Errorf("clients of %s are masqueraded: %v, want %v", f.Key, f.Masquerade, want)
		}
	}
}
