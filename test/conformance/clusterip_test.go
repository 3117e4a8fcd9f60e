package conformance

import (
	"context"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
	"github.com/sluice-lb/sluice/test/scene"
)

// A port of a ClusterIP that is none of the Service's is refused to all clients:
// the Service's own node port, too.
//
//	clients ──── web:80 ── pod-1-0
func TestUnusedPorts(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	pod := s.Local()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(pod)...)
	web := s.CreateService(t, "web", scene.NodePort)
	for _, ip := range web.Spec.ClusterIPs {
		for _, c := range s.Clients() {
			scene.MustReach(t, c.To("tcp", scene.At(ip, 80)), pod.Name)
		}
		scene.MustAllFail(t, scene.Rejected, scene.Dials(s.Clients(), "tcp", scene.At(ip, 81))...)
		scene.MustAllFail(t, scene.Rejected, scene.Dials(s.Clients(), "udp", scene.At(ip, 81))...)
		scene.MustAllFail(t, scene.Rejected, scene.Dials(s.Clients(), "tcp", scene.At(ip, web.Spec.Ports[0].NodePort))...)
	}
}

// Packets to an address of the service range that is no Service's are dropped.
//
//	clients ──── 10.96.x.y ── no Service any more
func TestUnallocatedAddress(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	pod := s.Local()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(pod)...)
	ips := s.CreateService(t, "web").Spec.ClusterIPs
	for _, ip := range ips {
		scene.MustReach(t, s.Pod.To("tcp", scene.At(ip, 80)), pod.Name)
	}
	s.DeleteService(t, "web")
	for _, ip := range ips {
		for _, network := range []string{"tcp", "udp"} {
			scene.MustAllFail(t, scene.Dropped, scene.Dials(s.Clients(), network, scene.At(ip, 80))...)
		}
	}
}

// A ServiceCIDR is created while the agent runs. Services get addresses from it
// and its other addresses drop packets until it is deleted. Its Services stay.
//
// The test is not parallel: while the range exists, the API server takes addresses
// of Services from it at random, and once it is deleted, those addresses no longer
// drop packets when their Service is gone.
//
//	all clients ── web 10.99.0.7:80 ── pod-1-0
//	               10.99.0.8 ── no Service
func TestServiceCIDRAtRunTime(t *testing.T) {
	s := scene.MustShare(t)
	pod := s.Local()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(pod)...)
	unused, web := "10.99.0.8:80", "10.99.0.7:80"
	scene.MustFail(t, s.Pod.To("tcp", unused), scene.Untouched)

	// Two name the range: it stays until the last of them goes.
	first, second := createServiceCIDR(t, s, "first"), createServiceCIDR(t, s, "second")
	scene.MustAllFail(t, scene.Dropped, scene.Dials(s.Clients(), "tcp", unused)...)
	create := func(name, ip string, options metav1.CreateOptions) bool {
		svc := object.Service(s.Namespace, name, []string{ip}, scene.Ports()...)
		_, err := s.Client.CoreV1().Services(s.Namespace).Create(t.Context(), svc, options)
		if err != nil && !apierrors.IsInvalid(err) && !apierrors.IsInternalError(err) {
			t.Fatal(err)
		}

		return err == nil
	}
	lab.Eventually(t, "the API server assigns the new addresses", func() bool {
		return create("web", "10.99.0.7", metav1.CreateOptions{})
	})
	for _, c := range s.Clients() {
		scene.MustReach(t, c.To("tcp", web), pod.Name)
		scene.MustFail(t, c.To("udp", "10.99.0.7:81"), scene.Rejected)
	}
	first()
	scene.MustFail(t, s.Pod.To("udp", unused), scene.Dropped)
	second()
	scene.MustFail(t, s.Pod.To("tcp", unused), scene.Untouched)
	for _, c := range s.Clients() {
		scene.MustReach(t, c.To("tcp", web), pod.Name)
	}

	// The API server releases no address that is in no range: without this, the
	// next run would find it assigned.
	s.DeleteService(t, "web")
	lab.Must(t, s.Client.NetworkingV1().IPAddresses().Delete(t.Context(), "10.99.0.7", metav1.DeleteOptions{}))
	lab.Eventually(t, "the API server assigns the addresses no longer", func() bool {
		return !create("other", "10.99.0.9", metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	})
}

// createServiceCIDR creates a ServiceCIDR, and sets it ready, as the
// controller manager does. It returns what deletes it.
func createServiceCIDR(t *testing.T, s *scene.Scene, name string) (remove func()) {
	t.Helper()
	cidrs := s.Client.NetworkingV1().ServiceCIDRs()
	cidr, err := cidrs.Create(t.Context(), object.ServiceCIDR(s.Namespace+"-"+name, "10.99.0.0/16"), metav1.CreateOptions{})
	lab.Must(t, err)
	t.Cleanup(func() { _ = cidrs.Delete(context.Background(), cidr.Name, metav1.DeleteOptions{}) }) // gone by now
	cidr.Status.Conditions = []metav1.Condition{{
		Type: networkingv1.ServiceCIDRConditionReady, Status: metav1.ConditionTrue, LastTransitionTime: metav1.Now(), Reason: "Test",
	}}
	_, err = cidrs.UpdateStatus(t.Context(), cidr, metav1.UpdateOptions{})
	lab.Must(t, err)

	return func() {
		t.Helper()
		lab.Must(t, cidrs.Delete(t.Context(), cidr.Name, metav1.DeleteOptions{}))
	}
}

// Without endpoints, clients are refused. With endpoints that the traffic policy
// excludes, their packets are dropped.
//
//	clients ──── web:80 ─┬─ pod-1-0, not ready
//	                     └─ pod-2-0, not ready at first
func TestNoEndpoints(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	here, there := s.Local()[0], s.Remote()[0]
	web := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	mustAllFail := func(how scene.Refusal) {
		t.Helper()
		for _, network := range []string{"tcp", "udp"} {
			scene.MustAllFail(t, how, scene.Dials(s.Clients(), network, web)...)
		}
	}
	mustAllFail(scene.Rejected)

	starting := scene.Endpoint{Pod: here, Is: scene.Starting}
	s.SetEndpoints(t, "web", starting, scene.Endpoint{Pod: there, Is: scene.Starting})
	s.ChangeService(t, "web", scene.InternalLocal)
	mustAllFail(scene.Rejected) // a remote endpoint that is not ready does not count
	s.SetEndpoints(t, "web", starting, scene.Endpoint{Pod: there, Is: scene.Ready})
	mustAllFail(scene.Dropped)
	s.ChangeService(t, "web", scene.InternalCluster)
	for _, c := range s.Clients() {
		scene.MustReach(t, c.To("tcp", web), there.Name)
	}
}

// A ClusterIP works from outside, if there is a route for its range to a node. The
// backend sees the client, or the node where the answer would otherwise not pass it.
//
//	outside ── web:80 ─┬─ pod-1-0, pod-1-1
//	                   └─ pod-2-0, pod-2-1
func TestClusterIPFromOutside(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	here, there := s.Local()[:2], s.Remote()[:2]
	all := scene.Names(append(here, there...)...)
	s.SetEndpoints(t, "web", scene.ReadyAll(append(here, there...)...)...)
	web := s.CreateService(t, "web")
	self := s.Lab.Nodes[0]
	for i, ip := range web.Spec.ClusterIPs {
		sees := map[string][]netip.Addr{}
		for _, pod := range here {
			sees[pod.Name] = [][]netip.Addr{{s.Outside.IPv4}, {s.Outside.IPv6}}[i]
		}
		for _, pod := range there { // by either uplink, if there are two
			sees[pod.Name] = [][]netip.Addr{{self.IPv4, self.SecondIPv4}, {self.IPv6, self.SecondIPv6}}[i]
		}
		for _, network := range []string{"tcp", "udp"} {
			d := s.Outside.To(network, scene.At(ip, 80))
			scene.MustReach(t, d, all...)
			for range 20 {
				if answer := d.MustAsk(t); !slices.Contains(sees[answer.Name], answer.Client.Addr()) {
					t.Errorf("%s: %s saw %s, want %s", d, answer.Name, answer.Client, sees[answer.Name])
				}
			}
		}
	}
	s.ChangeService(t, "web", scene.InternalLocal)
	for _, ip := range web.Spec.ClusterIPs {
		scene.MustReach(t, s.Outside.To("tcp", scene.At(ip, 80)), scene.Names(here...)...)
	}
}

// A Service of one family gets the other one, and loses it again. Clients of the
// first do not notice; connections of the second go on.
//
//	clients ──── web:80, IPv4, and IPv6 for a while ─┬─ pod-1-0
//	                                                 └─ pod-2-0
func TestFamiliesOfAService(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	here, there := s.Local()[0], s.Remote()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(here, there)...)
	web := s.CreateService(t, "web", scene.NodePort, func(svc *corev1.Service) {
		svc.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
		svc.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
	})
	v4 := scene.At(web.Spec.ClusterIP, 80)
	number := scene.At(s.Lab.Nodes[0].IPv6.String(), web.Spec.Ports[0].NodePort)
	for _, c := range s.Clients() {
		scene.MustReach(t, c.To("tcp", v4), here.Name, there.Name)
	}
	scene.MustAllFail(t, scene.Rejected, scene.Dials(s.Clients(), "tcp", number)...) // by the node
	first := scene.MustOpenAll(t, s.Clients(), v4, "tcp", "udp")
	load := scene.MustDial(t, 25, append(scene.Dials(s.Clients(), "tcp", v4), scene.Dials(s.Clients(), "udp", v4)...)...)

	var second []*scene.Connection
	for range 2 {
		web = s.ChangeService(t, "web", func(svc *corev1.Service) {
			svc.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyPreferDualStack)
		})
		if len(web.Spec.ClusterIPs) != 2 {
			t.Fatalf("the API server gave it %v, want two addresses", web.Spec.ClusterIPs)
		}
		v6 := scene.At(web.Spec.ClusterIPs[1], 80)
		for _, c := range s.Clients() {
			scene.MustReach(t, c.To("tcp", v6), here.Name, there.Name)
			scene.MustReach(t, c.To("tcp", number), here.Name, there.Name)
		}
		second = append(second, scene.MustOpenAll(t, s.Clients(), v6, "tcp")...)
		second = append(second, scene.MustOpenAll(t, s.Clients(), number, "tcp")...)

		s.ChangeService(t, "web", func(svc *corev1.Service) {
			svc.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
			svc.Spec.IPFamilies, svc.Spec.ClusterIPs = svc.Spec.IPFamilies[:1], svc.Spec.ClusterIPs[:1]
		})
		scene.MustAllFail(t, scene.Dropped, scene.Dials(s.Clients(), "udp", v6)...)
		scene.MustAllFail(t, scene.Rejected, scene.Dials(s.Clients(), "tcp", number)...)
		scene.MustGoOn(t, first...)
		scene.MustGoOn(t, second...)
	}
	load.MustHaveWorked(t)
}
