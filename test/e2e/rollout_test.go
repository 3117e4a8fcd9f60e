package e2e

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// rollout is a Service whose endpoints change while clients dial it: 300 new
// connections and 100 UDP flows a second.
//
//	pod-1-0, node-1 ── web:80 ── pods that come and go
type rollout struct {
	*scene
	v4, v6    string
	endpoints []endpoint
	loads     []*load
}

func mustRollOut(t testing.TB, s *scene, first ...*lab.Pod) *rollout {
	t.Helper()
	r := &rollout{scene: s, endpoints: readyAll(first...)}
	s.setEndpoints(t, "web", r.endpoints...)
	web := s.createService(t, "web")
	r.v4, r.v6 = at(web.Spec.ClusterIPs[0], 80), at(web.Spec.ClusterIPs[1], 80)
	r.mustServe(t, first...)
	r.loads = []*load{
		mustDial(t, 100, dial{s.pod, "tcp", r.v4}, dial{s.node, "tcp", r.v4}, dial{s.node, "tcp", r.v6}),
		mustDial(t, 50, dial{s.pod, "udp", r.v6}, dial{s.node, "udp", r.v4}),
	}

	return r
}

// set changes the condition of a pod, or adds it.
func (r *rollout) set(t testing.TB, pod *lab.Pod, is condition) {
	t.Helper()
	i := slices.IndexFunc(r.endpoints, func(e endpoint) bool { return e.pod == pod })
	if i < 0 {
		i = len(r.endpoints)
		r.endpoints = append(r.endpoints, endpoint{pod: pod})
	}
	r.endpoints[i].is = is
	r.setEndpoints(t, "web", r.endpoints...)
}

func (r *rollout) remove(t testing.TB, pod *lab.Pod) {
	t.Helper()
	r.endpoints = slices.DeleteFunc(r.endpoints, func(e endpoint) bool { return e.pod == pod })
	r.setEndpoints(t, "web", r.endpoints...)
}

// mustServe waits until exactly these pods answer, to every client.
func (r *rollout) mustServe(t testing.TB, pods ...*lab.Pod) {
	t.Helper()
	for _, d := range []dial{
		{r.pod, "tcp", r.v4}, {r.pod, "tcp", r.v6}, {r.node, "udp", r.v4}, {r.node, "udp", r.v6},
	} {
		mustReach(t, d, names(pods...)...)
	}
}

// end stops the clients. The test fails if one of them had a failure.
func (r *rollout) end(t testing.TB) {
	t.Helper()
	for _, load := range r.loads {
		load.mustHaveWorked(t)
	}
}

// A Service grows from one backend to five, and shrinks to another one.
func TestScale(t *testing.T) {
	s := mustScene(t)
	pods := s.pods()
	r := mustRollOut(t, s, pods[0])
	for n := 2; n <= len(pods); n++ {
		r.set(t, pods[n-1], starting)
		r.mustServe(t, pods[:n-1]...)
		r.set(t, pods[n-1], ready)
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
// new pod becomes ready, the old one drains, and dies at last.
func TestRoll(t *testing.T) {
	s := mustScene(t)
	serving := s.pods()[:3]
	r := mustRollOut(t, s, serving...)
	for range serving {
		before := serving[0]
		after := s.anotherPod(t, before.Node)
		r.set(t, after, starting)
		r.set(t, after, ready)
		r.mustServe(t, append(serving, after)...)

		serving = append(slices.Clone(serving[1:]), after)
		r.set(t, before, draining)
		r.mustServe(t, serving...)
		r.set(t, before, ending)
		must(t, s.servers[before.Name].Stop())
		r.remove(t, before)
		r.mustServe(t, serving...)
	}
	r.end(t)
}

// When all pods of a Service are terminating, those that still serve do so until
// the last: KEP-1669. With none left, clients are refused.
func TestDrainAll(t *testing.T) {
	s := mustScene(t)
	first, last := s.local()[0], s.remote()[0]
	r := mustRollOut(t, s, first, last)
	r.set(t, first, draining)
	r.mustServe(t, last)
	r.set(t, last, draining)
	r.mustServe(t, first, last)
	r.set(t, first, ending)
	r.mustServe(t, last)
	r.end(t)

	r.remove(t, first)
	r.remove(t, last)
	for _, d := range []dial{{s.pod, "tcp", r.v4}, {s.node, "tcp", r.v6}, {s.pod, "udp", r.v6}, {s.node, "udp", r.v4}} {
		mustFail(t, d, unix.ECONNREFUSED)
	}
	r.set(t, first, ready)
	r.mustServe(t, first)
}
