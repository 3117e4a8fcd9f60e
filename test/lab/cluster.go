package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
)

// Config says how large a [Cluster] is.
type Config struct {
	// Nodes is how many nodes there are, at most 99.
	Nodes int
	// PodsPerNode is how many pods each node starts with, at most 200.
	PodsPerNode int
	// Client adds a host outside of the cluster, on the same segment.
	Client bool
}

// Validate says what is wrong with the configuration.
func (c Config) Validate() error {
	if c.Nodes < 0 || c.Nodes > 99 {
		return fmt.Errorf("%d nodes: want 0 to 99", c.Nodes)
	}
	if c.PodsPerNode < 0 || c.PodsPerNode > maxPods {
		return fmt.Errorf("%d pods per node: want 0 to %d", c.PodsPerNode, maxPods)
	}

	return nil
}

// Cluster is the topology that the package comment draws.
type Cluster struct {
	Nodes  []*Node
	Client *Host // nil unless configured

	// Uplink is the segment between the nodes. Its bridge br0 is also
	// everybody's default gateway; it forwards nothing, so what goes astray is
	// lost in silence.
	Uplink *Namespace
}

// Host is a machine on the uplink segment, by its device eth0.
type Host struct {
	*Namespace
	Name string // "node-1", "client"
	IPv4 netip.Addr
	IPv6 netip.Addr
}

const (
	gatewayNumber = 254
	clientNumber  = 100
)

var defaultRoutes = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}

// New builds a cluster. The caller closes it.
func New(config Config) (*Cluster, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	cluster := &Cluster{}
	if err := cluster.build(config); err != nil {
		return nil, errors.Join(fmt.Errorf("build cluster: %w", err), cluster.Close())
	}

	return cluster, nil
}

func (c *Cluster) build(config Config) (err error) {
	if c.Uplink, err = newUplink(); err != nil {
		return err
	}
	for number := 1; number <= config.Nodes; number++ {
		if err := c.addNode(number); err != nil {
			return fmt.Errorf("node %d: %w", number, err)
		}
	}
	for _, node := range c.Nodes {
		for range config.PodsPerNode {
			if _, err := node.AddPod(); err != nil {
				return err
			}
		}
	}
	if config.Client {
		if c.Client, err = c.newHost("client", clientNumber); err != nil {
			return fmt.Errorf("client: %w", err)
		}
	}

	return nil
}

func newUplink() (*Namespace, error) {
	ns, err := NewNamespace("uplink")
	if err != nil {
		return nil, err
	}
	// A switch does not filter what it switches.
	for _, setting := range []string{"bridge-nf-call-iptables", "bridge-nf-call-ip6tables"} {
		if err := ns.Sysctl("net/bridge/"+setting, "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, errors.Join(err, ns.Close())
		}
	}
	if err := ns.AddBridge("br0", uplinkPrefixes(gatewayNumber)...); err != nil {
		return nil, errors.Join(err, ns.Close())
	}

	return ns, nil
}

// newHost makes a machine on the uplink segment.
func (c *Cluster) newHost(name string, number int) (*Host, error) {
	ns, err := NewNamespace(name)
	if err != nil {
		return nil, err
	}
	err = Veth(
		End{Namespace: ns, Device: "eth0", Addresses: uplinkPrefixes(number)},
		End{Namespace: c.Uplink, Device: name, Bridge: "br0"},
	)
	gateways := uplinkPrefixes(gatewayNumber)
	for i := 0; i < len(gateways) && err == nil; i++ {
		err = ns.AddRoute(defaultRoutes[i], gateways[i].Addr())
	}
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	addresses := uplinkPrefixes(number)

	return &Host{Namespace: ns, Name: name, IPv4: addresses[0].Addr(), IPv6: addresses[1].Addr()}, nil
}

// Pods are those of all nodes, node by node.
func (c *Cluster) Pods() []*Pod {
	var pods []*Pod
	for _, node := range c.Nodes {
		pods = append(pods, node.Pods...)
	}

	return pods
}

// Close removes everything, last things first. Closing twice is not an error.
func (c *Cluster) Close() error {
	var err error
	if c.Client != nil {
		err = c.Client.Close()
	}
	for _, node := range slices.Backward(c.Nodes) {
		err = errors.Join(err, node.Close())
	}
	if c.Uplink != nil {
		err = errors.Join(err, c.Uplink.Close())
	}

	return err
}

// uplinkPrefixes is 192.168.50.n/24 and fd00:50::n/64.
func uplinkPrefixes(number int) []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix(fmt.Sprintf("192.168.50.%d/24", number)),
		netip.MustParsePrefix(fmt.Sprintf("fd00:50::%d/64", number)),
	}
}
