package kube

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// ReportingController is the reporting controller of all Events.
const ReportingController = "sluice"

// The reasons of Events. Those that kube-proxy has too are named as there.
const (
	ReasonStarting        = "Starting"
	ReasonHealthzFailed   = "FailedToStartProxierHealthcheck"
	ReasonMetricsFailed   = "FailedToStartMetricServer"
	ReasonCheckFailed     = "FailedToStartServiceHealthcheck"
	ReasonIgnored         = "FieldIgnored"        // a part of an object is left out
	ReasonNotAsConfigured = "NodeNotAsConfigured" // the configuration names what is not there, or cannot be used
	ReasonAsConfigured    = "NodeAsConfigured"
	ReasonObjectsGone     = "ObjectsGone"            // at least half of a kind, in one list
	ReasonAddressTaken    = "AddressTaken"           // another Service has it
	ReasonAddressOverlaps = "AddressOverlaps"        // it precedes a node port, or is at the ClusterIP, of another Service
	ReasonNotProgrammed   = "FrontendsNotProgrammed" // writes failed, and are tried again
	ReasonHooks           = "HooksNotEffective"
	ReasonHooksBack       = "HooksEffective"
	ReasonUnreached       = "DevicesNotEffective"
	ReasonReached         = "DevicesEffective"
	ReasonPortsLimited    = "MasqueradePortsLimited"
	ReasonPortsExtended   = "MasqueradePortsExtended"
	ReasonPinsMissing     = "PinsMissing"
	ReasonPinsMadeAgain   = "PinsMadeAgain"
	ReasonTakenOver       = "OtherSluiceTakenOver" // its programs acted on this node
	ReasonBackendSuspect  = "BackendSuspect"       // it does not answer clients of this node
	ReasonFeatureMissing  = "KernelFeatureMissing"
	ReasonFlowTableFull   = "FlowTableFull"
	ReasonFlowTableRelief = "FlowTableNotFull"
	ReasonEventsDropped   = "EventsDropped" // there were too many
)

// shared reports whether the agents of all nodes record the same Events with a reason. Then
// the cluster gets one Event instead of one per node.
func shared(reason string) bool {
	return reason == ReasonIgnored || reason == ReasonAddressTaken || reason == ReasonAddressOverlaps
}

// Event is an Event about one of these objects or, if all are zero, about this node's Node.
type Event struct {
	Service   lb.ServiceName
	Pod       types.NamespacedName
	Namespace string
	// Field is the part of the object that it regards; empty means all of it.
	// Events that differ only in their note are one Event that recurs.
	Field string
	// Normal is the type of the Event: Normal if set, Warning otherwise.
	Normal bool

	Reason string // one of the constants
	Action string // the action that failed or succeeded, in camel case
	Note   string // the message for people
}

const (
	// A cluster may have many bad objects, and many nodes that see them. So at most
	// eventBurst Events are sent at once, then one per interval.
	eventBurst    = 50
	eventInterval = 5 * time.Second
	// droppedInterval is how often the number of dropped Events is reported.
	droppedInterval = time.Minute
	// lookupRetry is the time between a failed request for an object and the next one.
	lookupRetry = 10 * time.Second
	// flushTimeout is how long the end of a Recorder waits until its Events are sent.
	flushTimeout = 3 * time.Second
	// idleTimeout is how long client-go may take to begin to send an Event.
	idleTimeout = 250 * time.Millisecond
	// maxNote is the length of the longest note that an API server accepts.
	maxNote = 1024
)

// RecorderConfig is what a [Recorder] needs.
type RecorderConfig struct {
	Client   kubernetes.Interface
	NodeName string
	// Log is for Events that could not be sent; nil is [slog.Default].
	Log *slog.Logger

	limit, nodeLimit flowcontrol.PassiveRateLimiter // nil: as the constants define
	droppedInterval  time.Duration                  // zero: the constant
	lookupRetry      time.Duration                  // zero: the constant
}

// Recorder sends Events to the API server, and drops those above its limits. It looks up
// the UIDs of the objects that they regard, by which `kubectl describe` finds Events.
type Recorder struct {
	cfg     RecorderConfig
	queue   chan Event
	dropped atomic.Int64 // Events above the limits

	passed int64 // Events that were passed to client-go, which sends them to sink
	sink   *eventSink
}

// NewRecorder returns a Recorder that sends no requests before [Recorder.Run].
func NewRecorder(cfg RecorderConfig) *Recorder {
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	perSecond := float32(1 / eventInterval.Seconds())
	if cfg.limit == nil {
		cfg.limit = flowcontrol.NewTokenBucketPassiveRateLimiter(perSecond, eventBurst)
	}
	if cfg.nodeLimit == nil {
		cfg.nodeLimit = flowcontrol.NewTokenBucketPassiveRateLimiter(perSecond, eventBurst)
	}
	cfg.droppedInterval = cmp.Or(cfg.droppedInterval, droppedInterval)
	cfg.lookupRetry = cmp.Or(cfg.lookupRetry, lookupRetry)

	return &Recorder{
		cfg:   cfg,
		queue: make(chan Event, 2*eventBurst),
		sink: &eventSink{
			EventSinkImpl: events.EventSinkImpl{Interface: cfg.Client.EventsV1()},
			instance:      ReportingController + "-" + cfg.NodeName,
		},
	}
}

// Record queues an Event for sending. It never blocks, and may be called from any
// goroutine. A nil Recorder drops all Events.
func (r *Recorder) Record(e Event) {
	if r == nil {
		return
	}
	limit := r.cfg.limit
	if e.regardsNode() {
		limit = r.cfg.nodeLimit // Events about many Services must not use up that of the Node
	}
	if !limit.TryAccept() {
		r.dropped.Add(1)

		return
	}
	select {
	case r.queue <- e:
	default: // the API server has not answered for a long time
		r.dropped.Add(1)
	}
}

// Run sends the recorded Events until ctx ends, and then those that are still queued, for at
// most flushTimeout. It returns nil.
func (r *Recorder) Run(ctx context.Context) error {
	// client-go gives up an Event when its context ends. This one ends later than ctx.
	sending, stop := context.WithCancel(klog.NewContext(context.WithoutCancel(ctx), logr.FromSlogHandler(r.cfg.Log.Handler())))
	defer stop()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(flushTimeout, stop) })()
	broadcaster := events.NewBroadcaster(r.sink)
	defer broadcaster.Shutdown()
	if err := broadcaster.StartRecordingToSinkWithContext(sending); err != nil {
		return err
	}
	to := broadcaster.NewRecorder(scheme.Scheme, ReportingController)
	dropped := time.NewTicker(r.cfg.droppedInterval)
	defer dropped.Stop()

	for {
		select {
		case <-ctx.Done():
			r.finish(sending, to)

			return nil
		case e := <-r.queue:
			r.send(sending, to, e)
		case <-dropped.C:
			if n := r.dropped.Swap(0); n > 0 {
				r.cfg.Log.Warn("events were dropped because there were too many", "events", n)
				note := fmt.Sprintf("%d events were dropped because there were too many; sluice status shows all problems", n)
				r.send(sending, to, Event{Reason: ReasonEventsDropped, Action: "Report", Note: note})
			}
		}
	}
}

// finish sends the Events that are still queued, and waits until client-go has sent them.
func (r *Recorder) finish(ctx context.Context, to events.EventRecorder) {
	for len(r.queue) > 0 && ctx.Err() == nil {
		r.send(ctx, to, <-r.queue)
	}
	// The counts may never be equal, because client-go may only count an Event that recurs.
	for quiet := time.Now(); time.Since(quiet) < idleTimeout && ctx.Err() == nil; sleep(ctx, 10*time.Millisecond) {
		switch {
		case r.sink.sent.Load() >= r.passed:
			return
		case r.sink.sending.Load() > 0:
			quiet = time.Now()
		}
	}
}

// send passes an Event to client-go, which sends it in another goroutine.
func (r *Recorder) send(ctx context.Context, to events.EventRecorder, e Event) {
	about, ok := r.reference(ctx, e)
	if !ok {
		return
	}
	about.FieldPath = e.Field
	kind := corev1.EventTypeWarning
	if e.Normal {
		kind = corev1.EventTypeNormal
	}
	if len(e.Note) > maxNote {
		e.Note = strings.ToValidUTF8(e.Note[:maxNote-len("…")], "") + "…"
	}
	r.passed++
	to.Eventf(about, nil, kind, e.Reason, e.Action, "%s", e.Note)
}

// regardsNode reports whether the Event is about this node's Node.
func (e Event) regardsNode() bool {
	return e.Service == lb.ServiceName{} && e.Pod == types.NamespacedName{} && e.Namespace == ""
}

// reference returns the reference of an Event to its object. It returns false if the object,
// other than the Node, is gone. It sends requests until one is answered, and lists objects,
// because the RBAC rules of kube-proxy grant that and not to get them.
func (r *Recorder) reference(ctx context.Context, e Event) (*corev1.ObjectReference, bool) {
	about := &corev1.ObjectReference{APIVersion: "v1"}
	core := r.cfg.Client.CoreV1()
	var lists cache.ListWithContextFunc
	switch {
	case e.Service != lb.ServiceName{}:
		about.Kind, about.Namespace, about.Name = "Service", e.Service.Namespace, e.Service.Name
		lists = listOf(core.Services(about.Namespace).List)
	case e.Pod != types.NamespacedName{}:
		about.Kind, about.Namespace, about.Name = "Pod", e.Pod.Namespace, e.Pod.Name
		lists = listOf(core.Pods(about.Namespace).List)
	case e.Namespace != "":
		about.Kind, about.Name = "Namespace", e.Namespace
		lists = listOf(core.Namespaces().List)
	default:
		about.Kind, about.Name = "Node", r.cfg.NodeName
		about.UID = types.UID(about.Name) // the kubelet uses the name, too, as long as there is no Node
		lists = listOf(core.Nodes().List)
	}
	var options metav1.ListOptions
	selectNode(about.Name)(&options)
	for ; ; sleep(ctx, r.cfg.lookupRetry) {
		list, err := lists(ctx, options)
		switch {
		case err == nil:
			exists := false
			_ = meta.EachListItem(list, func(obj runtime.Object) error {
				if uid := obj.(metav1.Object).GetUID(); uid != "" {
					about.UID, exists = uid, true
				}
				return nil
			})
			return about, exists || e.regardsNode()
		case ctx.Err() != nil:
			return nil, false
		case refused(err):
			return about, true // an Event without a UID is better than none
		}
	}
}

// eventSink sends the Events that client-go has aggregated. An Event that the agents of all
// nodes record gets a name that is a hash of its content, so that the API server accepts
// the first one and refuses the others as duplicates.
type eventSink struct {
	events.EventSinkImpl
	instance string // identifies this agent among those of all nodes

	sending atomic.Int64 // requests in progress
	sent    atomic.Int64 // requests that have ended, refused ones included
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
