package agent

import (
	"log/slog"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// A bad value is an Event of the Pod or the Namespace that has it.
func TestOptOutProblemsAreEvents(t *testing.T) {
	record, events := recordingEvents()
	m := newModel(Config{NodeName: "node-1", Log: slog.New(slog.DiscardHandler)}, parts{events: record})
	for _, object := range []string{"Pod ns/a", "Namespace mesh"} {
		m.report(object, []lb.Problem{{Object: object, Field: "f", Message: "m"}})
	}
	want := []kube.Event{
		{Pod: types.NamespacedName{Namespace: "ns", Name: "a"}, Field: "f", Reason: "FieldIgnored", Action: "Read", Note: "f: m"},
		{Namespace: "mesh", Field: "f", Reason: "FieldIgnored", Action: "Read", Note: "f: m"},
	}
	if diff := cmp.Diff(want, *events); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A backend that is passed over is an Event of its Service, for each backend.
func TestSuspectsAreEvents(t *testing.T) {
	record, events := recordingEvents()
	port := maps.ServicePortOf("ns", "web", "http", 6, 4)
	record.suspect(port, netip.MustParseAddrPort("10.0.0.1:80"), maps.HealthUnanswered)
	want := []kube.Event{{
		Service: lb.ServiceName{Namespace: "ns", Name: "web"}, Field: "10.0.0.1:80", Reason: "BackendSuspect", Action: "Connect",
		Note: "ns/web:http: backend 10.0.0.1:80 does not answer: new connections from this node go to others",
	}}
	if diff := cmp.Diff(want, *events); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
