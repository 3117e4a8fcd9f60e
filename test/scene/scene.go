package scene

import (
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
)

// Scene is a test's part of a [Stage]: a namespace in the API server, and
// clients of its own in each kind of place. Refusals, affinities and objects of other
// tests do not affect them.
type Scene struct {
	*Stage
	*Objects

	Pod     *Client // in a pod of node-1
	Guest   *Client // in another pod; socket hooks do not see it, as they do not see a virtual machine
	Node    *Client // on node-1, outside of pods
	Outside *Client // on a machine that is no node
}

var shared struct {
	once  sync.Once
	stage *Stage
}

// MustShare returns a scene on the stage that all tests share.
func MustShare(t testing.TB) *Scene {
	t.Helper()
	shared.once.Do(func() {
		cluster.Shared(t) // the first to begin, and the last to end
		shared.stage = mustStage(cluster.Lasting(t), "shared", Config{})
	})
	if shared.stage == nil {
		t.Fatal("there is no stage: see the first test that needed it")
	}

	t.Logf("profile of the nodes: %s", shared.stage.Lab.Profile.Name)

	return shared.stage.mustOpen(t)
}

// MustSet returns a scene on a stage of its own.
func MustSet(t testing.TB, cfg Config) *Scene {
	t.Helper()

	return mustStage(t, namespaceOf(t), cfg).mustOpen(t)
}

var notInNames = regexp.MustCompile(`[^a-z0-9]+`)

// namespaceOf calls a namespace after a test.
func namespaceOf(t testing.TB) string {
	return strings.Trim(notInNames.ReplaceAllString(strings.ToLower(t.Name()), "-"), "-")
}

func (s *Stage) mustOpen(t testing.TB) *Scene {
	t.Helper()
	self := s.Lab.Nodes[0]
	seen, unseen := s.addPod(t, self), s.addPod(t, self)
	v4, v6 := s.mustNewAddresses(t)
	c := &Scene{
		Stage:   s,
		Objects: mustObjects(t, s),
		Pod:     MustClientIn(t, "pod", seen.Namespace, s.Cgroup),
		Guest:   MustClientIn(t, "guest", unseen.Namespace, nil),
		Node:    MustClientIn(t, "node", self.Namespace, s.Cgroup),
		Outside: MustClientIn(t, "outside", s.Lab.Client.Namespace, nil),
	}
	c.Pod.IPv4, c.Pod.IPv6 = seen.IPv4, seen.IPv6
	c.Guest.IPv4, c.Guest.IPv6 = unseen.IPv4, unseen.IPv6
	c.Outside.IPv4, c.Outside.IPv6 = v4, v6
	if s.Agent.PID() != 0 {
		lab.Eventually(t, "packets of pods are seen", func() bool {
			return s.attached(t, seen.Device) && s.attached(t, unseen.Device)
		})
	}

	return c
}

func (s *Stage) attached(t testing.TB, device string) bool {
	t.Helper()
	state, err := s.Agent.Status()
	lab.Must(t, err)

	return slices.ContainsFunc(state.Devices, func(d datapath.DeviceState) bool { return d.Name == device && d.Attached != "" })
}

// Clients are all of them.
func (s *Scene) Clients() []*Client { return []*Client{s.Pod, s.Guest, s.Node, s.Outside} }

// AnotherPod starts a pod that answers.
func (s *Scene) AnotherPod(t testing.TB, node *lab.Node) *lab.Pod {
	t.Helper()
	pod := s.addPod(t, node)
	s.Serve(t, pod)

	return pod
}

// Names are those of pods.
func Names(pods ...*lab.Pod) []string {
	var all []string
	for _, pod := range pods {
		all = append(all, pod.Name)
	}

	return all
}
