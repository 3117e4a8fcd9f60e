package differential

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-lb/sluice/test/object"
)

// directed are two states of Services about which something is shown that chance
// seldom shows. What is between them does to UDP flows of the first:
//
//	pod-1-1  ready, serving   becomes ready and not serving (publishNotReadyAddresses)
//	pod-1-2  ready, serving   goes
//	pod-2-0                   comes
//
// The second has a VIP that is node-1's own, and admits that alone; its backend is
// node-1 itself, which goes when pod-1-1 comes. The third has externalTrafficPolicy Local, on node-1
// only what terminates, and on node-2 what is ready. The fourth is another proxy's.
func directed() (before, after objects) {
	states := [2]objects{}
	for i, is := range [2]map[string]discoveryv1.EndpointConditions{
		{"pod-1-1": {}, "pod-1-2": {}},
		{"pod-1-1": {Ready: new(true), Serving: new(false)}, "pod-2-0": {}},
	} {
		states[i] = objects{services: map[string]*corev1.Service{}, slices: map[string]*discoveryv1.EndpointSlice{}}
		flows, balancer := directedService(flowsNumber, corev1.ServiceTypeNodePort), directedService(balancerNumber, corev1.ServiceTypeLoadBalancer)
		flows.Spec.PublishNotReadyAddresses = true
		local := directedService(localNumber, corev1.ServiceTypeNodePort)
		local.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		states[i].put(local, directedSlices(map[string]discoveryv1.EndpointConditions{
			"pod-1-1": object.Conditions(false, true, true), "pod-2-0": {},
		}))
		foreign := directedService(foreignNumber, corev1.ServiceTypeNodePort)
		foreign.Labels = map[string]string{proxyNameLabel: "another"}
		states[i].put(foreign, directedSlices(map[string]discoveryv1.EndpointConditions{"pod-1-1": {}}))
		for _, own := range boundVIPs {
			balancer.Spec.LoadBalancerSourceRanges = append(balancer.Spec.LoadBalancerSourceRanges, own.String())
			balancer.Status.LoadBalancer.Ingress = append(balancer.Status.LoadBalancer.Ingress,
				corev1.LoadBalancerIngress{IP: own.Addr().String(), IPMode: new(corev1.LoadBalancerIPModeVIP)})
		}
		states[i].put(flows, directedSlices(is))
		served := []string{firstNode, "pod-1-1"}[i]
		states[i].put(balancer, directedSlices(map[string]discoveryv1.EndpointConditions{served: {}}))
	}

	return states[0], states[1]
}

const (
	flowsNumber    = 9
	balancerNumber = 8
	localNumber    = 7
	foreignNumber  = 6
)

func directedService(number int, of corev1.ServiceType) *corev1.Service {
	v4, v6 := clusterIPs(number)
	svc := object.Service(namespace, fmt.Sprintf("s%d", number), []string{v4, v6}, corev1.ServicePort{
		Name: portNames[0], Protocol: corev1.ProtocolUDP, Port: 53, NodePort: int32(30000 + 100*number),
	})
	svc.Spec.Type, svc.Spec.ExternalTrafficPolicy = of, corev1.ServiceExternalTrafficPolicyCluster

	return svc
}

func directedSlices(is map[string]discoveryv1.EndpointConditions) []*discoveryv1.EndpointSlice {
	var all []*discoveryv1.EndpointSlice
	for f, kind := range object.Families {
		slice := &discoveryv1.EndpointSlice{
			AddressType: kind,
			Ports:       []discoveryv1.EndpointPort{object.EndpointPort(portNames[0], corev1.ProtocolUDP, int32(serverPorts[0]))},
		}
		for _, b := range backends {
			if conditions, ok := is[b.name]; ok {
				e := object.Endpoint(b.addresses[f], b.node)
				e.Conditions = conditions
				slice.Endpoints = append(slice.Endpoints, e)
			}
		}
		all = append(all, slice)
	}

	return all
}
