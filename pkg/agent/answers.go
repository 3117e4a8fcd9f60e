package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	stdmaps "maps"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// KernelStatus returns the status without an agent: what is pinned and attached. It
// starts this program's own executable, see [datapath.Verify].
func KernelStatus(ctx context.Context, bpfRoot, cgroupRoot string) (Status, error) {
	status := Status{BPFRoot: bpfRoot, CgroupRoot: cgroupRoot, NotCovered: notCovered(cgroupRoot)}
	if err := datapath.Verify(ctx, cgroupRoot); err != nil {
		status.Effective = err.Error()
	}
	hooks, err := datapath.Hooks(bpfRoot, cgroupRoot)
	if err != nil {
		return status, err
	}
	status.Hooks = hooks
	if status.Devices, err = devicesIn(func() ([]datapath.DeviceState, error) { return datapath.Devices(bpfRoot) }); err != nil {
		return status, err
	}
	pinned, err := maps.Load(bpfRoot)
	if errors.Is(err, fs.ErrNotExist) {
		return status, nil
	}
	if err != nil {
		return status, err
	}
	defer pinned.Close()
	if status.Flows, err = flow.ReadStatus(pinned); err != nil {
		return status, err
	}

	return status, status.readMaps(pinned)
}

// notCovered returns the sockets that are outside of a cgroup. It is empty if cgroupRoot is no
// cgroup: hooks are not effective there anyway.
func notCovered(cgroupRoot string) string {
	cgroup, err := datapath.LookupCgroup(cgroupRoot)
	if err != nil {
		return ""
	}

	return cgroup.NotCovered()
}

// Well reports whether Services work as they should.
func (s Status) Well() bool {
	for _, hook := range s.Hooks {
		if hook.Problem != "" {
			return false
		}
	}
	for _, device := range s.Devices {
		if device.Problem != "" {
			return false
		}
	}

	return s.Running && s.Synced && s.Effective == "" && s.Unpinned == "" && s.Flows.Emergency == "" && len(s.Errors) == 0
}

func (s *Status) readMaps(m *maps.Pinned) error {
	fills, err := m.Fills()
	if err != nil {
		return err
	}
	for _, f := range fills {
		s.Maps = append(s.Maps, MapFill(f))
	}
	counts, err := m.ReasonCounts()
	if err != nil {
		return err
	}
	s.Counts = countsOf(counts)

	return nil
}

// status returns the state of the agent, and of its maps and programs in the kernel.
func (a *agent) status(ctx context.Context) (Status, error) {
	status, err := inLoop(ctx, a, a.modelStatus)
	if err != nil {
		return status, err
	}
	if err := a.hooks.checked(); err != nil {
		status.Effective = err.Error()
	}
	status.Flows = a.flows.known()
	if missing := a.datapath.MissingPins(); len(missing) > 0 {
		status.Unpinned = fmt.Sprintf("%d pins are missing: %s", len(missing), missing[0])
	}
	if err := a.hooks.pinned(); err != nil {
		status.Unpinned = err.Error()
	}
	status.Hooks, err = a.datapath.Hooks()
	if err != nil {
		return status, err
	}
	status.Devices, err = a.devices.status()
	if err != nil {
		return status, err
	}

	return status, status.readMaps(a.datapath.Maps())
}

func (a *agent) modelStatus() Status {
	status := Status{
		Running:    true,
		Version:    a.cfg.Version,
		Node:       a.cfg.NodeName,
		Source:     a.cfg.APIServer,
		Started:    a.started,
		Synced:     a.synced,
		CgroupRoot: a.cfg.Datapath.CgroupRoot,
		NotCovered: notCovered(a.cfg.Datapath.CgroupRoot),
		BPFRoot:    a.cfg.Datapath.BPFRoot,
		Services:   a.model.state.Len(),
		Problems:   a.model.allProblems(),
		Errors:     a.errors(),
		Writes:     a.writes(),
	}
	status.ThroughStack = "the devices are not known yet"
	if a.throughStack != nil {
		status.ThroughStack = *a.throughStack
	}
	if a.cfg.Manifests != "" {
		status.Source = "manifests in " + a.cfg.Manifests
	}

	return status
}

func (a *agent) writes() map[string]uint64 {
	writes := make(map[string]uint64)
	for name, w := range a.writer.Counters().Writes {
		writes[name] = w.Puts + w.Deletes
	}

	return writes
}

// answerServices returns all Services with the connections of their backends.
func (a *agent) answerServices(ctx context.Context) ([]Service, error) {
	services, err := later(ctx, a, a.services)
	if err != nil {
		return nil, err
	}

	return services, addConnections(services, a.tables)
}

// services returns a function that returns every Service, sorted by name. That function
// needs no turn.
func (a *agent) services() func() []Service {
	failed := map[string][]string{}
	for _, e := range a.errors() {
		failed[e.Service] = append(failed[e.Service], e.Error)
	}
	problems := stdmaps.Clone(a.model.problems)
	services := slices.Collect(a.model.state.Snapshots())

	return func() []Service {
		views := []Service{}
		for _, svc := range services {
			view := serviceOf(svc.Service, a.resolved(svc))
			view.Problems = slices.Concat(problems["Service "+view.Name], view.Problems)
			view.Error = strings.Join(failed[view.Name], "; ")
			views = append(views, view)
		}

		return views
	}
}

// desired returns a function that returns the frontends which should be in the maps: those
// of all Services, without those that another Service owns. That function needs no turn.
func (a *agent) desired() func() []Frontend {
	lost := map[lb.FrontendKey]lb.ServiceName{} // the owners
	for status := range a.writer.Statuses() {
		for _, l := range status.Lost {
			lost[l.Frontend] = l.Owner
		}
	}
	services := slices.Collect(a.model.state.Snapshots())

	return func() []Frontend {
		frontends := []Frontend{frontendOf(probeFrontend())}
		for _, svc := range services {
			for _, f := range a.resolved(svc).Frontends {
				if owner, ok := lost[f.Key]; !ok || owner == svc.Service.Name {
					frontends = append(frontends, frontendOf(f))
				}
			}
		}
		slices.SortFunc(frontends, compareFrontends)

		return frontends
	}
}

// errors returns the Services that are not in the maps as they should be, and why.
func (a *agent) errors() []ServiceError {
	errs := []ServiceError{}
	for status := range a.writer.Statuses() {
		for _, failure := range status.Failures {
			errs = append(errs, ServiceError{
				Service: status.Service.String(), Error: failure.Error(), Retry: status.Retry,
			})
		}
		for _, l := range status.Lost {
			errs = append(errs, ServiceError{
				Service: status.Service.String(),
				Error:   fmt.Sprintf("%s belongs to Service %s", l.Frontend, l.Owner),
			})
		}
	}
	slices.SortFunc(errs, func(x, y ServiceError) int {
		return cmp.Or(cmp.Compare(x.Service, y.Service), cmp.Compare(x.Error, y.Error))
	})

	return errs
}
