package conformance

import (
	"slices"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// rollout is a Deployment of 20 pods that gets a new version, five pods at a time,
// as its controllers write it.
type rollout struct {
	*balanced
	endpoints []scene.Endpoint
	clients   crowd
}

// set changes the condition of pods, or adds them.
func (r *rollout) set(t *testing.T, is scene.Condition, pods ...*lab.Pod) {
	t.Helper()
	for _, pod := range pods {
		i := slices.IndexFunc(r.endpoints, func(e scene.Endpoint) bool { return e.Pod == pod })
		if i < 0 {
			i = len(r.endpoints)
			r.endpoints = append(r.endpoints, scene.Endpoint{Pod: pod})
		}
		r.endpoints[i].Is = is
	}
	r.SetEndpoints(t, "web", r.endpoints...)
}

func (r *rollout) remove(t *testing.T, pods ...*lab.Pod) {
	t.Helper()
	r.endpoints = slices.DeleteFunc(r.endpoints, func(e scene.Endpoint) bool { return slices.Contains(pods, e.Pod) })
	r.SetEndpoints(t, "web", r.endpoints...)
}

// startAll starts pods on both nodes.
func (r *rollout) startAll(t *testing.T, n int) []*lab.Pod {
	t.Helper()
	var pods []*lab.Pod
	for i := range n {
		pods = append(pods, r.AnotherPod(t, r.Lab.Nodes[i%2]))
	}

	return pods
}

// All 20 pods of a Service are replaced, while all clients dial it without a
// pause, at all its addresses: with a new connection for each request, with
// requests on connections that are open, and over UDP. Not one request fails.
//
//	clients ──── web, at all its addresses ── 20 pods, of two versions, on two nodes
func TestRollingUpdate(t *testing.T) {
	const batch = 5
	r := &rollout{balanced: mustBalance(t)}
	serving := r.startAll(t, 20)
	r.set(t, scene.Ready, serving...)
	cluster, cluster6 := scene.At(r.service.Spec.ClusterIPs[0], 80), scene.At(r.service.Spec.ClusterIPs[1], 80)
	addresses := []string{cluster, cluster6, scene.At(r.vips[0], 80), scene.At(r.vips[1], 80)}
	for i, c := range r.Clients() {
		scene.MustReach(t, c.To("tcp", addresses[i]), scene.Names(serving...)...)
	}
	for i, c := range r.Clients() {
		r.clients.join(1, c.To("tcp", addresses[i]), c.To("tcp", addresses[(i+2)%4]), c.To("udp", addresses[i]))
		r.clients.join(10, c.To("tcp", addresses[(i+1)%4]), c.To("tcp", r.nodePort()))
		if !c.AtSocket { // sockets are ended with their backends: see TestUDPMoves
			r.clients.join(endless, c.To("udp", addresses[(i+3)%4]))
		}
	}
	for range len(serving) / batch {
		old, fresh := serving[:batch], r.startAll(t, batch)
		r.set(t, scene.Starting, fresh...)
		r.set(t, scene.Ready, fresh...)
		serving = append(slices.Clone(serving[batch:]), fresh...)
		r.set(t, scene.Draining, old...)
		// Not UDP: among so many datagrams some have the port of an earlier flow, and are of it.
		for _, d := range []scene.Dial{r.Node.To("tcp", cluster6), r.Outside.To("tcp", addresses[2])} {
			scene.MustReach(t, d, scene.Names(serving...)...)
		}
		r.set(t, scene.Ending, old...)
		r.clients.mustForget(t, scene.Names(old...)...)
		for _, pod := range old {
			r.Stop(t, pod)
		}
		r.remove(t, old...)
	}
	for i, c := range r.Clients() {
		scene.MustReach(t, c.To("tcp", addresses[i]), scene.Names(serving...)...)
	}
	r.clients.mustHaveWorked(t)
}

// When all pods of a Service leave at once, those that still serve do so until
// the last: KEP-1669.
//
//	clients ──── web:80 ─┬─ pod-1-n
//	                     └─ pod-2-n
func TestAllPodsLeave(t *testing.T) {
	r := &rollout{balanced: mustBalance(t)}
	pods := r.startAll(t, 2)
	r.set(t, scene.Ready, pods...)
	cluster, vip := scene.At(r.service.Spec.ClusterIPs[0], 80), scene.At(r.vips[0], 80)
	for _, c := range r.Clients() {
		scene.MustReach(t, c.To("tcp", cluster), scene.Names(pods...)...)
	}
	r.clients.join(1, scene.Dials(r.Clients(), "tcp", cluster)...)
	r.clients.join(3, scene.Dials(r.Clients(), "tcp", vip)...)
	r.set(t, scene.Draining, pods[0])
	scene.MustReach(t, r.Pod.To("tcp", cluster), pods[1].Name)
	r.set(t, scene.Draining, pods[1])
	for _, c := range r.Clients() {
		scene.MustReach(t, c.To("tcp", cluster), scene.Names(pods...)...)
	}
	r.set(t, scene.Ending, pods[0])
	r.clients.mustForget(t, pods[0].Name)
	r.Stop(t, pods[0])
	r.remove(t, pods[0])
	r.clients.mustHaveWorked(t)

	r.remove(t, pods[1])
	scene.MustAllFail(t, scene.Rejected, scene.Dials(r.Clients(), "tcp", cluster)...)
}
