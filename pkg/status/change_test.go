package status

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/lab"
)

// On node-1, clients of ns/web inside of the cluster have two endpoints, and those outside the one of this node.
func TestTrial(t *testing.T) {
	slice := func(change func(*lb.EndpointSlice)) lb.Change {
		s := *webSlice()
		s.Endpoints = slices.Clone(s.Endpoints)
		change(&s)

		return lb.Change{Slices: []lb.EndpointSlice{s}}
	}
	service := func(change func(*lb.Service)) lb.Change {
		s := *web()
		change(&s)

		return lb.Change{Services: []lb.Service{s}}
	}
	unchanged := []string{
		"ns/web:http Cluster 10.0.1.9:8080 0.50 0.50 ",
		"ns/web:http Cluster 10.0.1.10:8080 0.50 0.50 ",
		"ns/web:http Cluster 10.0.1.11:8080 0.00 0.00 not ready",
		"ns/web:http Local 10.0.1.9:8080 0.00 0.00 other node (traffic policy Local)",
		"ns/web:http Local 10.0.1.10:8080 1.00 1.00 ",
		"ns/web:http Local 10.0.1.11:8080 0.00 0.00 not ready",
	}
	taken := webKey(80)
	taken.Addr = netip.MustParseAddr("192.0.2.9")
	for _, test := range []struct {
		name   string
		change lb.Change
		owners map[lb.FrontendKey]Owner
		want   []string
	}{
		{"the same", slice(func(*lb.EndpointSlice) {}), nil, nil},
		{"an endpoint goes", slice(func(s *lb.EndpointSlice) { s.Endpoints = s.Endpoints[:1] }), nil, []string{
			"ns/web changed without [ns/web:dns]",
			"ns/web:http Cluster 10.0.1.9:8080 0.50 0.00 goes",
			"ns/web:http Cluster 10.0.1.10:8080 0.50 1.00 ",
			"ns/web:http Cluster 10.0.1.11:8080 0.00 0.00 goes",
			"ns/web:http Local 10.0.1.9:8080 0.00 0.00 goes",
			"ns/web:http Local 10.0.1.10:8080 1.00 1.00 ",
			"ns/web:http Local 10.0.1.11:8080 0.00 0.00 goes",
		}},
		{"one that was not ready is", slice(func(s *lb.EndpointSlice) { s.Endpoints[2].Ready, s.Endpoints[2].Serving = true, true }), nil, []string{
			"ns/web changed without [ns/web:dns]",
			"ns/web:http Cluster 10.0.1.9:8080 0.50 0.33 ",
			"ns/web:http Cluster 10.0.1.10:8080 0.50 0.33 ",
			"ns/web:http Cluster 10.0.1.11:8080 0.00 0.33 ",
			"ns/web:http Local 10.0.1.9:8080 0.00 0.00 other node (traffic policy Local)",
			"ns/web:http Local 10.0.1.10:8080 1.00 0.50 ",
			"ns/web:http Local 10.0.1.11:8080 0.00 0.50 ",
		}},
		{"all go", lb.Change{Slices: []lb.EndpointSlice{*webSlice()}, Deleted: true}, nil, []string{
			"ns/web changed without [ns/web:dns ns/web:http]",
			"ns/web:http Cluster 10.0.1.9:8080 0.50 0.00 goes",
			"ns/web:http Cluster 10.0.1.10:8080 0.50 0.00 goes",
			"ns/web:http Cluster 10.0.1.11:8080 0.00 0.00 goes",
			"ns/web:http Local 10.0.1.9:8080 0.00 0.00 goes",
			"ns/web:http Local 10.0.1.10:8080 1.00 0.00 goes",
			"ns/web:http Local 10.0.1.11:8080 0.00 0.00 goes",
		}},
		{"other addresses, another algorithm", service(func(s *lb.Service) {
			s.LoadBalancers = []lb.LoadBalancerIP{{Addr: netip.MustParseAddr("192.0.2.9")}}
			s.Ports = s.Ports[:1]
			s.ClusterIPs, s.Families, s.ExternalPolicy, s.Algorithm = s.ClusterIPs[:1], s.Families[:1], lb.Cluster, lb.Maglev
		}), map[lb.FrontendKey]Owner{taken: {lb.ServiceName{Namespace: "ns", Name: "other"}, true}}, []string{
			"ns/web changed without []",
			"ns/web:dns ClusterIP 10.96.0.1:53 goes",
			"ns/web:dns ClusterIP [fd00::1]:53 goes",
			"ns/web:dns LoadBalancer 192.0.2.1:53 goes",
			"ns/web:http ClusterIP 10.96.0.1:80 algorithm random → maglev",
			"ns/web:http ClusterIP [fd00::1]:80 goes",
			"ns/web:http LoadBalancer 192.0.2.1:80 goes",
			"ns/web:http LoadBalancer 192.0.2.9:80 comes ns/other yields",
			"ns/web:http NodePort 0.0.0.0:30080 algorithm random → maglev, policy outside Local → Cluster",
			"ns/web:http NodePort [::]:30080 goes",
			"ns/web:http Cluster 10.0.1.9:8080 0.50 0.50 ",
			"ns/web:http Cluster 10.0.1.10:8080 0.50 0.50 ",
			"ns/web:http Cluster 10.0.1.11:8080 0.00 0.00 not ready",
			"ns/web:http Local 10.0.1.9:8080 0.00 0.00 goes",
			"ns/web:http Local 10.0.1.10:8080 1.00 0.00 goes",
			"ns/web:http Local 10.0.1.11:8080 0.00 0.00 goes",
		}},
		{"another health check node port", service(func(s *lb.Service) { s.HealthCheckNodePort = 31000 }), nil, append([]string{
			"ns/web changed without [ns/web:dns] health check 0 → 31000",
		}, unchanged...)},
		{"where clients outside go without an endpoint here", service(func(s *lb.Service) { s.Failover = lb.Passthrough }), nil, append([]string{
			"ns/web changed without [ns/web:dns]",
			"ns/web:dns LoadBalancer 192.0.2.1:53 packets from outside reject → pass",
		}, unchanged...)},
		{"a new Service", lb.Change{Services: []lb.Service{{
			Name: lb.ServiceName{Namespace: "ns", Name: "new"}, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.7")}, Families: []lb.Family{lb.IPv4},
			Ports: []lb.ServicePort{{Protocol: lb.TCP, Port: 80}},
		}}}, nil, []string{"ns/new new without [ns/new]", "ns/new ClusterIP 10.96.0.7:80 comes"}},
		{"the Service goes", lb.Change{Services: []lb.Service{*web()}, Deleted: true}, nil, []string{
			"ns/web deleted without []",
			"ns/web:dns ClusterIP 10.96.0.1:53 goes",
			"ns/web:dns ClusterIP [fd00::1]:53 goes",
			"ns/web:dns LoadBalancer 192.0.2.1:53 goes",
			"ns/web:http ClusterIP 10.96.0.1:80 goes",
			"ns/web:http ClusterIP [fd00::1]:80 goes",
			"ns/web:http LoadBalancer 192.0.2.1:80 goes",
			"ns/web:http NodePort 0.0.0.0:30080 goes",
			"ns/web:http NodePort [::]:30080 goes",
			"ns/web:http Cluster 10.0.1.9:8080 0.50 0.00 goes",
			"ns/web:http Cluster 10.0.1.10:8080 0.50 0.00 goes",
			"ns/web:http Cluster 10.0.1.11:8080 0.00 0.00 goes",
			"ns/web:http Local 10.0.1.9:8080 0.00 0.00 goes",
			"ns/web:http Local 10.0.1.10:8080 1.00 0.00 goes",
			"ns/web:http Local 10.0.1.11:8080 0.00 0.00 goes",
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			tables := maps.NewFakes(100).Tables
			tried := TrialInput{Node: &lb.Node{Name: "node-1"}, Owners: test.owners}
			tried.Outcomes = test.change.Outcomes(tried.Node, []lb.Snapshot{snapshotOf(web(), webSlice())})
			trial, err := tried.trial(t.Context(), &tables)
			lab.Must(t, err)
			if diff := cmp.Diff(test.want, linesOf(trial)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// The connections that a change costs are those to endpoints that go, each counted once, however many traffic policies list it.
func TestTrialCountsConnections(t *testing.T) {
	fakes := maps.NewFakes(100)
	lab.Must(t, fakes.ServicePorts.Put(1, maps.ServicePortOf("ns", "web", "http", uint8(lb.TCP), uint8(lb.IPv4))))
	live := map[string]int{"10.0.1.10:8080": 3, "10.0.1.9:8080": 5, "10.0.1.11:8080": 7}
	place := uint32(0)
	for addr, sockets := range live {
		place++
		mustPut(t, fakes.Backends, place, maps.BackendOf(place, 1, netip.MustParseAddrPort(addr), 0))
		mustPut(t, fakes.Loads.Array, place, maps.BackendLoad{Sockets: int32(sockets)})
	}
	slice := *webSlice()
	slice.Endpoints = slice.Endpoints[:1]
	change, node := lb.Change{Slices: []lb.EndpointSlice{slice}}, &lb.Node{Name: "node-1"}
	tried := TrialInput{Node: node, Outcomes: change.Outcomes(node, []lb.Snapshot{snapshotOf(web(), webSlice())})}
	trial, err := tried.trial(t.Context(), &fakes.Tables)
	lab.Must(t, err)
	if len(trial.Services) != 1 || trial.Services[0].Connections != 5+7 {
		t.Fatalf("it costs %+v, want the connections of the two endpoints that go", trial.Services)
	}
	for _, e := range trial.Services[0].Endpoints {
		if want := live[e.Address.String()]; e.Connections != want {
			t.Errorf("%s has %d connections by %s, want %d", e.Address, e.Connections, e.Policy, want)
		}
	}
}

func linesOf(trial Trial) (lines []string) {
	for _, svc := range trial.Services {
		line := fmt.Sprintf("%s %s without %v", svc.Name, svc.Outcome, svc.Without)
		if svc.HealthCheck != "" {
			line += " health check " + svc.HealthCheck
		}
		lines = append(lines, line)
		for _, f := range svc.Frontends {
			line := fmt.Sprintf("%s %s %s %s", f.Service, f.Kind, f.Address, f.Outcome)
			if f.Contested != "" {
				line += " " + f.Contested
			}
			if f.Yields {
				line += " yields"
			}
			lines = append(lines, line)
		}
		for _, e := range svc.Endpoints {
			lines = append(lines, fmt.Sprintf("%s %s %s %.2f %.2f %s", e.Service, e.Policy, e.Address, e.Now, e.Then, e.State))
		}
	}

	return lines
}
