package conformance

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// mustOpenEverywhere connects every client over TCP to every address of the Service,
// once to each backend.
func (b *balanced) mustOpenEverywhere(t *testing.T) []*scene.Connection {
	t.Helper()
	var all []*scene.Connection
	for _, address := range []string{
		scene.At(b.service.Spec.ClusterIPs[0], 80), scene.At(b.service.Spec.ClusterIPs[1], 80),
		scene.At(b.vips[0], 80), scene.At(b.vips[1], 80), scene.At(b.externals[0], 80), b.nodePort(),
	} {
		b.mustReachBoth(t, address)
		for _, c := range b.Clients() {
			for answered := map[string]bool{}; len(answered) < 2; {
				conn := c.To("tcp", address).MustOpen(t)
				if answered[conn.Pod] {
					scene.MustClose(t, conn)

					continue
				}
				answered[conn.Pod] = true
				all = append(all, conn)
			}
		}
	}

	return all
}

// TCP connections go on when their Service or their endpoint is deleted: only their
// ends end them. New ones never go to an address that is no endpoint.
func TestConnectionsOutliveEndpoints(t *testing.T) {
	t.Parallel()
	b := mustBalance(t)
	open := b.mustOpenEverywhere(t)
	cluster := scene.At(b.service.Spec.ClusterIPs[0], 80)
	b.SetEndpoints(t, "web", scene.ReadyAll(b.there)...)
	for _, c := range b.Clients() {
		scene.MustReach(t, c.To("tcp", cluster), b.there.Name)
	}
	scene.MustGoOn(t, open...)
	b.SetEndpoints(t, "web")
	scene.MustAllFail(t, scene.Rejected, scene.Dials(b.Clients(), "udp", cluster)...)
	scene.MustGoOn(t, open...)
	b.DeleteService(t, "web")
	scene.MustAllFail(t, scene.Dropped, scene.Dials(b.Clients(), "udp", cluster)...)
	scene.MustGoOn(t, open...)

	// Another Service gets its addresses.
	other := []*lab.Pod{b.Local()[1]}
	b.SetEndpoints(t, "other", scene.ReadyAll(other...)...)
	b.CreateService(t, "other", func(svc *corev1.Service) {
		svc.Spec.ClusterIPs = b.service.Spec.ClusterIPs
		svc.Spec.ClusterIP = b.service.Spec.ClusterIP
	})
	for _, c := range b.Clients() {
		scene.MustReach(t, c.To("tcp", cluster), scene.Names(other...)...)
	}
	scene.MustGoOn(t, open...)
}

// Connections go on whatever field of their Service changes.
func TestConnectionsOutlivePolicies(t *testing.T) {
	t.Parallel()
	b := mustBalance(t)
	open := b.mustOpenEverywhere(t)
	ip, vip := b.service.Spec.ClusterIPs[0], b.vips[0]
	cluster, balanced := scene.At(ip, 80), scene.At(vip, 80)
	for _, step := range []struct {
		name   string
		change func()
		seen   func() // waits until the change is in effect
	}{
		{"internal traffic stays here", func() { b.ChangeService(t, "web", scene.InternalLocal) }, func() {
			scene.MustReach(t, b.Pod.To("tcp", cluster), b.here.Name)
		}},
		{"external traffic stays here", func() { b.ChangeService(t, "web", scene.ExternalLocal) }, func() {
			scene.MustReach(t, b.Outside.To("tcp", balanced), b.here.Name)
		}},
		{"affinity", func() { b.ChangeService(t, "web", scene.Affinity(forever), scene.ExternalCluster) }, func() {
			lab.Eventually(t, "a client keeps its backend", func() bool {
				answered := map[string]bool{}
				for range 30 {
					answered[b.Outside.To("tcp", balanced).MustAsk(t).Name] = true
				}

				return len(answered) == 1
			})
		}},
		{"source ranges without any client", func() {
			b.ChangeService(t, "web", scene.SourceRanges("198.18.0.0/15", "2001:db8:1::/48"))
		}, func() { scene.MustFail(t, b.Outside.To("tcp", balanced), scene.Dropped) }},
		{"no load balancer any more", func() { b.SetLoadBalancer(t, "web") }, func() {
			scene.MustFail(t, b.Pod.To("tcp", balanced), scene.Untouched)
		}},
		{"nothing but a ClusterIP", func() {
			b.ChangeService(t, "web", scene.OfType(corev1.ServiceTypeClusterIP), func(svc *corev1.Service) {
				svc.Spec.ExternalIPs, svc.Spec.LoadBalancerSourceRanges = nil, nil
			})
		}, func() { scene.MustFail(t, b.Node.To("tcp", b.nodePort()), scene.Rejected) }},
	} {
		t.Run(step.name, func(t *testing.T) {
			step.change()
			step.seen()
			scene.MustGoOn(t, open...)
		})
	}
}

// A Service with the label of another proxy is withdrawn at once, and served again
// when the label is removed. Its connections go on meanwhile.
func TestProxyName(t *testing.T) {
	t.Parallel()
	const label = "service.kubernetes.io/service-proxy-name"
	b := mustBalance(t)
	cluster, balanced := scene.At(b.service.Spec.ClusterIPs[0], 80), scene.At(b.vips[0], 80)
	for _, value := range []string{"", "other"} {
		open := b.mustOpenEverywhere(t)
		b.ChangeService(t, "web", func(svc *corev1.Service) { svc.Labels = map[string]string{label: value} })
		// The ClusterIP is now an unallocated address of the range.
		scene.MustAllFail(t, scene.Dropped, scene.Dials(b.Clients(), "udp", cluster)...)
		scene.MustAllFail(t, scene.Untouched, b.Node.To("tcp", balanced), b.Pod.To("tcp", balanced))
		scene.MustFail(t, b.Outside.To("tcp", b.nodePort()), scene.Rejected) // by the node
		scene.MustGoOn(t, open...)
		// Its endpoints change, which has no effect until the label is removed.
		b.SetEndpoints(t, "web", scene.ReadyAll(b.there)...)
		b.ChangeService(t, "web", func(svc *corev1.Service) { svc.Labels = nil })
		for _, c := range b.Clients() {
			scene.MustReach(t, c.To("tcp", cluster), b.there.Name)
			scene.MustReach(t, c.To("tcp", balanced), b.there.Name)
		}
		scene.MustGoOn(t, open...)
		b.SetEndpoints(t, "web", scene.ReadyAll(b.here, b.there)...)
	}
}

// All backends of a Service are replaced at once, repeatedly and under load. No dial
// fails, and none reaches an old backend after a new one has answered.
//
//	clients ──── web:80 ── pod-1-0, pod-2-0, then pod-1-1, pod-2-1, then…
func TestSwitchUnderLoad(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	sets := [2][]*lab.Pod{{s.Local()[0], s.Remote()[0]}, {s.Local()[1], s.Remote()[1]}}
	s.SetEndpoints(t, "web", scene.ReadyAll(sets[0]...)...)
	ips := s.CreateService(t, "web").Spec.ClusterIPs
	var dials []scene.Dial
	for i, c := range s.Clients() {
		d := c.To("tcp", scene.At(ips[i%2], 80))
		scene.MustReach(t, d, scene.Names(sets[0]...)...)
		dials = append(dials, d)
	}
	load := scene.MustDial(t, 30, append(dials, s.Node.To("udp", scene.At(ips[1], 80)), s.Guest.To("udp", scene.At(ips[0], 80)))...)
	for turn := 1; turn <= 12; turn++ {
		old, next := scene.Names(sets[(turn-1)%2]...), scene.Names(sets[turn%2]...)
		s.SetEndpoints(t, "web", scene.ReadyAll(sets[turn%2]...)...)
		for _, d := range dials {
			switched, after := false, 0
			lab.Eventually(t, d.String()+" is switched", func() bool {
				for range 20 {
					name := d.MustAsk(t).Name
					if switched && slices.Contains(old, name) {
						t.Fatalf("%s: %s answers after one of %v has", d, name, next)
					}
					switched = switched || slices.Contains(next, name)
				}
				if switched {
					after++
				}

				return after == 2
			})
		}
	}
	load.MustHaveWorked(t)
}
