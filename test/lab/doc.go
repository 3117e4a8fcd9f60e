// Package lab builds nodes and pods out of network namespaces, sends real
// traffic between them, and leaves nothing behind. Tests, benchmarks and the demo
// use it. It is not a container runtime: namespaces share the machine's files,
// processes and kernel.
//
// A [Cluster] of two nodes with two pods each, and a client:
//
//	┌ node-1 ─────────────────────┐       ┌ node-2 ─────────────────────┐
//	│ pod-1-0        pod-1-1      │       │ pod-2-0        pod-2-1      │
//	│ 10.244.1.2     10.244.1.3   │       │ 10.244.2.2     10.244.2.3   │
//	│   eth0           eth0       │       │   eth0           eth0       │
//	│    ┊ veth         ┊         │       │    ┊              ┊         │
//	│   pod0           pod1       │       │   pod0           pod1       │
//	│ ┌──┴──── br0 ─────┴───────┐ │       │ ┌──┴──── br0 ─────┴───────┐ │
//	│ └──── 10.244.1.1/24 ──────┘ │       │ └──── 10.244.2.1/24 ──────┘ │
//	│   forwarding                │       │   forwarding                │
//	│ eth0 192.168.50.1           │       │ eth0 192.168.50.2           │
//	└──┬──────────────────────────┘       └──┬──────────────────────────┘
//	   ┊ node-1                              ┊ node-2
//	┌──┴────── uplink: br0 192.168.50.254 ───┴────────────────┐
//	└──┬──────────────────────────────────────────────────────┘
//	   ┊ client
//	  eth0 192.168.50.100: the client
//
// Nodes and pods have addresses of both families:
//
//	              IPv4              IPv6
//	node n        192.168.50.n      fd00:50::n
//	client        192.168.50.100    fd00:50::100
//	gateway       192.168.50.254    fd00:50::254
//	br0 of n      10.244.n.1/24     fd00:10:244:n::1/64
//	pod i of n    10.244.n.(2+i)    fd00:10:244:n::(2+i)     i from 0
//
// A [Config] can differ: pods on devices of their own, as Calico's and
// kindnet's are ([Attachment]); a VXLAN between the nodes, by a device vxlan0 with
// the addresses 10.244.n.0 and fd00:10:244:n::, as flannel's is; a second segment,
// by devices eth1 with addresses 192.168.51.x and fd00:51::x.
//
// A [Profile] may add more: a device net1 to each pod, with addresses 172.20.n.(2+i) and
// fd00:172:20::n:(2+i) on the second segment, or a host behind each pod, with addresses
// 172.30.n.(2+i) and fd00:172:30:n::(2+i).
//
// Nodes route to each other's pods. The client has routes to the segment only; a test
// gives it a route to pods or to a virtual address with [Namespace.AddRoute].
// Whatever has no route goes to the gateway, which drops it: what a hook failed
// to translate times out, and is not refused.
//
// A client is a [Caller]: a process in a namespace and in a [Cgroup], so that
// socket hooks attached there see what it does. A server is a [Server], whose
// answers have its name and the address of the client as it saw it.
//
// The core does not use testing.T: constructors return errors and everything has a
// Close. The Must functions are the same for tests.
package lab
