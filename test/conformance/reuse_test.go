package conformance

import (
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

const othersPod = "the-others-pod"

// A pod of one Service dies, and its address is given to a pod of another at
// once. From when both Services are programmed, no client of the first is
// answered by the pod of the second: with no new connection, and with no flow
// over UDP that went there before.
//
//	clients ───┬─ web:80 ─┬─ pod-1-0
//	           │          └─ the address, at first
//	           └─ other:80 ─ the address, then
func TestAddressReuse(t *testing.T) {
	s := scene.MustShare(t)
	stays, moves := s.Local()[0], s.AnotherPod(t, s.Lab.Nodes[1])
	s.SetEndpoints(t, "web", scene.ReadyAll(stays, moves)...)
	web := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	other := scene.At(s.CreateService(t, "other").Spec.ClusterIPs[0], 80)
	for _, c := range s.Clients() {
		scene.MustReach(t, c.To("tcp", web), stays.Name, moves.Name)
	}
	var clients crowd
	clients.join(1, append(scene.Dials(s.Clients(), "tcp", web), scene.Dials(s.Clients(), "udp", web)...)...)
	for range 2 {
		clients.join(endless, scene.Dials(s.Clients(), "udp", web)...)
	}
	for range 3 {
		s.Stop(t, moves)
		server := lab.MustServe(t, moves.Namespace, othersPod, moves.At(scene.PodPort)...)
		s.SetEndpoints(t, "other", scene.ReadyAll(moves)...)
		s.SetEndpoints(t, "web", scene.ReadyAll(stays)...)
		for _, c := range s.Clients() {
			scene.MustReach(t, c.To("tcp", other), othersPod)
			scene.MustReach(t, c.To("tcp", web), stays.Name)
			scene.MustReach(t, c.To("udp", web), stays.Name)
		}
		clients.mustForget(t, moves.Name, othersPod)
		clients.mustNeverReach(t, moves.Name, othersPod)

		lab.Must(t, server.Stop()) // and back
		s.Serve(t, moves)
		s.SetEndpoints(t, "other")
		s.SetEndpoints(t, "web", scene.ReadyAll(stays, moves)...)
		for _, c := range s.Clients() {
			scene.MustReach(t, c.To("tcp", web), stays.Name, moves.Name)
		}
	}
	clients.end()
}

// An address is listed twice, by the terminating pod that had it, and by
// the pod that has it now. Clients reach the new pod, until both are gone.
//
//	clients ──── web:80 ─┬─ pod-1-0
//	                     └─ pod-2-0, in two slices
func TestAddressListedTwice(t *testing.T) {
	s := scene.MustShare(t)
	here, there := s.Local()[0], s.Remote()[0]
	put := func(name string, endpoints ...scene.Endpoint) {
		t.Helper()
		slice := s.Slice("web", discoveryv1.AddressTypeIPv4, endpoints...)
		slice.Name = name
		s.PutSlice(t, slice)
	}
	web := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	mustReach := func(pods ...*lab.Pod) {
		t.Helper()
		for _, c := range s.Clients() {
			scene.MustReach(t, c.To("tcp", web), scene.Names(pods...)...)
		}
	}
	ready, leaving := scene.Endpoint{Pod: there, Is: scene.Ready}, scene.Endpoint{Pod: there, Is: scene.Ending}
	for _, names := range [][2]string{{"web-1", "web-2"}, {"web-2", "web-1"}} { // whichever comes first
		put(names[0], leaving)
		put(names[1], scene.Endpoint{Pod: here, Is: scene.Ready}, ready)
		mustReach(here, there)
		load := scene.MustDial(t, 50, scene.Dials(s.Clients(), "tcp", web)...)
		put(names[0], scene.Endpoint{Pod: there, Is: scene.Draining})
		s.DeleteSlice(t, names[0])
		mustReach(here, there)
		put(names[0], ready) // now it is this one's
		put(names[1], scene.Endpoint{Pod: here, Is: scene.Ready}, leaving)
		mustReach(here, there)
		load.MustHaveWorked(t)
		s.DeleteSlice(t, names[0])
		mustReach(here)
		s.DeleteSlice(t, names[1])
	}
}
