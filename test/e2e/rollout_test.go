package e2e

import (
	"slices"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// rollout is a Service whose endpoints change while clients dial it: 300 new
// connections and 100 UDP flows a second.
//
//	pod, node-1 ────── web:80 ── pods that come and go
type rollout struct {
	*testbed
	v4, v6    string
	endpoints []scene.Endpoint
	loads     []*scene.Load
}

func mustRollOut(t testing.TB, s *testbed, first ...*lab.Pod) *rollout {
	t.Helper()
	r := &rollout{testbed: s, endpoints: scene.ReadyAll(first...)}
	s.SetEndpoints(t, "web", r.endpoints...)
	web := s.CreateService(t, "web")
	r.v4, r.v6 = scene.At(web.Spec.ClusterIPs[0], 80), scene.At(web.Spec.ClusterIPs[1], 80)
	r.mustServe(t, first...)
	r.loads = []*scene.Load{
		scene.MustDial(t, 100, s.Pod.To("tcp", r.v4), s.Node.To("tcp", r.v4), s.Node.To("tcp", r.v6)),
		scene.MustDial(t, 50, s.Pod.To("udp", r.v6), s.Node.To("udp", r.v4)),
	}

	return r
}

// set changes the condition of a pod, or adds it.
func (r *rollout) set(t testing.TB, pod *lab.Pod, is scene.Condition) {
	t.Helper()
	i := slices.IndexFunc(r.endpoints, func(e scene.Endpoint) bool { return e.Pod == pod })
	if i < 0 {
		i = len(r.endpoints)
		r.endpoints = append(r.endpoints, scene.Endpoint{Pod: pod})
	}
	r.endpoints[i].Is = is
	r.SetEndpoints(t, "web", r.endpoints...)
}

func (r *rollout) remove(t testing.TB, pod *lab.Pod) {
	t.Helper()
	r.endpoints = slices.DeleteFunc(r.endpoints, func(e scene.Endpoint) bool { return e.Pod == pod })
	r.SetEndpoints(t, "web", r.endpoints...)
}

// mustServe waits until exactly these pods answer, to every client.
func (r *rollout) mustServe(t testing.TB, pods ...*lab.Pod) {
	t.Helper()
	for _, d := range []scene.Dial{
		r.Pod.To("tcp", r.v4), r.Pod.To("tcp", r.v6), r.Node.To("udp", r.v4), r.Node.To("udp", r.v6),
	} {
		scene.MustReach(t, d, scene.Names(pods...)...)
	}
}

// end stops the clients. The test fails if one of them had a failure.
func (r *rollout) end(t testing.TB) {
	t.Helper()
	for _, load := range r.loads {
		load.MustKeepUp(t)
	}
}

// A Service grows from one backend to six, and shrinks to another one.
func TestScale(t *testing.T) {
	s := mustTestbed(t)
	pods := s.pods()
	r := mustRollOut(t, s, pods[0])
	for n := 2; n <= len(pods); n++ {
		r.set(t, pods[n-1], scene.Starting)
		r.mustServe(t, pods[:n-1]...)
		r.set(t, pods[n-1], scene.Ready)
		r.mustServe(t, pods[:n]...)
	}
	for len(pods) > 1 {
		r.remove(t, pods[0])
		pods = pods[1:]
		r.mustServe(t, pods...)
	}
	r.end(t)
}

// Each pod of a Service is replaced by a new one, as a Deployment does it: the
// new pod becomes ready, the old one drains, and ends.
func TestRoll(t *testing.T) {
	s := mustTestbed(t)
	serving := append(s.Local()[:2], s.Remote()[0])
	r := mustRollOut(t, s, serving...)
	for range serving {
		before := serving[0]
		after := s.AnotherPod(t, before.Node)
		r.set(t, after, scene.Starting)
		r.set(t, after, scene.Ready)
		r.mustServe(t, append(serving, after)...)

		serving = append(slices.Clone(serving[1:]), after)
		r.set(t, before, scene.Draining)
		r.mustServe(t, serving...)
		r.set(t, before, scene.Ending)
		s.Stop(t, before)
		r.remove(t, before)
		r.mustServe(t, serving...)
	}
	r.end(t)
}

// When all pods of a Service are terminating, those that still serve do so until
// the last: KEP-1669. With none left, clients are refused.
func TestDrainAll(t *testing.T) {
	s := mustTestbed(t)
	first, last := s.Local()[0], s.Remote()[0]
	r := mustRollOut(t, s, first, last)
	r.set(t, first, scene.Draining)
	r.mustServe(t, last)
	r.set(t, last, scene.Draining)
	r.mustServe(t, first, last)
	r.set(t, first, scene.Ending)
	r.mustServe(t, last)
	r.end(t)

	r.remove(t, first)
	r.remove(t, last)
	for _, d := range []scene.Dial{s.Pod.To("tcp", r.v4), s.Node.To("tcp", r.v6), s.Pod.To("udp", r.v6), s.Node.To("udp", r.v4)} {
		scene.MustFail(t, d, scene.Rejected)
	}
	r.set(t, first, scene.Ready)
	r.mustServe(t, first)
}
