package lab

import (
	"errors"
	"fmt"
	"slices"
)

// Config is how large a [Cluster] is, and what connects its parts.
type Config struct {
	// Nodes is how many nodes there are, at most 99.
	Nodes int
	// PodsPerNode is how many pods each node starts with, at most 200.
	PodsPerNode int
	// Client adds a host outside of the cluster, on the same segment.
	Client bool

	// Attachment is how pods hang on their node.
	Attachment Attachment
	// PodMTU is that of the pods' devices; 0: OverlayMTU, or without an overlay
	// 1500.
	PodMTU int

	// OverlayMTU makes the nodes reach each other's pods by VXLAN, by a device
	// of this MTU. 0: by routes on the segment.
	OverlayMTU int

	// SecondUplink adds a second segment, with a device on each node and on the
	// client.
	SecondUplink bool

	// VLANs makes the uplinks of nodes and of the client VLANs, each of a device of
	// its own: see [NeedsVLANs].
	VLANs bool

	// Profile is the name of the nodes' [Profile]; "" is that of the process, see
	// [UseProfile].
	Profile string
}

// Validate returns an error if the configuration cannot be built.
func (c Config) Validate() error {
	if c.Nodes < 0 || c.Nodes > 99 {
		return fmt.Errorf("%d nodes: want 0 to 99", c.Nodes)
	}
	if c.PodsPerNode < 0 || c.PodsPerNode > maxPods {
		return fmt.Errorf("%d pods per node: want 0 to %d", c.PodsPerNode, maxPods)
	}
	// IPv6 works with no less; the segment carries 50 bytes more than the tunnel.
	for _, mtu := range []int{c.PodMTU, c.OverlayMTU} {
		if mtu != 0 && (mtu < minMTU || mtu > segmentMTU) {
			return fmt.Errorf("MTU %d: want %d to %d", mtu, minMTU, segmentMTU)
		}
	}

	return nil
}

// Cluster is the topology that the package comment draws.
type Cluster struct {
	Nodes  []*Node
	Client *Host // nil unless configured

	// Uplink is the segment between the nodes. Its bridge br0 is also the
	// default gateway of all; it forwards nothing, so it drops what has no other route.
	Uplink *Namespace
	// Second is the second segment, nil unless configured. There is no
	// default gateway on it.
	Second *Namespace

	Profile Profile // of the nodes

	config Config
}

const (
	minMTU     = 1280
	segmentMTU = 1500
)

// New builds a cluster. The caller closes it.
func New(config Config) (*Cluster, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	profile, err := profileNamed(config.Profile)
	if err != nil {
		return nil, err
	}
	config.SecondUplink = config.SecondUplink || profile.SecondUplink
	cluster := &Cluster{Profile: profile, config: config}
	if err := cluster.build(config); err != nil {
		return nil, errors.Join(fmt.Errorf("build cluster: %w", err), cluster.Close())
	}

	return cluster, nil
}

func (c *Cluster) build(config Config) (err error) {
	if c.Uplink, err = newSegment("uplink", firstSegment); err != nil {
		return err
	}
	if config.SecondUplink {
		if c.Second, err = newSegment("second", secondSegment); err != nil {
			return err
		}
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
		if c.Client, err = c.newHost("client", clientNumber, Profile{}); err != nil {
			return fmt.Errorf("client: %w", err)
		}
		if c.Profile.MPTCP {
			if err := c.Client.addSubflows(); err != nil {
				return fmt.Errorf("client: %w", err)
			}
		}
	}

	return nil
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
	for _, segment := range []*Namespace{c.Second, c.Uplink} {
		if segment != nil {
			err = errors.Join(err, segment.Close())
		}
	}

	return err
}
