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

	"github.com/sluice-lb/sluice/test/object"
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

// addMetadata makes the metadata of Service i or its slice as large as that of real
// objects, most of which is of no use to an agent.
func addMetadata(to *metav1.ObjectMeta, i int) {
	created := metav1.NewTime(time.Unix(1_760_000_000+int64(i), 0))
	fields := `{"f:metadata":{"f:annotations":{".":{},"f:kubectl.kubernetes.io/last-applied-configuration":{}},` +
		`"f:labels":{".":{},"f:app.kubernetes.io/instance":{},"f:app.kubernetes.io/name":{}}},` +
		`"f:spec":{"f:internalTrafficPolicy":{},"f:ports":{".":{},"k:{\"port\":80,\"protocol\":\"TCP\"}":` +
		`{".":{},"f:name":{},"f:port":{},"f:protocol":{},"f:targetPort":{}}},"f:selector":{},"f:type":{}}}`

	to.UID = types.UID(fmt.Sprintf("9b0f5c6e-2c3d-4e5f-8a9b-%012d", i))
	to.ResourceVersion = fmt.Sprint(1000 + i)
	to.CreationTimestamp = created
	metav1.SetMetaDataLabel(to, "app.kubernetes.io/name", "shop")
	metav1.SetMetaDataLabel(to, "app.kubernetes.io/instance", name(i))
	to.ManagedFields = []metav1.ManagedFieldsEntry{{
		Manager: "kubectl", Operation: metav1.ManagedFieldsOperationApply, APIVersion: "v1", Time: &created,
		FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(fields),
	}}
}

func team(i int) string { return fmt.Sprintf("team-%d", i%teams) }

func name(i int) string { return fmt.Sprintf("service-%d", i) }

func serviceOf(i int) *corev1.Service {
	s := object.Service(team(i), name(i), []string{clusterIP(i).String()}, corev1.ServicePort{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP})
	addMetadata(&s.ObjectMeta, i)
	s.Spec.Selector = map[string]string{"app.kubernetes.io/instance": name(i)}

	return s
}

// sliceOf is the slice of Service i. Its first pod is another one in each
// generation.
func sliceOf(i, generation int) *discoveryv1.EndpointSlice {
	slice := object.Slice(team(i), name(i)+"-x7k2p", name(i), discoveryv1.AddressTypeIPv4,
		object.EndpointPort("http", corev1.ProtocolTCP, backendPort))
	addMetadata(&slice.ObjectMeta, i)
	slice.ResourceVersion = fmt.Sprint(2_000_000 + generation)
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
	e := object.Endpoint(podIP(pod), fmt.Sprintf("node-%d", pod%1000))
	e.Zone, e.Conditions = new(fmt.Sprintf("zone-%d", pod%3)), object.Conditions(true, true, false)
	e.TargetRef = &corev1.ObjectReference{
		Kind: "Pod", Name: fmt.Sprintf("service-%d-5d9c7b8f6d-abcde", pod),
		UID: types.UID(fmt.Sprintf("7c1d2e3f-4a5b-4c6d-8e9f-%012d", pod)),
	}

	return e
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
	node, cidr := object.Node(nodeName, "192.168.50.1"), object.ServiceCIDR("kubernetes", "10.96.0.0/12")
	node.ResourceVersion, cidr.ResourceVersion = "1", "1"

	return map[string][]byte{
		"services":       mustEncodeAll(t, corev1.SchemeGroupVersion, services, &corev1.Service{}),
		"endpointslices": mustEncodeAll(t, discoveryv1.SchemeGroupVersion, slices, &discoveryv1.EndpointSlice{}),
		"nodes":          mustEncodeAll(t, corev1.SchemeGroupVersion, []*corev1.Node{node}, &corev1.Node{}),
		"servicecidrs":   mustEncodeAll(t, networkingv1.SchemeGroupVersion, []*networkingv1.ServiceCIDR{cidr}, &networkingv1.ServiceCIDR{}),
	}
}
