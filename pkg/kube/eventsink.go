package kube

import (
	"context"
	"fmt"
	"hash/fnv"
	"sync/atomic"

	eventsv1 "k8s.io/api/events/v1"
	typedeventsv1 "k8s.io/client-go/kubernetes/typed/events/v1"
	"k8s.io/client-go/tools/events"
)

// eventSink sends the Events that client-go has aggregated. An Event that the agents of all
// nodes record gets a name that is a hash of its content, so that the API server accepts
// the first one and refuses the others as duplicates.
type eventSink struct {
	events.EventSinkImpl
	instance string // identifies this agent among those of all nodes

	sending atomic.Int64 // requests in progress
	sent    atomic.Int64 // requests that have ended, refused ones included
}

func newEventSink(client typedeventsv1.EventsV1Interface, nodeName string) *eventSink {
	return &eventSink{
		EventSinkImpl: events.EventSinkImpl{Interface: client},
		instance:      ReportingController + "-" + nodeName,
	}
}

// Create implements [events.EventSink].
func (s *eventSink) Create(ctx context.Context, event *eventsv1.Event) (*eventsv1.Event, error) {
	return s.send(event, func() (*eventsv1.Event, error) { return s.EventSinkImpl.Create(ctx, event) })
}

// Patch implements [events.EventSink].
func (s *eventSink) Patch(ctx context.Context, event *eventsv1.Event, patch []byte) (*eventsv1.Event, error) {
	return s.send(event, func() (*eventsv1.Event, error) { return s.EventSinkImpl.Patch(ctx, event, patch) })
}

func (s *eventSink) send(event *eventsv1.Event, send func() (*eventsv1.Event, error)) (*eventsv1.Event, error) {
	s.sending.Add(1)
	defer s.sending.Add(-1)
	defer s.sent.Add(1)
	event.ReportingInstance = s.instance
	if shared(event.Reason) {
		about := &event.Regarding
		hash := fnv.New64a()
		fmt.Fprintf(hash, "%s\n%s\n%s\n%s", about.UID, event.Reason, about.FieldPath, event.Note)
		event.Name = fmt.Sprintf("%s.%016x", about.Name, hash.Sum64())
	}

	return send()
}
