package compat

import (
	"fmt"
	"strings"
)

const head = `# kube-proxy's contract, row by row

The interfaces of kube-proxy 1.37, and which of them Sluice has. This page is generated from test/compat/*.yaml by
` + "`go test ./test/compat -update`" + `. Tests fail if a flag or field of kube-proxy has no row, if a row names a flag or a default
that ` + "`sluice agent`" + ` does not have, or if a named test does not exist.

- **supported**: it has the same meaning as in kube-proxy.
- **mapped**: it has a different meaning with the same purpose, which the row describes.
- **meaningless**: it is accepted and has no effect; it is logged once if it does not have its default.
- **added**: kube-proxy does not have it.
`

const tail = `
## Addresses that no Service has

A loopback, link-local, multicast, broadcast or unspecified address means another destination in each network namespace, so it is never an address of a Service, wherever it stands: with
` + "`status.loadBalancer.ingress: [{ip: 127.0.0.1}]`" + `, as minikube's tunnel writes it, localhost stays that of each pod and of the node. An API server refuses most of them as external IPs and as endpoints (not broadcast, and groups beyond a link), and none as a load balancer's;
kube-proxy has rules for them. The Service gets an Event that names the field, and its other addresses are in use. An endpoint with such an address, from manifests, is ignored, and told likewise.

What answers at the API servers' own addresses and ports (TCP: the endpoints of ` + "`default/kubernetes`" + `, and where the agent dials its API server) is never a Service's by an external IP or a load balancer's address,
unless all of its endpoints are API servers: with kube-proxy, who may write Services takes the API server from all pods and nodes, and from kube-proxy, which then cannot learn that the Service was deleted.

## Session affinity

An endpoint that comes back within five minutes, or while connections to it live, is the backend that it was, also if the agent restarts meanwhile: its clients go there again, unless they have got another one meanwhile.
kube-proxy forgets the clients of an endpoint when it leaves (` + "`test/conformance.TestAffinityOfLeavingBackends`" + `).

A client is its address, as in kube-proxy. At sockets the kernel has not chosen it yet: one that is bound to none that a device of its network namespace has (` + "`IP_FREEBIND`" + `, ` + "`ip route add local`" + ` in a pod) has the first global address of its pod, and on the node, also with ` + "`hostNetwork`" + `,
the Node's primary one of the family (` + "`pkg/datapath.TestClientIsItsAddress`" + `). kube-proxy sees the address that the route to the Service leads to.

## One port for two Services

Sockets that are bound to one port before they connect, as those of NFS mounts with reserved ports, cannot have TCP connections to one backend by two Services: the second connect() fails with EADDRNOTAVAIL
(` + "`pkg/datapath.TestPortOfTwoServices`" + `), because the socket has the backend's address, and both would be one connection to the kernel. With kube-proxy they differ by the Service, and conntrack changes the port of the second one.
Ports that the kernel chooses, in connect(), never meet so.

## Services of other proxies

A Service with the label ` + "`service.kubernetes.io/service-proxy-name`" + ` has no frontends, as in kube-proxy, and packets to its ClusterIP pass, so that the other proxy gets them wherever it is: kube-proxy drops
what no proxy has translated only after that, Sluice drops packets to addresses of no Service before another proxy sees them. So the agent's request for Services has no selector for the label. Up to a thousand
such addresses pass.

## Rules of other owners

Services are translated at devices before netfilter sees a packet, so rules in raw, mangle or any prerouting chain that match a node port or another address of a Service,
for example those of firewalls, match nothing once kube-proxy is gone: they see the backend's address and port. loadBalancerSourceRanges, nodePortAddresses and NetworkPolicies work. With
` + "`sluice agent --mark 0x100`" + `, packets that clients send to Services through devices have that bit of their mark set, so that rules can match them. (Rules cannot match the original port,
nor packets of sockets of this node, which are translated when they connect.) This drops the packets of one network to Services, and nothing else:

` + "```nft" + `
table inet firewall {
	chain prerouting {
		type filter hook prerouting priority raw
		ip saddr 192.0.2.0/24 meta mark & 0x100 == 0x100 drop
	}
}
` + "```" + `

In the same chains, rules that match the address of a pod or a container now match packets to Services which lead to it: with kube-proxy, these pass raw and mangle with the address of the
Service. Docker 28 has such rules, which drop in raw what is sent to its containers from outside (` + "`-d 172.17.0.2/32 ! -i docker0 -j DROP`" + `). They are right about all that is no Service's; where a Service
has such a backend, accept before them what has the mark: ` + "`iptables -t raw -I PREROUTING -m mark --mark 0x100/0x100 -j ACCEPT`" + `. ` + "`sluice doctor`" + ` finds both kinds of rules
([node-port-firewall](doctor.md#node-port-firewall)).
`

func sections() []Section {
	return []Section{
		{
			Title: "Flags", File: "flags.yaml",
			Lead: "Flags of `sluice agent`. With `--config`, those of kube-proxy are ignored except `--config`, `--master`, `--hostname-override`, `--cleanup`,\n" +
				"`--init-only`, `--write-config-to`, `--version` and the logging flags, as there. Sluice's own always count.",
		},
		{
			Title: "Configuration file", File: "fields.yaml",
			Lead: "Fields of KubeProxyConfiguration, `kubeproxy.config.k8s.io/v1alpha1`, as `--config` reads it.",
		},
		{Title: "Endpoints", File: "endpoints.yaml", Lead: "The HTTP endpoints, with their default ports."},
		{Title: "Metrics", File: "metrics.yaml", Lead: "At `/metrics` of the metrics address."},
		{Title: "Events", File: "events.yaml", Lead: "Events are about the Node or a Service, by their reasons."},
	}
}

// Page returns the Markdown of all sections.
func Page(sections []Section) string {
	var b strings.Builder
	b.WriteString(head)
	for _, s := range sections {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n", s.Title, s.Lead)
		s.draw(&b)
	}
	b.WriteString(tail)

	return b.String()
}

// draw writes the table. A column that no row fills is left out.
func (s Section) draw(b *strings.Builder) {
	columns := []struct {
		title string
		cell  func(Row) string
	}{
		{"Name", func(r Row) string { return code(r.Name) }},
		{"Labels", func(r Row) string { return code(r.Labels) }},
		{"Default", func(r Row) string { return code(r.Default) }},
		{"State", func(r Row) string { return string(r.State) }},
		{"Here", func(r Row) string { return r.Here }},
		{"Shown by", func(r Row) string { return code(strings.Join(r.Tests, "`, `")) }},
	}
	var titles, rule []string
	lines := make([][]string, len(s.Rows))
	for _, c := range columns {
		cells, filled := make([]string, len(s.Rows)), false
		for i, row := range s.Rows {
			cells[i] = cell(c.cell(row))
			filled = filled || cells[i] != ""
		}
		if !filled {
			continue
		}
		titles, rule = append(titles, c.title), append(rule, "---")
		for i := range lines {
			lines[i] = append(lines[i], cells[i])
		}
	}
	for _, line := range append([][]string{titles, rule}, lines...) {
		fmt.Fprintf(b, "| %s |\n", strings.Join(line, " | "))
	}
}

func code(text string) string {
	if text == "" {
		return ""
	}

	return "`" + text + "`"
}

// cell is text that can stand in a table.
func cell(text string) string {
	return strings.ReplaceAll(strings.Join(strings.Fields(text), " "), "|", `\|`)
}
