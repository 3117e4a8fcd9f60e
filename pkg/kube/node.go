package kube

import (
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// taintToBeDeleted is put on a Node that the cluster autoscaler is about to
// remove (KEP-3836).
const taintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

// Node is the Node object of this node.
type Node struct {
	lb.Node

	// Exists is false when the cluster has no such Node (any more).
	Exists bool

	// Leaving is set while the Node is being deleted, or is about to be by the
	// cluster autoscaler: load balancers should use other nodes (KEP-3836).
	Leaving bool

	// PodCIDRs is spec.podCIDRs, which detectLocalMode NodeCIDR uses.
	PodCIDRs []netip.Prefix
}

// translateNode reads a Node. Its primary IPs are its first address and its first one of
// the other family, internal addresses before external ones.
func translateNode(obj *corev1.Node) (Node, []lb.Problem) {
	p := &parser{object: keyOf(kindNode, &obj.ObjectMeta)}
	node := Node{
		Node:    lb.Node{Name: obj.Name, Zone: obj.Labels[corev1.LabelTopologyZone]},
		Exists:  true,
		Leaving: obj.DeletionTimestamp != nil,
	}
	for _, wanted := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP} {
		for i, address := range obj.Status.Addresses {
			if address.Type != wanted {
				continue
			}
			addr := p.addr(fmt.Sprintf("status.addresses[%d].address", i), address.Address)
			first := node.PrimaryIPs
			if addr.IsValid() && (len(first) == 0 || len(first) == 1 && lb.FamilyOf(first[0]) != lb.FamilyOf(addr)) {
				node.PrimaryIPs = append(node.PrimaryIPs, addr)
			}
		}
	}
	node.PodCIDRs = p.prefixes("spec.podCIDRs", obj.Spec.PodCIDRs)
	for i := range obj.Spec.Taints {
		if obj.Spec.Taints[i].Key == taintToBeDeleted {
			node.Leaving = true
		}
	}
	return node, p.problems
}

// translateServiceCIDR returns the prefixes of a ServiceCIDR. Its conditions do not matter,
// because its addresses may be in use as long as it exists.
func translateServiceCIDR(obj *networkingv1.ServiceCIDR) ([]netip.Prefix, []lb.Problem) {
	p := &parser{object: keyOf(kindServiceCIDR, &obj.ObjectMeta)}
	return p.prefixes("spec.cidrs", obj.Spec.CIDRs), p.problems
}
