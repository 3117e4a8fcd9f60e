package agent

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// Actions of Events.
const (
	actionStart   = "StartSluice"
	actionRead    = "Read"
	actionProgram = "Program"
	actionCheck   = "Check"
)

// record records an Event if there is an API server.
func (c *Config) record(e kube.Event) {
	if c.events != nil {
		c.events(e)
	}
}

// eventOf returns the Event for a part of an object that was left out, and false if the
// object is neither a Service nor this Node.
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

	return e, p.Object == "Node "+m.node.Name
}

// impairedInterval is the time between reports of Services that cannot be programmed. Many
// of them are programmed at the second try, and need no report.
const impairedInterval = 5 * time.Second

// impaired are the Services that were reported as not programmed as they should be.
type impaired struct {
	stale  bool                      // a write has failed since
	failed map[lb.ServiceName]string // what failed
	taken  map[lb.ServiceName]string // who has their addresses
}

// reportImpaired records Events for Services that have become impaired, or are for another
// reason.
func (a *agent) reportImpaired() {
	// Endpoints come and go all the time, and there may be thousands of Services.
	if !a.synced || !a.impaired.stale && !a.model.claimsChanged && len(a.impaired.failed) == 0 {
		return
	}
	a.model.claimsChanged = false
	now := impaired{failed: make(map[lb.ServiceName]string), taken: make(map[lb.ServiceName]string)}
	for status := range a.writer.Statuses() {
		if len(status.Failures) > 0 {
			now.failed[status.Service] = failuresText(status.Failures)
		}
		if len(status.Lost) > 0 {
			now.taken[status.Service] = lostText(status.Lost)
		}
	}
	a.recordNew(now.failed, a.impaired.failed, kube.ReasonNotProgrammed)
	a.recordNew(now.taken, a.impaired.taken, kube.ReasonAddressTaken)
	a.impaired = now
}

// recordNew records the notes that are not known, in the order of the Services.
func (a *agent) recordNew(notes, known map[lb.ServiceName]string, reason string) {
	byName := func(x, y lb.ServiceName) int { return strings.Compare(x.String(), y.String()) }
	for _, name := range slices.SortedFunc(maps.Keys(notes), byName) {
		if note := notes[name]; note != known[name] && name != probeService {
			a.cfg.record(kube.Event{Service: name, Reason: reason, Action: actionProgram, Note: note})
		}
	}
}

// spelledOut is how many failures of one Service a note spells out.
const spelledOut = 3

func failuresText(failures []reconcile.Failure) string {
	texts := make([]string, len(failures))
	for i, f := range failures {
		texts[i] = f.Error()
	}

	return listText(texts)
}

// lostText names each address once, whatever the scopes.
func lostText(lost []reconcile.Loss) string {
	var texts []string
	for _, l := range lost {
		f := l.Frontend
		what := fmt.Sprintf("%s/%s", netip.AddrPortFrom(f.Addr, f.Port), f.Protocol)
		switch {
		case f.Addr.IsUnspecified():
			what = fmt.Sprintf("node port %d/%s", f.Port, f.Protocol)
		case f.Port == 0: // of a ClusterIP, the rest
			what = f.Addr.String()
		}
		texts = append(texts, what+" belongs to Service "+l.Owner.String())
	}
	slices.Sort(texts)

	return listText(slices.Compact(texts))
}

func listText(texts []string) string {
	if more := len(texts) - spelledOut; more > 0 {
		return fmt.Sprintf("%s; and %d more", strings.Join(texts[:spelledOut], "; "), more)
	}

	return strings.Join(texts, "; ")
}

// missingFeatures returns what the kernel lacks, each with what that costs.
func missingFeatures(f datapath.Features) []string {
	var missing []string
	for _, feature := range []struct {
		has  bool
		text string
	}{
		{f.SetRetval, "no bpf_set_retval (Linux 6.1): a refused sendto fails with EPERM"},
		{f.NetnsCookie != 0, "no network namespace cookies (Linux 5.14): the node must be in the kernel's first namespace"},
		{f.TCX, "no tcx (Linux 6.6): devices have clsact filters, which others can replace"},
		{f.FIBSource, "no source addresses from bpf_fib_lookup (Linux 6.7): a route's own preferred source is not used to masquerade"},
	} {
		if !feature.has {
			missing = append(missing, feature.text)
		}
	}

	return missing
}

// recordFeatures records an Event that names what the kernel lacks.
func (a *agent) recordFeatures() {
	if missing := missingFeatures(a.datapath.Features()); len(missing) > 0 {
		a.cfg.record(kube.Event{
			Reason: kube.ReasonFeatureMissing, Action: actionStart, Note: strings.Join(missing, "; "),
		})
	}
}

// recordHooks records an Event when hooks stop being effective, or are effective again.
func (c *Config) recordHooks(before, now error) {
	switch {
	case now != nil && (before == nil || before.Error() != now.Error()):
		c.record(kube.Event{Reason: kube.ReasonHooks, Action: actionCheck, Note: "hooks are not effective: " + now.Error()})
	case now == nil && before != nil && before != errNotChecked:
		c.record(kube.Event{Reason: kube.ReasonHooksBack, Action: actionCheck, Normal: true, Note: "hooks are effective again"})
	}
}

// newRecorder returns a recorder of Events, nil if there is no API server.
func newRecorder(cfg *Config) *kube.Recorder {
	if cfg.Manifests != "" || cfg.Client == nil {
		return nil
	}
	r := kube.NewRecorder(kube.RecorderConfig{Client: cfg.Client, NodeName: cfg.NodeName, Log: cfg.Log})
	cfg.events = r.Record

	return r
}

func (a *agent) runEvents(ctx context.Context) error {
	if a.events == nil {
		return nil
	}

	return a.events.Run(ctx)
}

// recordEmergency records an Event when the table of flows is too small, or is no longer.
func (m *flowMonitor) recordEmergency(before, now flow.Status) {
	switch {
	case m.record == nil || (before.Emergency == "") == (now.Emergency == ""):
	case now.Emergency != "":
		m.record(kube.Event{Reason: kube.ReasonFlowTableFull, Action: actionCheck, Note: now.Emergency})
	default:
		m.record(kube.Event{Reason: kube.ReasonFlowTableRelief, Action: actionCheck, Normal: true, Note: "the table of flows has room again"})
	}
}
