package agent

import (
	"errors"
	"fmt"
	stdmaps "maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/pkg/status"
)

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
	a.events.Impaired(now, a.impaired)
	a.impaired = now
}

// reportServer returns what reports whether the server at an address listens. Field is the one of the address.
func (a *agent) reportServer(field string, address netip.AddrPort) func(error) {
	return func(err error) {
		var problems []lb.Problem
		if errors.Is(err, unix.EADDRINUSE) && a.cfg.KubeProxyListens != nil && a.cfg.KubeProxyListens(address) {
			err = nil // until it is stopped
		}
		if err != nil {
			p := lb.Problem{
				Object: lb.Configuration, Field: field, Value: address.String(), Message: fmt.Sprintf("nothing answers there: %v", err),
				Remedy: "Set an address and a port on which the agent may listen", Effect: lb.Degraded,
			}
			switch {
			case errors.Is(err, unix.EADDRINUSE):
				p.Remedy = fmt.Sprintf("Another program listens there, which ss -ltnp 'sport = :%d' shows: end it, or set another port", address.Port())
			case errors.Is(err, unix.EADDRNOTAVAIL):
				p.Remedy = "No device of this node has the address: set one of this node, or 0.0.0.0"
			}
			problems = []lb.Problem{p}
		}
		a.queue.Enqueue(func(m *model) { m.report(field, problems) })
	}
}

// status returns the fields of a [status.Status] that the model and the writer have. The caller
// has the turn.
func (a *agent) status() status.Status {
	s := status.Status{
		Version:      a.cfg.Version,
		Node:         a.cfg.NodeName,
		Source:       a.cfg.APIServer,
		Ignored:      a.cfg.Ignored,
		Synced:       a.synced,
		CgroupRoot:   a.cfg.Datapath.CgroupRoot,
		BPFRoot:      a.cfg.Datapath.BPFRoot,
		ThroughStack: "the devices are not known yet",
		Services:     a.model.state.Len(),
		Writes:       make(map[string]uint64),
		Problems:     []lb.Problem{},
		Errors:       status.ErrorsOf(a.writer.Statuses()),
	}
	for _, source := range slices.Sorted(stdmaps.Keys(a.model.problems)) {
		s.Problems = append(s.Problems, a.model.problems[source]...)
	}
	s.Limits = a.model.limits()
	for _, pod := range a.model.optOuts.List() {
		s.OptedOut = append(s.OptedOut, status.OptedOutPod{Pod: pod.Namespace + "/" + pod.Name, UID: pod.UID})
	}
	if a.stackReason != nil {
		s.ThroughStack = *a.stackReason
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
	m := status.NewModel(a.writer.Statuses())
	m.Snapshots, m.Resolve, m.Problems = slices.Collect(a.model.state.Snapshots()), a.resolve.Resolve, stdmaps.Clone(a.model.problems)
	m.Own = a.probe

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
		for _, p := range problems {
			if p.Effect == lb.LeftOut {
				n.Problems++
			} else {
				n.OfNode++
			}
		}
	}
	if a.cfg.LogLost != nil {
		n.LogLost = a.cfg.LogLost()
	}

	return n
}
