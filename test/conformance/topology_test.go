package conformance

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// spread is a Service for which the test acts as the slice controller: it gives hints for
// zones and nodes. Node-1 is in no zone at first.
//
//	clients ──── web:80, at all its addresses ─┬─ pod-1-0, pod-1-1
//	                                           └─ pod-2-0, pod-2-1
type spread struct {
	*scene.Scene
	here, there []*lab.Pod
	addresses   []string
	turn        int
}

// hints are those that the slice controller gives a pod.
type hints func(pod *lab.Pod) (zones, nodes []string)

func mustSpread(t *testing.T, distribution string) *spread {
	t.Helper()
	d := &spread{Scene: scene.MustSet(t, scene.Config{})}
	d.here, d.there = d.Local()[:2], d.Remote()[:2]
	web := d.CreateService(t, "web", scene.LoadBalancer, func(svc *corev1.Service) {
		svc.Spec.TrafficDistribution = &distribution
	})
	vip, _ := scene.VirtualIPs()
	d.SetLoadBalancer(t, "web", ingress(vip)...)
	d.addresses = []string{
		scene.At(web.Spec.ClusterIPs[0], 80), scene.At(web.Spec.ClusterIPs[1], 80), scene.At(vip, 80),
		scene.At(d.Lab.Nodes[0].IPv4.String(), web.Spec.Ports[0].NodePort),
	}

	return d
}

// pods are all of them.
func (d *spread) pods() []*lab.Pod { return append(append([]*lab.Pod{}, d.here...), d.there...) }

// set writes the slices: all are ready, and have hints.
func (d *spread) set(t *testing.T, of hints, more ...scene.Endpoint) {
	t.Helper()
	for _, pod := range d.pods() {
		zones, nodes := of(pod)
		more = append(more, scene.Endpoint{Pod: pod, Is: scene.Ready, Zones: zones, Nodes: nodes})
	}
	d.SetEndpoints(t, "web", more...)
}

// zones hints each pod for the zone of its node: a or b.
func zones(pod *lab.Pod) (zones, nodes []string) {
	return []string{map[int]string{1: "a", 2: "b"}[pod.Node.Number]}, nil
}

// mustBeAnsweredBy waits until these pods answer all clients, each at another address.
func (d *spread) mustBeAnsweredBy(t *testing.T, pods ...*lab.Pod) {
	t.Helper()
	d.turn++ // each client dials another address each time: all addresses would take long
	for i, c := range d.Clients() {
		scene.MustReach(t, c.To("tcp", d.addresses[(i+d.turn)%len(d.addresses)]), scene.Names(pods...)...)
	}
}

// With hints for zones, every client on a node stays in its zone, whatever address
// of the Service they use; the node changes its zone while clients dial. Where
// the hints leave out an endpoint, or this zone, they do not count.
func TestZoneHints(t *testing.T) {
	t.Parallel()
	d := mustSpread(t, corev1.ServiceTrafficDistributionPreferClose)
	self := d.Lab.Nodes[0]
	d.set(t, zones)
	d.mustBeAnsweredBy(t, d.pods()...) // the node is in no zone
	for _, step := range []struct {
		zone string
		want []*lab.Pod
	}{{"a", d.here}, {"b", d.there}, {"c", d.pods()}, {"a", d.here}, {"", d.pods()}, {"b", d.there}} {
		d.LabelNode(t, self, corev1.LabelTopologyZone, step.zone)
		d.mustBeAnsweredBy(t, step.want...)
	}

	// One that is not ready has no hint, as no controller gives it one.
	late := d.Remote()[2]
	d.set(t, zones, scene.Endpoint{Pod: late, Is: scene.Starting})
	d.mustBeAnsweredBy(t, d.there...)
	// One that is ready and has none makes the others' void.
	d.set(t, zones, scene.Endpoint{Pod: late, Is: scene.Ready})
	d.mustBeAnsweredBy(t, append(d.pods(), late)...)
	// One that is hinted for many zones is in each of them.
	d.set(t, zones, scene.Endpoint{Pod: late, Is: scene.Ready, Zones: []string{"a", "b", "c"}})
	d.mustBeAnsweredBy(t, append(d.there, late)...)
	// Only one that is not ready is hinted for this zone.
	d.LabelNode(t, self, corev1.LabelTopologyZone, "c")
	d.set(t, zones, scene.Endpoint{Pod: late, Is: scene.Starting, Zones: []string{"c"}})
	d.mustBeAnsweredBy(t, d.pods()...)
	// All are terminating: hints apply to ready endpoints only.
	d.SetEndpoints(t, "web",
		scene.Endpoint{Pod: d.here[0], Is: scene.Draining, Zones: []string{"a"}},
		scene.Endpoint{Pod: d.there[0], Is: scene.Draining, Zones: []string{"c"}})
	d.mustBeAnsweredBy(t, d.here[0], d.there[0])
}

// With hints for nodes, every client on a node stays with the endpoints that are hinted
// for it, wherever they are; without such endpoints hints for zones count, else none.
func TestNodeHints(t *testing.T) {
	t.Parallel()
	d := mustSpread(t, corev1.ServiceTrafficDistributionPreferSameNode)
	self, other := d.NodeName(d.Lab.Nodes[0]), d.NodeName(d.Lab.Nodes[1])
	d.LabelNode(t, d.Lab.Nodes[0], corev1.LabelTopologyZone, "b")
	d.set(t, func(pod *lab.Pod) ([]string, []string) {
		z, _ := zones(pod)

		return z, []string{d.NodeName(pod.Node)}
	})
	d.mustBeAnsweredBy(t, d.here...)
	// The controller's hint counts, and not the zone where the pod is.
	d.set(t, func(pod *lab.Pod) ([]string, []string) {
		z, _ := zones(pod)
		if pod == d.there[0] {
			return z, []string{other, self}
		}

		return z, []string{other}
	})
	d.mustBeAnsweredBy(t, d.there[0])
	// No endpoint is hinted for this node: its zone counts.
	d.set(t, func(pod *lab.Pod) ([]string, []string) {
		z, _ := zones(pod)

		return z, []string{other}
	})
	d.mustBeAnsweredBy(t, d.there...)
	// Policies of locality do not care for hints.
	d.ChangeService(t, "web", scene.InternalLocal, scene.ExternalLocal)
	scene.MustReach(t, d.Pod.To("tcp", d.addresses[0]), scene.Names(d.here...)...)
	scene.MustReach(t, d.Outside.To("tcp", d.addresses[2]), scene.Names(d.here...)...)
	scene.MustReach(t, d.Node.To("tcp", d.addresses[3]), scene.Names(d.there...)...)
	d.ChangeService(t, "web", scene.InternalCluster, scene.ExternalCluster)
	// Hints end when the Service no longer asks for them.
	d.ChangeService(t, "web", func(svc *corev1.Service) { svc.Spec.TrafficDistribution = nil })
	d.mustBeAnsweredBy(t, d.there...) // the field alone has no effect
	d.set(t, func(*lab.Pod) ([]string, []string) { return nil, nil })
	d.mustBeAnsweredBy(t, d.pods()...)
}

// Each value of trafficDistribution is accepted, and has no effect by itself: the
// slice controller turns it into hints.
func TestTrafficDistributions(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	here, there := s.Local()[0], s.Remote()[0]
	for name, word := range map[string]string{
		"close": corev1.ServiceTrafficDistributionPreferClose,
		"zone":  corev1.ServiceTrafficDistributionPreferSameZone,
		"node":  corev1.ServiceTrafficDistributionPreferSameNode,
	} {
		web := s.CreateService(t, name, func(svc *corev1.Service) { svc.Spec.TrafficDistribution = &word })
		d := s.Pod.To("tcp", scene.At(web.Spec.ClusterIPs[0], 80))
		s.SetEndpoints(t, name, scene.ReadyAll(here, there)...)
		scene.MustReach(t, d, here.Name, there.Name)
		s.SetEndpoints(t, name,
			scene.Endpoint{Pod: here, Is: scene.Ready, Nodes: []string{s.NodeName(here.Node)}},
			scene.Endpoint{Pod: there, Is: scene.Ready, Nodes: []string{s.NodeName(there.Node)}})
		scene.MustReach(t, d, here.Name)
	}
}
