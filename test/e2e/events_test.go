package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// algorithmAnnotation names the algorithm of a Service.
const algorithmAnnotation = "sluice-lb.io/algorithm"

// eventTimeout limits waits for an Event, which is written seconds after its cause, and
// much later on a busy machine.
const eventTimeout = 3 * time.Minute

// mustSeeEvent waits until there is an Event about an object, and returns it.
func (s *testbed) mustSeeEvent(t testing.TB, namespace, object, reason, note string) eventsv1.Event {
	t.Helper()
	for deadline := time.Now().Add(eventTimeout); ; time.Sleep(50 * time.Millisecond) {
		events := s.events(t, namespace, object)
		for _, e := range events {
			if e.Reason == reason && strings.Contains(e.Note, note) {
				return e
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("no event %s about %s: %q, but %q", reason, object, note, notes(events))
		}
	}
}

// notes returns the texts of Events.
func notes(events []eventsv1.Event) []string {
	var all []string
	for _, e := range events {
		all = append(all, fmt.Sprintf("%s by %s: %s", e.Reason, e.ReportingInstance, e.Note))
	}

	return all
}

// events returns the agents' Events about an object: the API server repairs allocations
// of ClusterIPs at times, and has Events about Services of its own.
func (s *testbed) events(t testing.TB, namespace, object string) []eventsv1.Event {
	t.Helper()
	list, err := s.Client.EventsV1().Events(namespace).List(t.Context(), metav1.ListOptions{})
	lab.Must(t, err)
	var about []eventsv1.Event
	for _, e := range list.Items {
		if e.Regarding.Name == object && e.ReportingController == kube.ReportingController {
			about = append(about, e)
		}
	}

	return about
}

// mustDescribe waits until `kubectl describe` shows parts of an Event.
func mustDescribe(t testing.TB, c *cluster.Cluster, args []string, parts ...string) {
	t.Helper()
	var shown string
	lab.EventuallyIn(t, eventTimeout, fmt.Sprintf("kubectl describe %v shows %q", args, parts), func() bool {
		shown = c.Kubectl(t, append([]string{"describe"}, args...)...)
		_, events, _ := strings.Cut(shown, "Events:")
		for _, part := range parts {
			if !strings.Contains(events, part) {
				return false
			}
		}

		return true
	})
}

// Events of a Service show what is wrong with it; once, although each
// node's agent sees it.
//
//	bad: an algorithm that there is none, an external IP without a family
//	younger, older: one external IP
func TestServiceEvents(t *testing.T) {
	s := mustTestbed(t)
	kubectl := cluster.Shared(t)
	s.anotherAgent(t)
	s.CreateService(t, "bad", func(svc *corev1.Service) {
		svc.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
		svc.Spec.ExternalIPs = []string{"2001:db8::1"}
	})
	s.ChangeService(t, "bad", func(svc *corev1.Service) { svc.Annotations = map[string]string{algorithmAnnotation: "best"} })
	annotation := s.mustSeeEvent(t, s.Namespace, "bad", "FieldIgnored", algorithmAnnotation)
	if annotation.Type != "Warning" ||
		annotation.Regarding.FieldPath != "metadata.annotations["+algorithmAnnotation+"]" {
		t.Errorf("it is %+v", annotation)
	}
	mustDescribe(t, kubectl, []string{"service", "-n", s.Namespace, "bad"},
		"FieldIgnored", `"best"`, "spec.externalIPs[0]", "2001:db8::1", "sluice")
	mustDescribe(t, kubectl, []string{"service", "-n", s.Namespace, "bad"}, "Warning")

	s.CreateService(t, "older", withExternalIP("198.51.100.9")) // and first by name, should ages not differ
	s.CreateService(t, "younger", withExternalIP("198.51.100.9"))
	s.mustSeeEvent(t, s.Namespace, "younger", "AddressTaken", "198.51.100.9:80/TCP belongs to Service "+s.Namespace+"/older")
	mustDescribe(t, kubectl, []string{"service", "-n", s.Namespace, "younger"}, "AddressTaken", s.Namespace+"/older")
	if events := s.events(t, s.Namespace, "older"); len(events) != 0 {
		t.Errorf("events about older is %q", notes(events))
	}
	if !strings.Contains(kubectl.Kubectl(t, "get", "events", "-n", s.Namespace), "service/younger") {
		t.Error("kubectl get events does not show them")
	}
	if events := s.events(t, s.Namespace, "bad"); len(events) != 2 {
		t.Errorf("%d events about bad, want one for each field, from both agents together: %q", len(events), notes(events))
	}
}

// anotherAgent starts one on node-2.
func (s *testbed) anotherAgent(t testing.TB) {
	t.Helper()
	other := s.Lab.Nodes[1]
	c := cluster.Shared(t)
	c.MustTunnel(t, other.Namespace)
	sluice.MustNode(t, sluice.Config{
		Namespace: other.Namespace, Cgroup: lab.MustCgroup(t, "other"), NodeName: s.NodeName(other), Kubeconfig: c.Kubeconfig(),
	})
}

// A health check node port that another process has is reported on the Service, and
// answered as soon as it is free.
func TestServiceHealthcheckEvent(t *testing.T) {
	s := mustTestbed(t)
	self := s.Lab.Nodes[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(s.Local()...)...)
	port := s.CreateService(t, "web", balancer).Spec.HealthCheckNodePort
	mustAnswer(t, of(s.Node), scene.At(self.IPv4.String(), port), "/", 200)
	s.DeleteService(t, "web")
	mustNotAnswer(t, of(s.Node), scene.At(self.IPv4.String(), port))

	other, err := self.Namespace.Listen("tcp4", scene.At(self.IPv4.String(), port))
	lab.Must(t, err)
	defer other.Close()
	s.CreateService(t, "web", balancer, func(svc *corev1.Service) { svc.Spec.HealthCheckNodePort = port })
	e := s.mustSeeEvent(t, s.Namespace, "web", "FailedToStartServiceHealthcheck", "address already in use")
	if e.Action != "Listen" || e.Type != "Warning" {
		t.Errorf("it is %+v", e)
	}
	mustAnswer(t, of(s.Node), scene.At(self.IPv6.String(), port), "/", 200) // of which it is not true
	lab.Must(t, other.Close())
	mustAnswer(t, of(s.Node), scene.At(self.IPv4.String(), port), "/", 200)
}

// Events of the Node show that an agent has started, and why one has not.
func TestNodeEvents(t *testing.T) {
	s := mustTestbed(t)
	kubectl := cluster.Shared(t)
	node := s.NodeName(s.Lab.Nodes[0])
	started := s.mustSeeEvent(t, "default", node, "Starting", "")
	if started.Type != "Normal" || started.ReportingInstance != "sluice-"+node {
		t.Errorf("it is %+v", started)
	}
	mustDescribe(t, kubectl, []string{"node", node}, "Starting", "Sluice test")

	// Another process has the health check's address: the agent ends, with the reason.
	lab.Must(t, s.Agent.Stop())
	other, err := s.Lab.Nodes[0].Namespace.Listen("tcp4", "127.0.0.1:10256")
	lab.Must(t, err)
	defer other.Close()
	s.Agent.SetArgs("--healthz-bind-address=127.0.0.1:10256", "--bind-address-hard-fail")
	lab.Must(t, s.Agent.Start())
	s.mustSeeEvent(t, "default", node, "FailedToStartProxierHealthcheck", "127.0.0.1:10256")
	lab.EventuallyIn(t, eventTimeout, "the agent ends", func() bool { return strings.Contains(s.Agent.Log(), "address already in use") })
	lab.Must(t, s.Agent.Kill())
}
