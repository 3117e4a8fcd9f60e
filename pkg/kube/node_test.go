package kube

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Each row is a Node that differs from a valid one in one field.
var nodeTests = []struct {
	name     string
	edit     func(*corev1.Node)
	want     func(*Node)
	problems []string // fields
}{
	{"as it was", func(*corev1.Node) {}, func(*Node) {}, nil},
	{"in no zone", func(n *corev1.Node) { n.Labels = nil }, func(n *Node) { n.Zone = "" }, nil},
	{
		"of two families, IPv6 first",
		addresses(corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "fd00::1"}, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}),
		primary("fd00::1", "10.0.0.1"), nil,
	}, {
		"of many addresses, an external one first",
		addresses(
			corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: "192.0.2.1"},
			corev1.NodeAddress{Type: corev1.NodeHostName, Address: "node1"},
			corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: "2001:db8::1"},
			corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "10.0.0.1"},
			corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "10.0.0.2"},
		),
		primary("10.0.0.1", "2001:db8::1"), nil,
	}, {
		"of three addresses, two of IPv6 behind one of IPv4",
		addresses(
			corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "10.0.0.1"},
			corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "fd00::1"},
			corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "fd00::2"},
		),
		primary("10.0.0.1", "fd00::1"), nil,
	}, {
		"of an address that is none",
		addresses(corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "node1"}, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}),
		primary("10.0.0.1"), []string{"status.addresses[0].address"},
	}, {
		"with pods in two ranges",
		func(n *corev1.Node) { n.Spec.PodCIDRs = []string{"10.244.1.0/24", "fd00:1::/64", "here"} },
		func(n *Node) {
			n.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:1::/64")}
		}, []string{"spec.podCIDRs[2]"},
	}, {
		"being deleted",
		func(n *corev1.Node) { n.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} },
		func(n *Node) { n.Leaving = true }, nil,
	}, {
		"about to be deleted",
		func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: "other"}, {Key: "ToBeDeletedByClusterAutoscaler", Effect: "Any"}}
		},
		func(n *Node) { n.Leaving = true }, nil,
	}, {
		"tainted otherwise",
		func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeUnschedulable}} },
		func(*Node) {}, nil,
	},
}

func TestTranslateNode(t *testing.T) {
	for _, test := range nodeTests {
		t.Run(test.name, func(t *testing.T) {
			obj := node("node1", "z1")
			want := Node{Node: lb.Node{Name: "node1", Zone: "z1"}, Exists: true}
			test.edit(obj)
			test.want(&want)
			got, problems := translateNode(obj)
			if diff := cmp.Diff(want, got, compareAddrs); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			mustBlame(t, "Node node1", problems, test.problems)
		})
	}
}

func TestTranslateServiceCIDR(t *testing.T) {
	got, problems := translateServiceCIDR(cidr("10.96.0.0/16", "10.96.0.0", "fd00::/108"))
	want := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00::/108")}
	if diff := cmp.Diff(want, got, compareAddrs); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	mustBlame(t, "ServiceCIDR kubernetes", problems, []string{"spec.cidrs[1]"})
}

// addresses gives a Node its addresses.
func addresses(list ...corev1.NodeAddress) func(*corev1.Node) {
	return func(n *corev1.Node) { n.Status.Addresses = list }
}

// primary sets the primary IPs that are expected.
func primary(list ...string) func(*Node) {
	return func(n *Node) {
		for _, text := range list {
			n.PrimaryIPs = append(n.PrimaryIPs, netip.MustParseAddr(text))
		}
	}
}
