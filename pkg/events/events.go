// Package events words what an agent finds as Kubernetes Events, and decides which object each of them
// is about. It does not send them: [kube.Recorder] does.
package events

import (
	"fmt"
	stdmaps "maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/status"
)

// Actions of Events.
const (
	actionStart   = "StartSluice"
	actionRead    = "Read"
	actionProgram = "Program"
	actionCheck   = "Check"
	actionConnect = "Connect"
	actionListen  = "Listen"
)

// Recorder records Events. Nil records none: there is no API server.
type Recorder func(kube.Event)

func (r Recorder) record(e kube.Event) {
	if r != nil {
		r(e)
	}
}

// Start records that an agent has started, and the features that the kernel lacks.
func (r Recorder) Start(version string, missing []string) {
	if len(missing) > 0 {
		r.record(kube.Event{Reason: kube.ReasonFeatureMissing, Action: actionStart, Note: strings.Join(missing, "; ")})
	}
	r.record(kube.Event{Reason: kube.ReasonStarting, Action: actionStart, Normal: true, Note: "Sluice " + version})
}

// Failure records that a server has ended with an error, if it has, and returns the error.
func (r Recorder) Failure(reason string, err error) error {
	if err != nil {
		r.record(kube.Event{Reason: reason, Action: actionStart, Note: err.Error()})
	}

	return err
}

// Problem records a new problem, unless its object is none that an Event can be about. Node is the name of
// this node, of which those are that are its own.
func (r Recorder) Problem(p lb.Problem, node string) {
	if p.Effect != lb.LeftOut {
		r.record(kube.Event{Field: p.Field, Reason: kube.ReasonNotAsConfigured, Action: actionCheck, Note: p.String()})

		return
	}
	e := kube.Event{
		Field: p.Field, Reason: kube.ReasonIgnored, Action: actionRead,
		Note: p.Field + ": " + p.Message,
	}
	if p.Field == "" {
		e.Note = p.Message
	}
	kind, full, _ := strings.Cut(p.Object, " ")
	switch namespace, name, namespaced := strings.Cut(full, "/"); {
	case kind == "Service" && namespaced:
		e.Service.Namespace, e.Service.Name = namespace, name
	case kind == "Pod" && namespaced:
		e.Pod.Namespace, e.Pod.Name = namespace, name
	case kind == "Namespace":
		e.Namespace = full
	case p.Object != "Node "+node:
		return
	}
	r.record(e)
}

// ProblemEnded records that a problem of this node has ended.
func (r Recorder) ProblemEnded(p lb.Problem) {
	what := p.Object
	if p.Field != "" {
		what += ": " + p.Field
	}
	r.record(kube.Event{Field: p.Field, Reason: kube.ReasonAsConfigured, Action: actionCheck, Normal: true, Note: what + " is as it should be again"})
}

// Gone records that a list of the API server lacks many objects that were known.
func (r Recorder) Gone(kind string, gone, known int) {
	r.record(kube.Event{
		Reason: kube.ReasonObjectsGone, Action: actionRead,
		Note: fmt.Sprintf("%d of %d objects of kind %s have gone in one list of the API server, and are not programmed any more", gone, known, kind),
	})
}

// Impaired records which Services have become impaired, or are for another reason than before.
func (r Recorder) Impaired(now, before status.Impaired) {
	r.recordNew(now.Failed, before.Failed, kube.ReasonNotProgrammed)
	r.recordNew(now.Taken, before.Taken, kube.ReasonAddressTaken)
	r.recordNew(now.Takers, before.Takers, kube.ReasonAddressOverlaps)
}

// recordNew records the notes that are not known, in the order of the Services.
func (r Recorder) recordNew(notes, known map[lb.ServiceName]string, reason string) {
	byName := func(x, y lb.ServiceName) int { return strings.Compare(x.String(), y.String()) }
	for _, name := range slices.SortedFunc(stdmaps.Keys(notes), byName) {
		if note := notes[name]; note != known[name] && name != status.ProbeService {
			r.record(kube.Event{Service: name, Reason: reason, Action: actionProgram, Note: note})
		}
	}
}

// CheckFailed records that a node cannot answer at the health check node port of a Service.
func (r Recorder) CheckFailed(service lb.ServiceName, node string, err error) {
	r.record(kube.Event{
		Service: service, Reason: kube.ReasonCheckFailed, Action: actionListen,
		Note: "node " + node + " cannot answer at the health check node port: " + err.Error(),
	})
}

// Suspect records that a backend is passed over.
func (r Recorder) Suspect(port maps.ServicePort, backend netip.AddrPort, cause maps.HealthCause) {
	namespace, name, _ := port.Parts()
	r.record(kube.Event{
		Service: lb.ServiceName{Namespace: namespace, Name: name}, Field: backend.String(),
		Reason: kube.ReasonBackendSuspect, Action: actionConnect,
		Note: fmt.Sprintf("%s: backend %s %s: new connections from this node go to others", port, backend, cause),
	})
}

// Datapath records an event of the datapath.
func (r Recorder) Datapath(e datapath.Event) {
	reason := map[datapath.EventKind]string{
		datapath.HooksNotEffective: kube.ReasonHooks, datapath.HooksEffective: kube.ReasonHooksBack,
		datapath.PinsMissing: kube.ReasonPinsMissing, datapath.PinsMadeAgain: kube.ReasonPinsMadeAgain,
		datapath.DevicesNotEffective: kube.ReasonUnreached, datapath.DevicesEffective: kube.ReasonReached,
		datapath.OtherTakenOver:         kube.ReasonTakenOver,
		datapath.MasqueradePortsLimited: kube.ReasonPortsLimited, datapath.MasqueradePortsExtended: kube.ReasonPortsExtended,
	}[e.Kind]
	r.record(kube.Event{
		Reason: reason, Action: actionCheck, Note: e.Note,
		Normal: e.Kind == datapath.HooksEffective || e.Kind == datapath.DevicesEffective || e.Kind == datapath.MasqueradePortsExtended,
	})
}

// Emergency records that the table of flows is too small, and why, or "" if it is no longer.
func (r Recorder) Emergency(why string) {
	e := kube.Event{Reason: kube.ReasonFlowTableFull, Action: actionCheck, Note: why}
	if why == "" {
		e = kube.Event{Reason: kube.ReasonFlowTableRelief, Action: actionCheck, Normal: true, Note: "the table of flows has room again"}
	}
	r.record(e)
}
