package kube

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// ReportingController is how Events name their author.
const ReportingController = "sluice"

// The reasons of Events. Those that kube-proxy has are named as there.
const (
	ReasonStarting        = "Starting"
	ReasonHealthzFailed   = "FailedToStartProxierHealthcheck"
	ReasonMetricsFailed   = "FailedToStartMetricServer"
	ReasonCheckFailed     = "FailedToStartServiceHealthcheck"
	ReasonIgnored         = "FieldIgnored"           // a part of an object is left out
	ReasonAddressTaken    = "AddressTaken"           // another Service has it
	ReasonNotProgrammed   = "FrontendsNotProgrammed" // writes failed, and are tried again
	ReasonHooks           = "HooksNotEffective"
	ReasonHooksBack       = "HooksEffective"
	ReasonUnreached       = "DevicesNotEffective"
	ReasonReached         = "DevicesEffective"
	ReasonPinsMissing     = "PinsMissing"
	ReasonPinsMadeAgain   = "PinsMadeAgain"
	ReasonFeatureMissing  = "KernelFeatureMissing"
	ReasonFlowTableFull   = "FlowTableFull"
	ReasonFlowTableRelief = "FlowTableNotFull"
	ReasonNotTold         = "EventsNotTold" // there were too many
)

// shared says of a reason that the agents of all nodes find the same. They tell
// it once, and not once a node.
func shared(reason string) bool { return reason == ReasonIgnored || reason == ReasonAddressTaken }

// Event is something that somebody who looks at a Service or at the Node should
// know.
type Event struct {
	// Service is what the Event is about; the zero value means this node's Node.
	Service lb.ServiceName
	// Field is the part of the object that it is about; empty is all of it.
	// Events that differ in their note only are taken for one that recurs.
	Field string
	// Normal is what is no reason to worry.
	Normal bool

	Reason string // one of the constants
	Action string // what was being done, a word in camel case
	Note   string // for people
}

const (
	// A cluster may be full of bad objects, and of nodes that see them: so many
	// Events are told at once, then one each interval.
	eventBurst    = 50
	eventInterval = 5 * time.Second
	// missedInterval is how often it is told how many Events were not.
	missedInterval = time.Minute
	// lookupRetry is how long after a failed request for an object the next comes.
	lookupRetry = 10 * time.Second
	// lastWords is how long the end of a Recorder waits for what was recorded.
	lastWords = 3 * time.Second
	// idleTime is how long client-go may take to begin with one.
	idleTime = 250 * time.Millisecond
	// maxNote is what an API server takes.
	maxNote = 1024
)

// RecorderConfig is what a [Recorder] needs.
type RecorderConfig struct {
	Client   kubernetes.Interface
	NodeName string
	// Log gets what could not be told; nil is [slog.Default].
	Log *slog.Logger

	limit, nodeLimit flowcontrol.PassiveRateLimiter // nil: as the constants say
	missedInterval   time.Duration                  // zero: the constant
	lookupRetry      time.Duration                  // zero: the constant
}

// Recorder tells Events to the API server, as far as they are not too many. It
// asks for the objects that they are about: `kubectl describe` goes by their UIDs.
type Recorder struct {
	cfg    RecorderConfig
	queue  chan Event
	missed atomic.Int64 // Events that were too many

	handed int64 // Events that were given to client-go, which sends them to sink
	sink   *eventSink
}

// NewRecorder returns a Recorder that asks for nothing before [Recorder.Run].
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
	if cfg.missedInterval == 0 {
		cfg.missedInterval = missedInterval
	}
	if cfg.lookupRetry == 0 {
		cfg.lookupRetry = lookupRetry
	}

	return &Recorder{
		cfg:   cfg,
		queue: make(chan Event, 2*eventBurst),
		sink:  newEventSink(cfg.Client.EventsV1(), cfg.NodeName),
	}
}

// Record has an Event told. It returns at once, whatever the API server does,
// and may be called from any goroutine. A nil Recorder tells nothing.
func (r *Recorder) Record(e Event) {
	if r == nil {
		return
	}
	limit := r.cfg.limit
	if e.Service == (lb.ServiceName{}) {
		limit = r.cfg.nodeLimit // what many Services say must not drown it
	}
	if !limit.TryAccept() {
		r.missed.Add(1)

		return
	}
	select {
	case r.queue <- e:
	default: // the API server has not answered for long
		r.missed.Add(1)
	}
}

// Run tells what is recorded until ctx ends, and then for a moment what was
// recorded before. It returns nil.
func (r *Recorder) Run(ctx context.Context) error {
	// What is being sent when a context ends is given up. This one ends later.
	sending, stop := context.WithCancel(klog.NewContext(context.WithoutCancel(ctx), logr.FromSlogHandler(r.cfg.Log.Handler())))
	defer stop()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(lastWords, stop) })()
	broadcaster := events.NewBroadcaster(r.sink)
	defer broadcaster.Shutdown()
	if err := broadcaster.StartRecordingToSinkWithContext(sending); err != nil {
		return err
	}
	to := broadcaster.NewRecorder(scheme.Scheme, ReportingController)
	missed := time.NewTicker(r.cfg.missedInterval)
	defer missed.Stop()

	for {
		select {
		case <-ctx.Done():
			r.finish(sending, to)

			return nil
		case e := <-r.queue:
			r.tell(sending, to, e)
		case <-missed.C:
			r.tellMissed(sending, to)
		}
	}
}

// finish tells what is still queued, and waits for it to arrive.
func (r *Recorder) finish(ctx context.Context, to events.EventRecorder) {
	for len(r.queue) > 0 && ctx.Err() == nil {
		r.tell(ctx, to, <-r.queue)
	}
	// Not each of them is sent: one that recurs may only be counted.
	for quiet := time.Now(); time.Since(quiet) < idleTime && ctx.Err() == nil; sleep(ctx, 10*time.Millisecond) {
		switch {
		case r.sink.sent.Load() >= r.handed:
			return
		case r.sink.sending.Load() > 0:
			quiet = time.Now()
		}
	}
}

// tell hands an Event to client-go, which sends it on its own.
func (r *Recorder) tell(ctx context.Context, to events.EventRecorder, e Event) {
	about, ok := r.reference(ctx, e.Service)
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
	r.handed++
	to.Eventf(about, nil, kind, e.Reason, e.Action, "%s", e.Note)
}

// tellMissed says how many Events were too many since it did so last.
func (r *Recorder) tellMissed(ctx context.Context, to events.EventRecorder) {
	n := r.missed.Swap(0)
	if n == 0 {
		return
	}
	r.cfg.Log.Warn("events were too many to be told", "events", n)
	r.tell(ctx, to, Event{
		Reason: ReasonNotTold, Action: "Report",
		Note: fmt.Sprintf("%d events were too many to be told; sluice status shows what they were about", n),
	})
}
