package kube

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/lab"
)

// mustRecord starts a Recorder of a node. End ends it, and returns when all Events that were
// recorded have been sent.
func (f *eventAPI) mustRecord(t *testing.T, node string, change ...func(*RecorderConfig)) (r *Recorder, end func()) {
	t.Helper()
	cfg := RecorderConfig{
		Client: f.client(t), NodeName: node, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
		lookupRetry: time.Millisecond,
	}
	for _, c := range change {
		c(&cfg)
	}
	r = NewRecorder(cfg)

	return r, lab.MustRun(t, r.Run)
}

var webName = lb.ServiceName{Namespace: "ns", Name: "web"}

func TestEventHasAllFields(t *testing.T) {
	for _, test := range []struct {
		name  string
		node  string
		event Event
		want  eventsv1.Event
	}{
		{
			"of a Service", "node1",
			Event{Service: webName, Field: "spec.externalIPs[1]", Reason: ReasonIgnored, Action: "Read", Note: "100 % wrong"},
			eventsv1.Event{
				ObjectMeta: metav1.ObjectMeta{Namespace: "ns"},
				Regarding: corev1.ObjectReference{
					APIVersion: "v1", Kind: "Service", Namespace: "ns", Name: "web", UID: "uid-of-web", FieldPath: "spec.externalIPs[1]",
				},
				Type: "Warning", Reason: "FieldIgnored", Action: "Read", Note: "100 % wrong",
			},
		}, {
			"of the Node", "node1",
			Event{Normal: true, Reason: ReasonStarting, Action: "StartSluice"},
			eventsv1.Event{
				ObjectMeta: metav1.ObjectMeta{Namespace: "default"},
				Regarding:  corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: "node1", UID: "uid-of-node1"},
				Type:       "Normal", Reason: "Starting", Action: "StartSluice",
			},
		}, {
			"of a Node that there is not yet", "node2",
			Event{Reason: ReasonHooks, Action: "Check"},
			eventsv1.Event{
				ObjectMeta: metav1.ObjectMeta{Namespace: "default"},
				Regarding:  corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: "node2", UID: "node2"},
				Type:       "Warning", Reason: "HooksNotEffective", Action: "Check",
			},
		},
		{
			"of a Pod", "node1",
			Event{Pod: types.NamespacedName{Namespace: "ns", Name: "a"}, Reason: ReasonIgnored, Action: "Read"},
			eventsv1.Event{
				ObjectMeta: metav1.ObjectMeta{Namespace: "ns"},
				Regarding:  corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: "ns", Name: "a", UID: "uid-of-a"},
				Type:       "Warning", Reason: "FieldIgnored", Action: "Read",
			},
		}, {
			"of a Namespace", "node1",
			Event{Namespace: "mesh", Reason: ReasonIgnored, Action: "Read"},
			eventsv1.Event{
				ObjectMeta: metav1.ObjectMeta{Namespace: "default"},
				Regarding:  corev1.ObjectReference{APIVersion: "v1", Kind: "Namespace", Name: "mesh", UID: "uid-of-mesh"},
				Type:       "Warning", Reason: "FieldIgnored", Action: "Read",
			},
		},
	} {
		t.Run("it is one "+test.name, func(t *testing.T) {
			api := newEventAPI(t)
			r, end := api.mustRecord(t, test.node)
			r.Record(test.event)
			end()
			events := api.stored()
			if len(events) != 1 {
				t.Fatalf("%d events were sent, want 1", len(events))
			}
			got := events[0]
			if got.EventTime.IsZero() || !strings.HasPrefix(got.Name, test.want.Regarding.Name+".") {
				t.Errorf("its name is %q, its time %v", got.Name, got.EventTime)
			}
			want := test.want
			want.ReportingController, want.ReportingInstance = "sluice", "sluice-"+test.node
			got.TypeMeta, got.Name, got.EventTime = metav1.TypeMeta{}, "", metav1.MicroTime{}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestEventOfAServiceThatIsGone(t *testing.T) {
	api := newEventAPI(t)
	r, end := api.mustRecord(t, "node1")
	r.Record(Event{Service: lb.ServiceName{Namespace: "ns", Name: "gone"}, Reason: ReasonNotProgrammed, Action: "Program"})
	r.Record(Event{Service: webName, Reason: ReasonNotProgrammed, Action: "Program"})
	end()
	if events := api.stored(); len(events) != 1 || events[0].Regarding.Name != "web" {
		t.Errorf("the events are %+v, want one of web", events)
	}
}

// Events that every node records are stored once in the cluster, those about one node once
// per node.
func TestEventsOfManyNodes(t *testing.T) {
	for _, test := range []struct {
		reason string
		want   int
	}{{ReasonIgnored, 1}, {ReasonAddressTaken, 1}, {ReasonNotProgrammed, 5}, {ReasonCheckFailed, 5}} {
		t.Run(test.reason, func(t *testing.T) {
			api := newEventAPI(t)
			for i := range 5 {
				r, end := api.mustRecord(t, fmt.Sprint("node", i))
				r.Record(Event{Service: webName, Field: "f", Reason: test.reason, Action: "Read", Note: "wrong"})
				end()
			}
			if creates, _, _ := api.counts(); creates != 5 || len(api.stored()) != test.want {
				t.Errorf("%d events are stored after %d requests, want %d after 5", len(api.stored()), creates, test.want)
			}
		})
	}
}

// Two problems of one Service at the same time are two Events.
func TestEventsOfTwoFields(t *testing.T) {
	api := newEventAPI(t)
	r, end := api.mustRecord(t, "node1")
	for _, field := range []string{"spec.externalIPs[0]", "spec.externalIPs[1]"} {
		r.Record(Event{Service: webName, Field: field, Reason: ReasonIgnored, Action: "Read", Note: "not an address"})
	}
	end()
	if events := api.stored(); len(events) != 2 {
		t.Errorf("%d events were sent, want 2", len(events))
	}
}

// An Event that recurs is counted and not stored again.
func TestEventRecurs(t *testing.T) {
	api := newEventAPI(t)
	r, end := api.mustRecord(t, "node1")
	for range 5 {
		r.Record(Event{Service: webName, Reason: ReasonNotProgrammed, Action: "Program", Note: "full"})
	}
	end()
	events := api.stored()
	if creates, patches, _ := api.counts(); len(events) != 1 || creates > 2 || patches > 2 {
		t.Errorf("%d events are stored after %d and %d requests", len(events), creates, patches)
	}
}

// Of ten thousand bad Services, most Events are dropped, and their number is reported.
func TestEventsAreLimited(t *testing.T) {
	api := newEventAPI(t)
	r, end := api.mustRecord(t, "node1", func(cfg *RecorderConfig) {
		cfg.droppedInterval = 10 * time.Millisecond
	})
	begin := time.Now()
	for i := range 10_000 {
		r.Record(Event{Service: webName, Field: fmt.Sprint("f", i), Reason: ReasonIgnored, Action: "Read", Note: "wrong"})
	}
	r.Record(Event{Reason: ReasonHooks, Action: "Check"}) // has a limit of its own
	summed := 0
	lab.Eventually(t, "the number of dropped events is reported", func() bool {
		for _, e := range api.stored() {
			if e.Reason == ReasonEventsDropped {
				_, _ = fmt.Sscanf(e.Note, "%d events", &summed)
			}
		}

		return summed != 0
	})
	end()
	var hooks, fields int
	for _, e := range api.stored() {
		switch e.Reason {
		case ReasonHooks:
			hooks++
		case ReasonIgnored:
			fields++
		}
	}
	most := eventBurst + 1 + int(time.Since(begin)/eventInterval)
	if fields < eventBurst || fields > most {
		t.Errorf("%d events of Services were sent, want %d to %d", fields, eventBurst, most)
	}
	if hooks != 1 {
		t.Errorf("%d events of the Node were sent, want 1", hooks)
	}
	if summed < 1 || summed > 10_000-eventBurst {
		t.Errorf("%d are reported as dropped", summed)
	}
}

// Recording does not wait for an API server that does not answer.
func TestRecordDoesNotWait(t *testing.T) {
	stuck := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-stuck }))
	defer server.Close()
	defer close(stuck)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL, QPS: -1})
	lab.Must(t, err)
	r := NewRecorder(RecorderConfig{Client: client, NodeName: "node1", limit: flowcontrol.NewFakeAlwaysRateLimiter()})
	lab.MustRun(t, r.Run)
	for range 10_000 { // far more than the queue holds
		r.Record(Event{Service: webName, Reason: ReasonNotProgrammed, Action: "Program"})
	}
	if n := r.dropped.Load(); n < 9_000 {
		t.Errorf("%d were dropped, want nearly all", n)
	}
}

// While the API server fails, Events wait. A server that refuses to list objects gets
// Events without UID.
func TestEventsDespiteErrors(t *testing.T) {
	for _, test := range []struct {
		name string
		err  *apierrors.StatusError
		uid  types.UID
	}{
		{"an API server that is busy for a while", apierrors.NewTooManyRequests("busy", 0), "uid-of-web"},
		{"one that forbids to list", apierrors.NewForbidden(schema.GroupResource{Resource: "services"}, "", nil), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			api := newEventAPI(t)
			failures := 3
			api.refuse = func(r *http.Request) *apierrors.StatusError {
				if r.Method != http.MethodGet || failures == 0 {
					return nil
				}
				failures--

				return test.err
			}
			r, end := api.mustRecord(t, "node1")
			r.Record(Event{Service: webName, Reason: ReasonNotProgrammed, Action: "Program"})
			lab.Eventually(t, "it is sent", func() bool { return len(api.stored()) > 0 })
			end()
			if got := api.stored()[0].Regarding.UID; got != test.uid {
				t.Errorf("its UID is %q, want %q", got, test.uid)
			}
		})
	}
}

func TestLongNoteIsCut(t *testing.T) {
	api := newEventAPI(t)
	r, end := api.mustRecord(t, "node1")
	r.Record(Event{Service: webName, Reason: ReasonNotProgrammed, Action: "Program", Note: strings.Repeat("ä", 600)})
	end()
	events := api.stored()
	if len(events) != 1 {
		t.Fatalf("%d events were sent, want 1", len(events))
	}
	note := events[0].Note
	if len(note) > 1024 || len(note) < 1020 || !utf8.ValidString(note) || !strings.HasSuffix(note, "ä…") {
		t.Errorf("the note is %d bytes: %q", len(note), note)
	}
}

// Without an API server there is no Recorder.
func TestNilRecorder(*testing.T) {
	var r *Recorder
	r.Record(Event{Reason: ReasonStarting})
}
