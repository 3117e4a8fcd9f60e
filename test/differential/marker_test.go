package differential

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
)

// marker is a Service that is created last. A proxy that answers at its addresses has
// taken in all Services and slices before it, and the zone of the node: one
// endpoint is hinted for each zone.
//
//	marker-7 10.96.200.7:9, [fd00:10:96::c007]:9 ─┬─ pod-1-1 zone a
//	                                              └─ pod-2-0 zone b
const markerPort = 9

// markerName is the name of the nth.
func markerName(n int) string { return fmt.Sprintf("marker-%d", n) }

func markerIPs(n int) [2]string {
	return [2]string{fmt.Sprintf("10.96.%d.%d", 200+n/250, n%250+1), fmt.Sprintf("fd00:10:96::%x", 0xc000+n)}
}

// putMarker replaces the marker before the nth by the nth.
func (a *api) putMarker(ctx context.Context, n int) error {
	ips := markerIPs(n)
	for f, kind := range object.Families {
		slice := object.Slice(namespace, fmt.Sprintf("%s-%d", markerName(n), f), markerName(n), kind,
			object.EndpointPort("", corev1.ProtocolTCP, int32(serverPorts[0])))
		for i, zone := range []string{"a", "b"} {
			b := backends[[]int{0, 3}[i]]
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
				Addresses: []string{b.addresses[f].String()},
				Hints:     object.Hints([]string{zone}, nil),
			})
		}
		if _, err := a.client.DiscoveryV1().EndpointSlices(namespace).Create(ctx, slice, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	svc := object.Service(namespace, markerName(n), ips[:], corev1.ServicePort{Port: markerPort})
	_, err := a.client.CoreV1().Services(namespace).Create(ctx, svc, metav1.CreateOptions{})

	return err
}

// removeMarker removes the nth. There is no zeroth.
func (a *api) removeMarker(ctx context.Context, n int) error {
	if n == 0 {
		return nil
	}
	slices := a.client.DiscoveryV1().EndpointSlices(namespace)

	return errors.Join(
		a.client.CoreV1().Services(namespace).Delete(ctx, markerName(n), metav1.DeleteOptions{}),
		slices.Delete(ctx, markerName(n)+"-0", metav1.DeleteOptions{}),
		slices.Delete(ctx, markerName(n)+"-1", metav1.DeleteOptions{}))
}

// awaitMarker waits until the nth marker answers as a node in this zone makes it.
func (s *side) awaitMarker(n int, zone string) error {
	want := map[string][]string{"a": {"pod-1-1"}, "b": {"pod-2-0"}, "": {"pod-1-1", "pod-2-0"}}[zone]
	for f, ip := range markerIPs(n) {
		address := netip.AddrPortFrom(netip.MustParseAddr(ip), markerPort).String()
		var last error
		for deadline := time.Now().Add(waitTimeout); ; time.Sleep(20 * time.Millisecond) {
			if last = s.expectMarker(address, want); last == nil {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("marker %d in family %d, zone %q: %w", n, f, zone, last)
			}
		}
	}

	return nil
}

// expectMarker returns an error unless exactly these answer. Of two, each misses so many dials
// once in a million times.
func (s *side) expectMarker(address string, want []string) error {
	const dials = 20
	seen := map[string]bool{}
	for range dials {
		reply, err := s.callers["node"].Exchange(lab.Exchange{Network: "tcp", Address: address, Timeout: time.Second})
		if err != nil {
			return err
		}
		answer, err := lab.ParseAnswer(reply.Text)
		if err != nil {
			return err
		}
		seen[answer.Name] = true
	}
	for _, name := range want {
		if !seen[name] || len(seen) != len(want) {
			return fmt.Errorf("%v answered, want %v", seen, want)
		}
	}

	return nil
}
