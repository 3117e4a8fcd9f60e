package e2e

import (
	"testing"

	"golang.org/x/sys/unix"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// The slices of one Service come and go, in every order, and endpoints move
// between them.
//
//	web:80 ─┬─ web-a: pod-1-1, pod-1-2
//	        └─ web-b: pod-1-2, pod-2-0
func TestSlices(t *testing.T) {
	const v4 = discoveryv1.AddressTypeIPv4
	s := mustScene(t)
	one, two, three := s.local()[0], s.local()[1], s.remote()[0]
	ip := at(s.createService(t, "web").Spec.ClusterIPs[0], 80)
	web := dial{s.pod, "tcp", ip}

	for _, step := range []struct {
		name string
		do   func()
		want []string // none: refused
	}{
		{"no slice", func() {}, nil},
		{"an empty slice", func() { s.setSlice(t, "web-a", "web", v4) }, nil},
		{"a slice", func() { s.setSlice(t, "web-a", "web", v4, readyAll(one, two)...) }, names(one, two)},
		{"a second slice that has one of them too", func() {
			s.setSlice(t, "web-b", "web", v4, readyAll(two, three)...)
		}, names(one, two, three)},
		{"both go from the first", func() { s.setSlice(t, "web-a", "web", v4) }, names(two, three)},
		{"one moves, and is in both for a moment", func() {
			s.setSlice(t, "web-a", "web", v4, readyAll(three)...)
			s.setSlice(t, "web-b", "web", v4, readyAll(two)...)
		}, names(two, three)},
		{"an older copy is draining", func() {
			s.setSlice(t, "web-b", "web", v4, endpoint{pod: two, is: ready}, endpoint{pod: three, is: draining})
		}, names(two, three)},
		{"a slice becomes another Service's", func() { s.setSlice(t, "web-a", "other", v4, readyAll(three)...) }, names(two)},
		{"a slice goes", func() { s.deleteSlice(t, "web-b") }, nil},
		{"one of the other family only", func() {
			s.setSlice(t, "web-c", "web", discoveryv1.AddressTypeIPv6, readyAll(one)...)
		}, nil},
		{"the first comes back", func() { s.setSlice(t, "web-a", "web", v4, readyAll(one)...) }, names(one)},
	} {
		t.Run(step.name, func(t *testing.T) {
			step.do()
			if step.want == nil {
				mustFail(t, web, unix.ECONNREFUSED)
			} else {
				mustReach(t, web, step.want...)
			}
		})
	}
}

// While an endpoint moves from one slice to another, as the endpoint controller
// moves it, clients do not notice.
//
//	web:80 ── pod-1-1, now in web-a, now in web-b
func TestSlicesUnderLoad(t *testing.T) {
	const v4 = discoveryv1.AddressTypeIPv4
	s := mustScene(t)
	pod := s.local()[0]
	s.setSlice(t, "web-a", "web", v4, readyAll(pod)...)
	ip := at(s.createService(t, "web").Spec.ClusterIPs[0], 80)
	mustReach(t, dial{s.pod, "tcp", ip}, pod.Name)
	load := mustDial(t, 200, dial{s.pod, "tcp", ip}, dial{s.node, "tcp", ip})
	for range 20 {
		s.setSlice(t, "web-b", "web", v4, readyAll(pod)...)
		s.setSlice(t, "web-a", "web", v4)
		s.setSlice(t, "web-a", "web", v4, readyAll(pod)...)
		s.deleteSlice(t, "web-b")
	}
	load.mustHaveWorked(t)
}
