package events

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// mustRecord compares the Events that do records with want.
func mustRecord(t *testing.T, do func(Recorder), want ...kube.Event) {
	t.Helper()
	var got []kube.Event
	do(func(e kube.Event) { got = append(got, e) })
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A part that is left out is an Event of the object that has it, if that is a Service, a Pod, a Namespace
// or this node.
func TestProblemObjects(t *testing.T) {
	mustRecord(t, func(r Recorder) {
		for _, object := range []string{
			"Service ns/web", "Pod ns/a", "Namespace mesh", "Node node-1",
			"EndpointSlice ns/web-1", "/etc/manifests/a.yaml", "API server", "Node other", "Service", "Pod x",
		} {
			r.Problem(lb.Problem{Object: object, Field: "f", Message: "m"}, "node-1")
		}
	},
		kube.Event{Service: lb.ServiceName{Namespace: "ns", Name: "web"}, Field: "f", Reason: "FieldIgnored", Action: "Read", Note: "f: m"},
		kube.Event{Pod: types.NamespacedName{Namespace: "ns", Name: "a"}, Field: "f", Reason: "FieldIgnored", Action: "Read", Note: "f: m"},
		kube.Event{Namespace: "mesh", Field: "f", Reason: "FieldIgnored", Action: "Read", Note: "f: m"},
		kube.Event{Field: "f", Reason: "FieldIgnored", Action: "Read", Note: "f: m"},
	)
}

// A backend that is passed over is an Event of its Service, for each backend.
func TestSuspectsAreEvents(t *testing.T) {
	port := maps.ServicePortOf("ns", "web", "http", 6, 4)
	mustRecord(t, func(r Recorder) { r.Suspect(port, netip.MustParseAddrPort("10.0.0.1:80"), maps.HealthUnanswered) }, kube.Event{
		Service: lb.ServiceName{Namespace: "ns", Name: "web"}, Field: "10.0.0.1:80", Reason: "BackendSuspect", Action: "Connect",
		Note: "ns/web:http: backend 10.0.0.1:80 does not answer: new connections from this node go to others",
	})
}

func TestGoneObjectsAreAnEvent(t *testing.T) {
	mustRecord(t, func(r Recorder) { r.Gone("Service", 12, 20) }, kube.Event{
		Reason: "ObjectsGone", Action: "Read",
		Note: "12 of 20 objects of kind Service have gone in one list of the API server, and are not programmed any more",
	})
}

func TestFlowTableEvents(t *testing.T) {
	mustRecord(t, func(r Recorder) { r.Emergency("full"); r.Emergency("") },
		kube.Event{Reason: "FlowTableFull", Action: "Check", Note: "full"},
		kube.Event{Reason: "FlowTableNotFull", Action: "Check", Normal: true, Note: "the table of flows has room again"},
	)
}

// Without an API server, nothing is recorded.
func TestNilRecorder(*testing.T) {
	Recorder(nil).Start("v1", []string{"tcx"})
	Recorder((*kube.Recorder)(nil).Record).Start("v1", nil)
}
