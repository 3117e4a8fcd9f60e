package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// Pods have addresses from .2 on, and .255 is none.
const maxPods = 200

// Node is a host that forwards: it is the default gateway of its pods, which
// hang on its bridge br0 or each on a device of its own, and it has routes to
// the pods of all other nodes.
type Node struct {
	Host
	Number   int // from 1
	PodCIDRs []netip.Prefix
	Pods     []*Pod

	config     Config
	profile    Profile
	second     *Namespace // the second segment, or nil
	nextNumber int        // of the next pod, modulo maxPods
}

// Pod is a namespace with one device, eth0, that leads to its node.
type Pod struct {
	*Namespace
	Name   string // "pod-1-0": the first of node 1
	Node   *Node
	Device string // the node's end of the pair: "pod0"
	IPv4   netip.Addr
	IPv6   netip.Addr
	Behind *Host // that the pod is the gateway of; nil unless the profile has it

	number int
}

// addNode makes a node and the routes between its pods and those of the nodes
// that are there.
func (c *Cluster) addNode(number int) error {
	host, err := c.newHost(fmt.Sprintf("node-%d", number), number, c.Profile)
	if err != nil {
		return err
	}
	node := &Node{Host: *host, Number: number, PodCIDRs: podCIDRs(number), config: c.config, profile: c.Profile, second: c.Second}
	c.Nodes = append(c.Nodes, node)

	for _, setting := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		if err := node.Sysctl(setting, "1"); err != nil {
			return err
		}
	}
	if c.config.Attachment == Bridged {
		if err := node.AddBridge("br0", podPrefixes(number, 1)...); err != nil {
			return err
		}
	}
	if c.config.OverlayMTU != 0 {
		if err := node.addOverlay(c.config.OverlayMTU); err != nil {
			return err
		}
	}
	for _, other := range c.Nodes[:len(c.Nodes)-1] {
		if err := errors.Join(node.addRoutesTo(other), other.addRoutesTo(node)); err != nil {
			return err
		}
	}

	return nil
}

func (n *Node) addRoutesTo(other *Node) error {
	if n.config.OverlayMTU != 0 {
		return n.addTunnelTo(other)
	}
	if n.profile.SecondUplink {
		return errors.Join(
			n.AddRoute(other.PodCIDRs[0], other.IPv4, other.SecondIPv4),
			n.AddRoute(other.PodCIDRs[1], other.IPv6, other.SecondIPv6),
		)
	}

	return errors.Join(
		n.AddRoute(other.PodCIDRs[0], other.IPv4),
		n.AddRoute(other.PodCIDRs[1], other.IPv6),
	)
}

// AddPod starts another pod. Its addresses and its name are those that have been
// unused for the longest time: a pod that was removed gets a successor of the same
// addresses only after all others have been used.
func (n *Node) AddPod() (*Pod, error) {
	if len(n.Pods) >= maxPods {
		return nil, fmt.Errorf("%s has %d pods, as many as it can", n.Name, maxPods)
	}
	number := n.nextNumber
	for slices.ContainsFunc(n.Pods, func(pod *Pod) bool { return pod.number == number }) {
		number = (number + 1) % maxPods
	}
	n.nextNumber = (number + 1) % maxPods

	name := fmt.Sprintf("pod-%d-%d", n.Number, number)
	addresses := podPrefixes(n.Number, number+2)
	ns, err := NewNamespace(name)
	if err != nil {
		return nil, err
	}
	pod := &Pod{
		Namespace: ns,
		Name:      name,
		Node:      n,
		Device:    fmt.Sprintf("pod%d", number),
		IPv4:      addresses[0].Addr(),
		IPv6:      addresses[1].Addr(),
		number:    number,
	}
	err = pod.attach(addresses)
	if err == nil && n.profile.Pod != nil {
		err = n.profile.Pod(pod)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", name, err), pod.closeNamespaces())
	}
	n.Pods = append(n.Pods, pod)

	return pod, nil
}

// At is where a server of the pod listens, for [Serve]: the port on both its
// addresses.
func (p *Pod) At(port uint16) []string { return at(port, p.IPv4, p.IPv6) }

func at(port uint16, addresses ...netip.Addr) []string {
	var texts []string
	for _, address := range addresses {
		texts = append(texts, netip.AddrPortFrom(address, port).String())
	}

	return texts
}

// Close removes the pod and, at once, its device on the node.
func (p *Pod) Close() error {
	n := p.Node
	i := slices.Index(n.Pods, p)
	if i < 0 {
		return nil
	}
	n.Pods = slices.Delete(n.Pods, i, i+1)

	return errors.Join(n.RemoveDevice(p.Device), p.closeNamespaces())
}

func (p *Pod) closeNamespaces() error {
	var err error
	if p.Behind != nil {
		err = p.Behind.Close()
	}

	return errors.Join(err, p.Namespace.Close())
}

// Close removes the node with its pods.
func (n *Node) Close() error {
	var err error
	for _, pod := range slices.Backward(slices.Clone(n.Pods)) {
		err = errors.Join(err, pod.Close())
	}

	return errors.Join(err, n.Namespace.Close())
}

func podCIDRs(node int) []netip.Prefix {
	var cidrs []netip.Prefix
	for _, prefix := range podPrefixes(node, 0) {
		cidrs = append(cidrs, prefix.Masked())
	}

	return cidrs
}

// podPrefixes is 10.244.n.x/24 and fd00:10:244:n::x/64, with n and x in decimal
// in both.
func podPrefixes(node, number int) []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix(fmt.Sprintf("10.244.%d.%d/24", node, number)),
		netip.MustParsePrefix(fmt.Sprintf("fd00:10:244:%d::%d/64", node, number)),
	}
}
