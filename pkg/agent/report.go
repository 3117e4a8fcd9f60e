package agent

import (
	"fmt"
	stdmaps "maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/pkg/status"
)

// Actions of Events.
const (
	actionStart   = "StartSluice"
	actionRead    = "Read"
	actionProgram = "Program"
	actionCheck   = "Check"
	actionConnect = "Connect"
)

// eventRecorder records Events. Nil records none: there is no API server.
type eventRecorder func(kube.Event)

func (r eventRecorder) record(e kube.Event) {
	if r != nil {
		r(e)
	}
}

// eventOf returns the Event for a part of an object that was left out, and false if the
// object is none of those that an Event can regard.
func (m *model) eventOf(p lb.Problem) (kube.Event, bool) {
	e := kube.Event{
		Field: p.Field, Reason: kube.ReasonIgnored, Action: actionRead,
		Note: p.Field + ": " + p.Message,
	}
	if p.Field == "" {
		e.Note = p.Message
	}
	if name, ok := strings.CutPrefix(p.Object, "Service "); ok {
		e.Service.Namespace, e.Service.Name, ok = strings.Cut(name, "/")

		return e, ok
	}
	if name, ok := strings.CutPrefix(p.Object, "Pod "); ok {
		e.Pod.Namespace, e.Pod.Name, ok = strings.Cut(name, "/")

		return e, ok
	}
	if name, ok := strings.CutPrefix(p.Object, "Namespace "); ok {
		e.Namespace = name

		return e, true
	}

	return e, p.Object == "Node "+m.node.Name
}

// impairedInterval is the time between reports of Services that cannot be programmed. Many
// of them are programmed at the second try, and need no report.
const impairedInterval = 5 * time.Second

// reportImpaired records Events for Services that have become impaired, or are for another
// reason.
func (a *agent) reportImpaired() {
	// Endpoints come and go all the time, and there may be thousands of Services.
	if !a.synced || !a.newlyFailed && !a.model.claimsChanged && len(a.impaired.Failed) == 0 {
		return
	}
	a.newlyFailed, a.model.claimsChanged = false, false
	now := status.ImpairedOf(a.writer.Statuses())
	a.recordNew(now.Failed, a.impaired.Failed, kube.ReasonNotProgrammed)
	a.recordNew(now.Taken, a.impaired.Taken, kube.ReasonAddressTaken)
	a.impaired = now
}

// recordNew records the notes that are not known, in the order of the Services.
func (a *agent) recordNew(notes, known map[lb.ServiceName]string, reason string) {
	byName := func(x, y lb.ServiceName) int { return strings.Compare(x.String(), y.String()) }
	for _, name := range slices.SortedFunc(stdmaps.Keys(notes), byName) {
		if note := notes[name]; note != known[name] && name != status.ProbeService {
			a.events.record(kube.Event{Service: name, Reason: reason, Action: actionProgram, Note: note})
		}
	}
}

// suspect records that a backend is passed over.
func (r eventRecorder) suspect(port maps.ServicePort, backend netip.AddrPort, cause maps.HealthCause) {
	namespace, name, _ := port.Parts()
	r.record(kube.Event{
		Service: lb.ServiceName{Namespace: namespace, Name: name}, Field: backend.String(),
		Reason: kube.ReasonBackendSuspect, Action: actionConnect,
		Note: fmt.Sprintf("%s: backend %s %s: new connections from this node go to others", port, backend, cause),
	})
}

// datapath records an event of the datapath.
func (r eventRecorder) datapath(e datapath.Event) {
	reason := map[datapath.EventKind]string{
		datapath.HooksNotEffective: kube.ReasonHooks, datapath.HooksEffective: kube.ReasonHooksBack,
		datapath.PinsMissing: kube.ReasonPinsMissing, datapath.PinsMadeAgain: kube.ReasonPinsMadeAgain,
		datapath.DevicesNotEffective: kube.ReasonUnreached, datapath.DevicesEffective: kube.ReasonReached,
	}[e.Kind]
	r.record(kube.Event{
		Reason: reason, Action: actionCheck, Note: e.Note,
		Normal: e.Kind == datapath.HooksEffective || e.Kind == datapath.DevicesEffective,
	})
}

// emergency records an Event when the table of flows is too small, or is no longer.
func (r eventRecorder) emergency(why string) {
	e := kube.Event{Reason: kube.ReasonFlowTableFull, Action: actionCheck, Note: why}
	if why == "" {
		e = kube.Event{Reason: kube.ReasonFlowTableRelief, Action: actionCheck, Normal: true, Note: "the table of flows has room again"}
	}
	r.record(e)
}

// failure records an Event if a server has ended with an error, and returns the error.
func (r eventRecorder) failure(reason string, err error) error {
	if err != nil {
		r.record(kube.Event{Reason: reason, Action: actionStart, Note: err.Error()})
	}

	return err
}

// newRecorder returns a recorder of Events, nil if there is no API server.
func newRecorder(cfg Config) *kube.Recorder {
	if cfg.Manifests != "" || cfg.Client == nil {
		return nil
	}

	return kube.NewRecorder(kube.RecorderConfig{Client: cfg.Client, NodeName: cfg.NodeName, Log: cfg.Log})
}

// status returns the fields of a [status.Status] that the model and the writer have. The caller
// has the turn.
func (a *agent) status() status.Status {
	s := status.Status{
		Version:      a.cfg.Version,
		Node:         a.cfg.NodeName,
		Source:       a.cfg.APIServer,
		Synced:       a.synced,
		CgroupRoot:   a.cfg.Datapath.CgroupRoot,
		BPFRoot:      a.cfg.Datapath.BPFRoot,
		ThroughStack: "the devices are not known yet",
		Services:     a.model.state.Len(),
		Writes:       make(map[string]uint64),
		Problems:     a.model.allProblems(),
		Errors:       status.ErrorsOf(a.writer.Statuses()),
	}
	for _, pod := range a.model.optOuts.List() {
		s.OptedOut = append(s.OptedOut, status.OptedOutPod{Pod: pod.Namespace + "/" + pod.Name, UID: pod.UID})
	}
	if a.throughStack != nil {
		s.ThroughStack = *a.throughStack
	}
	if a.cfg.Manifests != "" {
		s.Source = "manifests in " + a.cfg.Manifests
	}
	for name, w := range a.writer.Counters().Writes {
		s.Writes[name] = w.Puts + w.Deletes
	}

	return s
}

// services returns a copy of what is known of Services. The caller has the turn.
func (a *agent) services() status.Model {
	m := status.Model{
		Snapshots: slices.Collect(a.model.state.Snapshots()),
		Resolve:   a.resolved,
		Problems:  stdmaps.Clone(a.model.problems),
		Errors:    status.ErrorsOf(a.writer.Statuses()),
		Owners:    map[lb.FrontendKey]lb.ServiceName{},
	}
	for s := range a.writer.Statuses() {
		for _, l := range s.Lost {
			m.Owners[l.Frontend] = l.Owner
		}
	}

	return m
}

// modelStats returns the metrics of the model and the writer. The caller has the turn.
func (a *agent) modelStats() metrics.Node {
	counters := a.writer.Counters()
	n := metrics.Node{
		Synced:   a.synced,
		Services: a.model.state.Len(),
		Failed:   len(a.impaired.Failed),
		Taken:    len(a.impaired.Taken),
		Writes:   counters.Writes,
		Fills:    counters.Fill,
	}
	for _, problems := range a.model.problems {
		n.Problems += len(problems)
	}

	return n
}
