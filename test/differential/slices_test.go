package differential

import (
	"math/rand/v2"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/test/object"
)

// conditions are all that an endpoint may be in, the usual ones more often: ready,
// serving, terminating.
var conditions = []discoveryv1.EndpointConditions{
	{},
	{Ready: new(true), Serving: new(true), Terminating: new(false)},
	{Ready: new(true), Serving: new(true), Terminating: new(false)},
	{Ready: new(true), Serving: new(true), Terminating: new(false)},
	{Ready: new(false), Serving: new(true), Terminating: new(true)},
	{Ready: new(false), Serving: new(true), Terminating: new(true)},
	{Ready: new(false), Serving: new(false), Terminating: new(true)},
	{Ready: new(false), Serving: new(false), Terminating: new(false)},
	{Ready: new(false), Serving: new(true), Terminating: new(false)},
	{Ready: new(true), Serving: new(true), Terminating: new(true)},
	{Ready: new(true), Serving: new(false), Terminating: new(true)},
	{Ready: new(false)},
	{Terminating: new(true), Ready: new(false)},
}

// randomSlices are some for a Service: of both families, with some of the backends
// each, none, one or several.
func randomSlices(r *rand.Rand, svc *corev1.Service) []*discoveryv1.EndpointSlice {
	var all []*discoveryv1.EndpointSlice
	hints := r.IntN(6) // alike in most endpoints of a Service
	onePort := r.IntN(3) > 0
	for f, kind := range object.Families {
		slices := make([]*discoveryv1.EndpointSlice, r.IntN(4))
		for i := range slices {
			slices[i] = &discoveryv1.EndpointSlice{AddressType: kind, Ports: randomSlicePorts(r, svc, i, onePort)}
			if r.IntN(20) == 0 {
				metav1.SetMetaDataLabel(&slices[i].ObjectMeta, corev1.IsHeadlessService, "")
			}
		}
		if len(slices) == 0 {
			continue
		}
		state := r.IntN(3) // all are ready, all are alike, each is as it is
		common := pick(r, conditions...)
		for _, b := range backends {
			if r.IntN(3) == 0 {
				continue
			}
			e := randomEndpoint(r, b, family(f), hints)
			switch state {
			case 0:
				e.Conditions = conditions[1]
			case 1:
				e.Conditions = common
			}
			spread(r, slices, e)
		}
		all = append(all, slices...)
	}

	return all
}

// randomSlicePorts are those of a Service, at one port of the servers or at the one
// that follow from the slice's number. One may be missing, or have another protocol.
func randomSlicePorts(r *rand.Rand, svc *corev1.Service, number int, onePort bool) []discoveryv1.EndpointPort {
	var all []discoveryv1.EndpointPort
	if onePort {
		number = 0
	}
	for _, port := range svc.Spec.Ports {
		protocol := port.Protocol
		switch r.IntN(20) {
		case 0:
			continue
		case 1:
			protocol = corev1.ProtocolSCTP
		}
		all = append(all, object.EndpointPort(port.Name, protocol, int32(serverPorts[number%len(serverPorts)])))
	}

	return all
}

func randomEndpoint(r *rand.Rand, b backend, f family, hints int) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{Addresses: []string{b.addresses[f].String()}, Conditions: pick(r, conditions...)}
	// An endpoint without a node is on no node for kube-proxy, not even for itself: see
	// test/conformance/flows about hairpin.
	if b.node == firstNode || r.IntN(6) != 0 {
		e.NodeName = new(b.node)
	}
	if r.IntN(12) == 0 {
		hints = r.IntN(6)
	}
	if hints >= 4 {
		return e
	}
	e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: pick(r, "a", "b")}}}
	if hints >= 2 {
		e.Hints.ForNodes = []discoveryv1.ForNode{{Name: pick(r, b.node, b.node, "node-1", "node-9")}}
	}

	return e
}

// spread puts an endpoint into one of the slices, or into several. Where slices
// contradict each other, kube-proxy takes the one that is not terminating; if
// several are not, it is open which, so then they are equal.
func spread(r *rand.Rand, slices []*discoveryv1.EndpointSlice, e discoveryv1.Endpoint) {
	at := pick(r, slices...)
	at.Endpoints = append(at.Endpoints, e)
	other := pick(r, slices...)
	if r.IntN(3) != 0 || other == at {
		return
	}
	if c := e.Conditions; r.IntN(2) == 0 && (c.Terminating == nil || !*c.Terminating) {
		e.Conditions = object.Conditions(false, r.IntN(2) == 0, true)
	}
	other.Endpoints = append(other.Endpoints, e)
}

// randomChange changes a few Services, or what is behind them.
func randomChange(r *rand.Rand, o objects, count int) objects {
	o = o.clone()
	for range 1 + r.IntN(count) {
		number := r.IntN(count)
		fresh := randomService(r, number)
		svc := o.services[fresh.Name]
		switch {
		case svc == nil:
			o.put(fresh, randomSlices(r, fresh))
		case r.IntN(8) == 0:
			o.remove(svc.Name)
			o.remove(svc.Name + twinSuffix)
		case r.IntN(4) == 0: // all but its backends
			o.put(fresh, o.slicesOf(svc.Name))
		case r.IntN(2) == 0: // what is said of its backends
			o.put(svc, otherConditions(r, o.slicesOf(svc.Name)))
		default:
			o.put(svc, randomSlices(r, svc))
		}
	}
	if r.IntN(3) == 0 {
		o.zone = pick(r, "a", "b", "")
	}

	return o
}

// otherConditions are the same slices, but some endpoints are in other conditions:
// in all slices alike.
func otherConditions(r *rand.Rand, all []*discoveryv1.EndpointSlice) []*discoveryv1.EndpointSlice {
	other := map[string]discoveryv1.EndpointConditions{}
	for _, b := range backends {
		for _, address := range b.addresses {
			if r.IntN(2) == 0 {
				other[address.String()] = pick(r, conditions...)
			}
		}
	}
	var changed []*discoveryv1.EndpointSlice
	for _, slice := range all {
		slice = slice.DeepCopy()
		for i, e := range slice.Endpoints {
			if is, ok := other[e.Addresses[0]]; ok {
				slice.Endpoints[i].Conditions = is
			}
		}
		changed = append(changed, slice)
	}

	return changed
}

// randomObjects are what there is to begin with.
func randomObjects(r *rand.Rand, count int) objects {
	o := objects{services: map[string]*corev1.Service{}, slices: map[string]*discoveryv1.EndpointSlice{}, zone: "a"}
	for number := range count {
		svc := randomService(r, number)
		o.put(svc, randomSlices(r, svc))
	}

	return o
}
