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
	"github.com/sluice-lb/sluice/test/sluice"
)

// algorithmAnnotation names the algorithm of a Service.
const algorithmAnnotation = "sluice-lb.io/algorithm"

// eventTimeout limits waits for an Event, which is written seconds after its cause, and
// much later on a busy machine.
const eventTimeout = 3 * time.Minute

// mustSeeEvent waits until there is an Event about an object, and returns it.
func (s *scene) mustSeeEvent(t testing.TB, namespace, object, reason, note string) eventsv1.Event {
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
func (s *scene) events(t testing.TB, namespace, object string) []eventsv1.Event {
	t.Helper()
	list, err := s.client.EventsV1().Events(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
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
	eventuallyIn(t, eventTimeout, fmt.Sprintf("kubectl describe %v shows %q", args, parts), func() bool {
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
	s := mustScene(t)
	kubectl := mustCluster(t)
	s.anotherAgent(t)
	s.createService(t, "bad", func(spec *corev1.ServiceSpec) {
		spec.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
		spec.ExternalIPs = []string{"2001:db8::1"}
	})
	s.changeService(t, "bad", func(svc *corev1.Service) { svc.Annotations = map[string]string{algorithmAnnotation: "best"} })
	annotation := s.mustSeeEvent(t, s.namespace, "bad", "FieldIgnored", algorithmAnnotation)
	if annotation.Type != "Warning" ||
		annotation.Regarding.FieldPath != "metadata.annotations["+algorithmAnnotation+"]" {
		t.Errorf("it is %+v", annotation)
	}
	mustDescribe(t, kubectl, []string{"service", "-n", s.namespace, "bad"},
		"FieldIgnored", `"best"`, "spec.externalIPs[0]", "2001:db8::1", "sluice")
	mustDescribe(t, kubectl, []string{"service", "-n", s.namespace, "bad"}, "Warning")

	s.createService(t, "older", withExternalIP("198.51.100.9")) // and first by name, should ages not differ
	s.createService(t, "younger", withExternalIP("198.51.100.9"))
	s.mustSeeEvent(t, s.namespace, "younger", "AddressTaken", "198.51.100.9:80/TCP belongs to Service "+s.namespace+"/older")
	mustDescribe(t, kubectl, []string{"service", "-n", s.namespace, "younger"}, "AddressTaken", s.namespace+"/older")
	if events := s.events(t, s.namespace, "older"); len(events) != 0 {
		t.Errorf("events about older is %q", notes(events))
	}
	if !strings.Contains(kubectl.Kubectl(t, "get", "events", "-n", s.namespace), "service/younger") {
		t.Error("kubectl get events does not show them")
	}
	if events := s.events(t, s.namespace, "bad"); len(events) != 2 {
		t.Errorf("%d events about bad, want one for each field, from both agents together: %q", len(events), notes(events))
	}
}

// anotherAgent starts one on node-2.
func (s *scene) anotherAgent(t testing.TB) {
	t.Helper()
	other := s.lab.Nodes[1]
	c := mustCluster(t)
	c.MustTunnel(t, other.Namespace)
	sluice.MustNode(t, sluice.Config{
		Namespace: other.Namespace, Cgroup: lab.MustCgroup(t, "other"), NodeName: s.nodeName(other), Kubeconfig: c.Kubeconfig(),
	})
}

// A health check node port that another process has is reported on the Service, and
// answered as soon as it is free.
func TestServiceHealthcheckEvent(t *testing.T) {
	s := mustScene(t)
	self := s.lab.Nodes[0]
	s.setEndpoints(t, "web", readyAll(s.local()...)...)
	port := s.createService(t, "web", balancer).Spec.HealthCheckNodePort
	mustAnswer(t, of(s.node), at(self.IPv4.String(), port), "/", 200)
	s.deleteService(t, "web")
	mustNotAnswer(t, of(s.node), at(self.IPv4.String(), port))

	other, err := self.Namespace.Listen("tcp4", at(self.IPv4.String(), port))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	s.createService(t, "web", balancer, func(spec *corev1.ServiceSpec) { spec.HealthCheckNodePort = port })
	e := s.mustSeeEvent(t, s.namespace, "web", "FailedToStartServiceHealthcheck", "address already in use")
	if e.Action != "Listen" || e.Type != "Warning" {
		t.Errorf("it is %+v", e)
	}
	mustAnswer(t, of(s.node), at(self.IPv6.String(), port), "/", 200) // of which it is not true
	must(t, other.Close())
	mustAnswer(t, of(s.node), at(self.IPv4.String(), port), "/", 200)
}

// Events of the Node show that an agent has started, and why one has not.
func TestNodeEvents(t *testing.T) {
	s := mustScene(t)
	kubectl := mustCluster(t)
	node := s.nodeName(s.lab.Nodes[0])
	started := s.mustSeeEvent(t, "default", node, "Starting", "")
	if started.Type != "Normal" || started.ReportingInstance != "sluice-"+node {
		t.Errorf("it is %+v", started)
	}
	mustDescribe(t, kubectl, []string{"node", node}, "Starting", "Sluice test")

	// Another process has the health check's address: the agent ends, with the reason.
	must(t, s.agent.Stop())
	other, err := s.lab.Nodes[0].Namespace.Listen("tcp4", "127.0.0.1:10256")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	s.agent.SetArgs("--healthz-bind-address=127.0.0.1:10256", "--bind-address-hard-fail")
	must(t, s.agent.Start())
	s.mustSeeEvent(t, "default", node, "FailedToStartProxierHealthcheck", "127.0.0.1:10256")
	eventuallyIn(t, eventTimeout, "the agent ends", func() bool { return strings.Contains(s.agent.Log(), "address already in use") })
	must(t, s.agent.Kill())
}
