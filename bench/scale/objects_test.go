package scale

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// The default size of the cluster, which flags override.
var (
	serviceCount  = 10_000
	endpointCount = 10 // of each Service
)

const teams = 100 // namespaces

const (
	nodeName    = "node-1"
	backendPort = 8080
)

// clusterIP is the address of Service i, of which there are almost 2²⁰. The first 256
// are the API server's own.
func clusterIP(i int) netip.Addr {
	i += 256

	return netip.AddrFrom4([4]byte{10, byte(96 + i>>16), byte(i >> 8), byte(i)})
}

// podIP is the address of a pod, of which there are 2²⁴.
func podIP(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)})
}

// metadata is as large as that of real objects, most of which is of no use to
// an agent.
func metadata(i int, suffix string) metav1.ObjectMeta {
	created := metav1.NewTime(time.Unix(1_760_000_000+int64(i), 0))
	fields := `{"f:metadata":{"f:annotations":{".":{},"f:kubectl.kubernetes.io/last-applied-configuration":{}},` +
		`"f:labels":{".":{},"f:app.kubernetes.io/instance":{},"f:app.kubernetes.io/name":{}}},` +
		`"f:spec":{"f:internalTrafficPolicy":{},"f:ports":{".":{},"k:{\"port\":80,\"protocol\":\"TCP\"}":` +
		`{".":{},"f:name":{},"f:port":{},"f:protocol":{},"f:targetPort":{}}},"f:selector":{},"f:type":{}}}`

	return metav1.ObjectMeta{
		Name:              fmt.Sprintf("service-%d%s", i, suffix),
		Namespace:         fmt.Sprintf("team-%d", i%teams),
		UID:               types.UID(fmt.Sprintf("9b0f5c6e-2c3d-4e5f-8a9b-%012d", i)),
		ResourceVersion:   fmt.Sprint(1000 + i),
		CreationTimestamp: created,
		Labels: map[string]string{
			"app.kubernetes.io/name":     "shop",
			"app.kubernetes.io/instance": fmt.Sprintf("service-%d", i),
		},
		ManagedFields: []metav1.ManagedFieldsEntry{{
			Manager: "kubectl", Operation: metav1.ManagedFieldsOperationApply, APIVersion: "v1", Time: &created,
			FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(fields),
		}},
	}
}

func serviceOf(i int) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metadata(i, ""),
		Spec: corev1.ServiceSpec{
			Type:       corev1.ServiceTypeClusterIP,
			ClusterIP:  clusterIP(i).String(),
			ClusterIPs: []string{clusterIP(i).String()},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Selector:   map[string]string{"app.kubernetes.io/instance": fmt.Sprintf("service-%d", i)},
			Ports:      []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}},
		},
	}
}

// sliceOf is the slice of Service i. Its first pod is another one in each
// generation.
func sliceOf(i, generation int) *discoveryv1.EndpointSlice {
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metadata(i, "-x7k2p"),
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{{
			Name: new("http"), Port: new(int32(backendPort)), Protocol: new(corev1.ProtocolTCP),
		}},
	}
	slice.ResourceVersion = fmt.Sprint(2_000_000 + generation)
	slice.Labels[discoveryv1.LabelServiceName] = fmt.Sprintf("service-%d", i)
	for e := range endpointCount {
		pod := i*endpointCount + e
		if e == 0 && generation > 0 {
			pod = serviceCount*endpointCount + generation
		}
		slice.Endpoints = append(slice.Endpoints, endpointOf(pod))
	}

	return slice
}

func endpointOf(pod int) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{
		Addresses: []string{podIP(pod).String()},
		NodeName:  new(fmt.Sprintf("node-%d", pod%1000)),
		Zone:      new(fmt.Sprintf("zone-%d", pod%3)),
		Conditions: discoveryv1.EndpointConditions{
			Ready: new(true), Serving: new(true), Terminating: new(false),
		},
		TargetRef: &corev1.ObjectReference{
			Kind: "Pod", Name: fmt.Sprintf("service-%d-5d9c7b8f6d-abcde", pod),
			UID: types.UID(fmt.Sprintf("7c1d2e3f-4a5b-4c6d-8e9f-%012d", pod)),
		},
	}
}

// mustEncodeCluster encodes all objects, by resource.
func mustEncodeCluster(t testing.TB) map[string][]byte {
	t.Helper()
	var services []*corev1.Service
	var slices []*discoveryv1.EndpointSlice
	for i := range serviceCount {
		services = append(services, serviceOf(i+1))
		slices = append(slices, sliceOf(i+1, 0))
	}
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: nodeName, ResourceVersion: "1"},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: "192.168.50.1"},
		}},
	}
	cidr := &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes", ResourceVersion: "1"},
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/12"}},
	}

	return map[string][]byte{
		"services":       mustEncodeAll(t, corev1.SchemeGroupVersion, services, &corev1.Service{}),
		"endpointslices": mustEncodeAll(t, discoveryv1.SchemeGroupVersion, slices, &discoveryv1.EndpointSlice{}),
		"nodes":          mustEncodeAll(t, corev1.SchemeGroupVersion, []*corev1.Node{node}, &corev1.Node{}),
		"servicecidrs":   mustEncodeAll(t, networkingv1.SchemeGroupVersion, []*networkingv1.ServiceCIDR{cidr}, &networkingv1.ServiceCIDR{}),
	}
}
