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

func translateNode(obj *corev1.Node) (Node, []lb.Problem) {
	p := &parser{object: keyOf(kindNode, &obj.ObjectMeta)}
	node := Node{
		Node: lb.Node{
			Name:       obj.Name,
			Zone:       obj.Labels[corev1.LabelTopologyZone],
			PrimaryIPs: p.primaryIPs(obj.Status.Addresses),
		},
		Exists:   true,
		Leaving:  obj.DeletionTimestamp != nil,
		PodCIDRs: p.prefixes("spec.podCIDRs", obj.Spec.PodCIDRs),
	}
	for i := range obj.Spec.Taints {
		if obj.Spec.Taints[i].Key == taintToBeDeleted {
			node.Leaving = true
		}
	}
	return node, p.problems
}

// primaryIPs returns the node's first address and its first one of the other
// family, internal addresses before external ones.
func (p *parser) primaryIPs(addresses []corev1.NodeAddress) []netip.Addr {
	var primary []netip.Addr
	for _, wanted := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP} {
		for i := range addresses {
			if addresses[i].Type != wanted {
				continue
			}
			addr := p.addr(fmt.Sprintf("status.addresses[%d].address", i), addresses[i].Address)
			switch {
			case !addr.IsValid():
			case len(primary) == 0,
				len(primary) == 1 && lb.FamilyOf(primary[0]) != lb.FamilyOf(addr):
				primary = append(primary, addr)
			}
		}
	}
	return primary
}

// translateServiceCIDR returns the prefixes of a ServiceCIDR. Its conditions do not matter,
// because its addresses may be in use as long as it exists.
func translateServiceCIDR(obj *networkingv1.ServiceCIDR) ([]netip.Prefix, []lb.Problem) {
	p := &parser{object: keyOf(kindServiceCIDR, &obj.ObjectMeta)}
	return p.prefixes("spec.cidrs", obj.Spec.CIDRs), p.problems
}
