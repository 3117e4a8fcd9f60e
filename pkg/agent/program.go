package agent

import (
	"log/slog"
	stdmaps "maps"
	"slices"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/decision"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
)

// processQueue applies the queued changes to the model, and programs what follows from them.
func (a *agent) processQueue() {
	a.queue.Apply(a.model)
	if a.synced {
		a.measure(metrics.Round{}, a.program)
		a.endComparison()
	} else {
		a.programNode()
	}
}

// decidedAtOnce is about how many decisions exist at a time: a decision takes more memory than
// the Service it is made from, and than what is kept once it is written.
const decidedAtOnce = 1000

// program updates the maps to the model. Until the first synchronization is complete, it
// writes each chunk of decisions before it makes the next one.
func (a *agent) program() {
	touched := append(a.model.state.Touched(), a.model.readAgain...)
	a.model.readAgain = nil
	if !a.complete {
		a.reserveFor(touched)
	}
	for names := range slices.Chunk(touched, decidedAtOnce) {
		room := a.writer.Room().Plus(a.decideOn(names))
		if !a.complete {
			a.reserve(room)
			a.applyAll()
			collectBySize(startGC)
		}
	}
	a.startHeavy()
	if !a.programNode() && len(touched) > 0 {
		a.apply()
	}
	a.programServiceCIDRs()
}

// decideOn decides about Services, hands the decisions to the writer, and returns how much
// room they take. Heavy Services are decided later.
func (a *agent) decideOn(names []lb.ServiceName) (room maps.Room) {
	var changed []lb.Snapshot
	size := 0
	for _, name := range names {
		s, exists := a.model.state.Snapshot(name)
		switch {
		case !exists && a.model.isUnread(name) && a.writer.Adopted(name): // it is there, and keeps what it has
		case !exists:
			a.heavy.Forget(name)
			a.retire(name)
		case !a.heavy.Add(s, size):
			changed = append(changed, s)
			size += s.Size()
		}
	}
	decisions := a.resolve.DecideAll(changed)
	for i, s := range changed {
		room = room.Plus(a.writer.RoomOf(decisions[i].Planned))
		a.enforce(s.Service, decisions[i])
	}

	return room
}

// programServiceCIDRs programs changed ServiceCIDRs once all else is written, because packets
// to an address in them that has no frontend are dropped.
func (a *agent) programServiceCIDRs() {
	if !a.model.serviceCIDRsChanged || a.writer.Due() {
		return
	}
	a.model.serviceCIDRsChanged = false
	a.writer.SetServiceCIDRs(a.model.serviceCIDRs, slices.Concat(slices.Collect(stdmaps.Values(a.model.others))...))
	a.apply()
}

// programNode updates the maps to what is known of the node: its addresses, its devices, and
// the ranges of its pods. That needs no API server. If anything has changed, it writes all
// that is due and returns true.
func (a *agent) programNode() bool {
	changed := false
	here := a.model.here
	if addrs, ok := here.NewAddrs(); ok {
		a.writer.SetNodeAddrs(addrs)
		a.model.claimsChanged = true // the number of a node port may be another Service's there
		if checked, known := here.CheckAddrs(); known {
			a.checks.PlanAddresses(checked)
		}
		changed = true
	}
	if cidrs, ok := here.NewLocalCIDRs(); ok {
		a.writer.SetLocalCIDRs(cidrs)
		changed = true
	}
	if uids, ok := a.model.optOuts.Changed(); ok {
		a.writer.SetOptedOut(uids)
		changed = true
	}
	if unmet, ok := here.NewUnmet(); ok {
		a.model.report("the configuration of this node", unmet)
	}
	decisions, devices, redecided := here.NewDecisions()
	if redecided {
		why := here.ThroughStack()
		if a.stackReason == nil || *a.stackReason != why {
			a.cfg.Log.Info("forwarding to backends on other nodes", "stack", why != "", "because", why)
		}
		a.stackReason = &why
		a.writer.SetDevices(devices)
		changed = true
	}
	if changed {
		a.apply()
	}
	if redecided {
		a.setDevices(decisions)
	}

	return changed
}

// apply writes one slice of what is due. If backends or frontends have gone, it starts the
// search for their UDP sockets and flows.
func (a *agent) apply() {
	a.slices++
	if err := a.writer.Apply(); err != nil {
		a.unprogrammed.log(a.cfg.Log, slog.LevelError, "not everything is programmed", err)
		a.failing, a.unwritten, a.newlyFailed = true, true, true
	}
	a.written.Store(a.writer.Written())
	if gone := a.writer.Gone(); a.complete && len(gone.Backends)+len(gone.Frontends) > 0 {
		a.endStale()
	}
}

// applyAll writes until nothing is due.
func (a *agent) applyAll() {
	for a.apply(); a.writer.Due(); {
		a.apply()
	}
}

// reserve makes room in the maps for decisions.
func (a *agent) reserve(room maps.Room) {
	if err := a.writer.Reserve(room); err != nil {
		// The writer reports each Service whose writes fail for lack of room.
		a.roomless.log(a.cfg.Log, slog.LevelWarn, "the maps have no room for all Services", err)
	}
}

// reserveFor makes room for about all that the Services of the start need. An array that
// grows in many steps would end up larger than needed.
func (a *agent) reserveFor(names []lb.ServiceName) {
	frontends, ports, endpoints := 1, 1, 1
	for _, name := range names {
		if s, exists := a.model.state.Snapshot(name); exists && len(s.Service.ClusterIPs) > 0 {
			frontends += s.Frontends()
			ports += len(s.Service.Ports) + 1
			endpoints += s.Endpoints()
		}
	}
	a.reserve(maps.Room{Frontends: frontends, Pools: ports, Slots: endpoints, Backends: endpoints, ServicePorts: ports})
}

// enforce hands a decision to the writer, the health checks and the metrics. A Service whose
// decision failed keeps what it has, and one that has an object which could not be read what an earlier agent programmed.
func (a *agent) enforce(svc *lb.Service, d decision.Decision) {
	name, source := svc.Name, decisionsAbout(svc.Name)
	if a.model.isUnread(name) && a.writer.Adopted(name) {
		a.model.undecided[name] = struct{}{}

		return
	}
	if d.Failed != "" {
		failure := lb.Problem{
			Object:  "Service " + name.String(),
			Message: "internal error, so it stays as it was: " + d.Failed,
		}
		if !slices.Contains(a.model.problems[source], failure) {
			a.cfg.Log.Error("a Service could not be decided", "service", name, "error", d.Failed, "stack", string(d.Stack))
		}
		a.model.report(source, []lb.Problem{failure})
		a.model.undecided[name] = struct{}{}

		return
	}
	delete(a.model.undecided, name)
	a.metrics.Resolved(name, d.Resolution)
	a.model.report(source, d.Resolution.Problems)
	a.checks.Plan(name, d.Check)
	a.writer.SetPlanned(name, svc.Created, d.Planned)
}

// retire removes a Service from the writer, the health checks and the metrics.
func (a *agent) retire(name lb.ServiceName) {
	delete(a.model.undecided, name)
	a.metrics.Resolved(name, lb.Resolution{})
	a.model.report(decisionsAbout(name), nil)
	a.checks.Plan(name, nil)
	a.writer.Delete(name)
}

func decisionsAbout(name lb.ServiceName) string { return "decisions about Service " + name.String() }

// startHeavy starts the decision about the next heavy Service, unless one is in progress.
func (a *agent) startHeavy() {
	name, ok := a.heavy.Begin()
	if !ok {
		return
	}
	s, _ := a.model.state.Snapshot(name) // it exists: a Service that goes is forgotten
	used := a.writer.Room()
	go func() {
		d := a.resolve.Decide(s)
		a.reserve(used.Plus(a.writer.RoomOf(d.Planned)))
		a.queue.Enqueue(func(*model) {
			if a.heavy.End() {
				a.enforce(s.Service, d)
			}
		})
	}()
}
