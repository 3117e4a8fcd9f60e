package flows

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-lb/sluice/test/lab"
)

// A scenario may have any number of Services and flows. This one's clients need more
// ports than one world has, and dial the same addresses again.
func TestManyFlows(t *testing.T) {
	t.Parallel()
	scenarios, err := read(strings.NewReader(manyFlows(25)))
	lab.Must(t, err)
	s := &scenarios[0]
	if parts := s.parts(portsOfWorld); len(parts) < 2 {
		t.Errorf("%d flows are played in %d world, want more", len(s.Flows), len(parts))
	}
	var all caseCounts
	t.Cleanup(func() { t.Log(&all) })
	play(t, s, portsOfWorld, &all)
}

// manyFlows is a file with one scenario. Each of its Services has a port of each
// protocol with a node port, three endpoints, and flows of all kinds of clients.
func manyFlows(services int) string {
	var objects, endpoints, flows strings.Builder
	for i := range services {
		const clusterIPs, pods, others = "172.30.0", "10.180.0", "10.180.1"
		ip := fmt.Sprintf("%s.%d", clusterIPs, i+1)
		answering := []string{fmt.Sprintf("%s.%d", pods, 2*i+1), fmt.Sprintf("%s.%d", pods, 2*i+2), fmt.Sprintf("%s.%d", others, i+1)}
		nodePort := 30000 + 3*i
		fmt.Fprintf(&objects, "- {namespace: ns1, name: s%d, type: NodePort, clusterIP: %s, ports: ["+
			"{name: a, port: 80, protocol: TCP, nodePort: %d}, {name: b, port: 80, protocol: UDP, nodePort: %d}, {name: c, port: 80, protocol: SCTP, nodePort: %d}]}\n",
			i, ip, nodePort, nodePort+1, nodePort+2)
		fmt.Fprintf(&endpoints, `- name: s%d-1
  service: ns1/s%d
  addressType: IPv4
  ports: [{name: a, port: 8080, protocol: TCP}, {name: b, port: 8081, protocol: UDP}, {name: c, port: 8082, protocol: SCTP}]
  endpoints:
  - {addresses: [%s], nodeName: test-node}
  - {addresses: [%s], nodeName: test-node}
  - {addresses: [%s], nodeName: other}
`, i, i, answering[0], answering[1], answering[2])

		add := func(source, dest string, port, protocol int, masq bool) {
			name := [...]corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP}[protocol]
			var output []string
			for _, address := range answering {
				output = append(output, fmt.Sprintf("'%s:%d'", address, 8080+protocol))
			}
			fmt.Fprintf(&flows, "- {name: from %s to %s:%d, sourceIP: %s, destIP: %s, destPort: %d, protocol: %s, output: [%s], masq: %t}\n",
				source, dest, port, source, dest, port, name, strings.Join(output, ", "), masq)
		}
		add("203.0.113.2", ip, 80, 0, true)
		add("10.0.0.2", ip, 80, i%3, false)
		add("192.168.0.2", "192.168.0.2", nodePort+i%2, i%2, true)
		if i%3 == 0 {
			add("203.0.113.2", "192.168.0.2", nodePort+2, 2, true)
		}
	}

	return `name: many-flows
node: {name: test-node, ipFamily: IPv4, primaryIP: 192.168.0.2, localIPs: [192.168.0.2], localCIDR: 10.0.0.0/8, serviceCIDRs: [172.30.0.0/16]}
services:
` + objects.String() + "endpointslices:\n" + endpoints.String() + "flows:\n" + flows.String()
}

// Each part fits into a world, all flows are in one, and a flow that no world has
// the ports for is alone in its own.
func TestParts(t *testing.T) {
	scenarios, err := read(strings.NewReader(manyFlows(4)))
	lab.Must(t, err)
	s := &scenarios[0]
	for _, ports := range []int{0, 77, 78, 200, 400, 10000} {
		var flows []flow
		for _, part := range s.parts(ports) {
			flows = append(flows, part.Flows...)
			need := 0
			for _, f := range part.Flows {
				need += s.portsFor(f)
			}
			if need > ports && len(part.Flows) > 1 {
				t.Errorf("%d flows of a part need %d ports, want %d at most", len(part.Flows), need, ports)
			}
			if len(part.Services) != len(s.Services) || len(part.EndpointSlices) != len(s.EndpointSlices) {
				t.Errorf("a part for %d ports has not all objects", ports)
			}
		}
		if !slices.EqualFunc(flows, s.Flows, func(a, b flow) bool { return a.Name == b.Name }) {
			t.Errorf("parts for %d ports have flows %v, want %v", ports, flows, s.Flows)
		}
	}
	if got := len(s.parts(10000)); got != 1 {
		t.Errorf("%d parts, though all flows fit into one", got)
	}
	none := *s
	none.Flows = nil
	if got := len(none.parts(10000)); got != 1 {
		t.Errorf("%d parts of a scenario without flows, want 1: its objects are loaded", got)
	}
}

// No server of a world listens where its clients are, and no port comes twice.
func TestClientPorts(t *testing.T) {
	here := "n"
	s := &scenario{
		Node: node{Name: here},
		EndpointSlices: []slice{{
			Ports:     []discoveryv1.EndpointPort{{Port: new(int32(61000))}},
			Endpoints: []endpoint{{Addresses: []string{"10.180.0.1"}, NodeName: &here}},
		}},
		Flows: []flow{{DestPort: 61001, Output: []string{"10.180.0.2:61002"}}},
	}
	ports := s.clientPorts()
	if sorted := slices.Sorted(slices.Values(ports)); len(slices.Compact(sorted)) != len(ports) || len(ports) < portsOfWorld {
		t.Errorf("%d ports, some of them twice or too few", len(ports))
	}
	for _, taken := range []uint16{1023, 30000, 32768, 60999, 61000, 61001, 61002} {
		if slices.Contains(ports, taken) {
			t.Errorf("a client may have port %d", taken)
		}
	}
}

// A client that is done leaves its port to the next one, of the same source, as soon as the server has
// closed the connection, too: not after a minute of TIME_WAIT.
func TestPortsAreFreeSoon(t *testing.T) {
	ns := mustClients(t, "clients")
	at := netip.MustParseAddrPort("10.0.0.1:80")
	lab.Must(t, ns.AddAddress("lo", single(at.Addr())))
	lab.MustServe(t, ns, "server", "tcp/"+at.String())
	caller := lab.MustCaller(t, ns, nil)
	for range 3 {
		lab.EventuallyIn(t, 10*time.Second, "the port is free", func() error {
			_, err := caller.Exchange(lab.Exchange{Network: "tcp", Address: at.String(), From: "10.0.0.1:61000"})

			return err
		})
	}
}
