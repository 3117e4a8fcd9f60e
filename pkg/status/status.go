// Package status reports what an agent has programmed: it answers the other verbs on a socket
// ([Server]), asks a running agent ([Client]), and reads maps and programs where no agent runs
// ([KernelStatus], [Programmed]). Its types are the JSON of `sluice status`, `services`,
// `backends` and `verify`.
package status

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	stdmaps "maps"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// Status is the state of an agent and its node, which `sluice status` shows.
type Status struct {
	Running bool `json:"running"` // an agent has answered
	// Hung is why an agent that runs has not answered, empty if it has or if none runs.
	Hung string `json:"hung,omitempty"`
	// LastRan is when an agent last ran, if none does; zero if none has since the maps were made.
	LastRan time.Time `json:"lastRan,omitzero"`
	Version string    `json:"version,omitempty"`
	Node    string    `json:"node,omitempty"`
	Source  string    `json:"source,omitempty"` // where Services come from
	Started time.Time `json:"started,omitzero"`
	// Ignored is what the agent does not know of its configuration: it may be of another version of
	// Kubernetes, or misspelt.
	Ignored []string `json:"ignored,omitempty"`
	// Synced is set once all Services and endpoints are known, and programmed except
	// for Errors.
	Synced bool `json:"synced"`

	CgroupRoot string `json:"cgroupRoot"`
	// NotCovered are the sockets of processes that are not below CgroupRoot; empty if
	// all of the machine are.
	NotCovered string `json:"notCovered,omitempty"`
	BPFRoot    string `json:"bpfRoot"`
	// Unpinned is why pins are missing below BPFRoot, empty if none is.
	Unpinned string               `json:"unpinned,omitempty"`
	Hooks    []datapath.HookState `json:"hooks"`
	// Others are other instances of Sluice, whose programs act on this node as well.
	Others []datapath.Other `json:"others,omitempty"`
	// Effective is empty if our programs translate a connection to a reserved address by our maps, else
	// it is what happened instead.
	Effective string `json:"effective,omitempty"`
	// Untried is why nothing is known of that, although no trial has failed; empty if one was made.
	Untried string `json:"untried,omitempty"`

	// Missing is what the kernel lacks, with what that costs. Only an agent knows it.
	Missing []string `json:"missing,omitempty"`

	Devices []datapath.DeviceState `json:"devices"`
	// ThroughStack is why packets to backends on other nodes pass this node's network stack;
	// empty if they need not. Only an agent knows it.
	ThroughStack string `json:"throughStack,omitempty"`
	// Limits are what no program translates, as the node is configured. Only an agent knows them.
	Limits []string `json:"limits,omitempty"`
	// MasqueradePorts are the source ports of masqueraded connections, and PortsProblem is what of
	// them is not as it should be. Only an agent knows them.
	MasqueradePorts string `json:"masqueradePorts,omitempty"`
	PortsProblem    string `json:"portsProblem,omitempty"`

	// OptedOut are the Pods of this node whose sockets are left alone. Only an agent knows them.
	OptedOut []OptedOutPod `json:"optedOut,omitempty"`

	// Silence is since when the watch of each resource has had no event, no bookmark, and no answer to a ping, in
	// nanoseconds. Only an agent that follows an API server knows it.
	Silence map[string]time.Duration `json:"silence,omitempty"`
	// Files are those that the agent has open.
	Files datapath.Files `json:"files,omitzero"`
	// MapFolders are the folders of maps below BPFRoot, if no agent has answered: they may be of builds with other maps.
	MapFolders []string `json:"mapFolders,omitempty"`
	// Unread is what could not be found out, although the agent has answered or its maps are there, with why.
	Unread []string `json:"unread,omitempty"`

	Services int               `json:"services"`
	Maps     []maps.Fill       `json:"maps"`
	Counts   map[string]uint64 `json:"counts"` // by reason
	Flows    flow.Status       `json:"flows"`
	// Writes is how often the agent wrote to each map since it started.
	Writes map[string]uint64 `json:"writes,omitempty"`

	Problems []lb.Problem   `json:"problems"` // what is not in force of objects, and of the configuration
	Errors   []ServiceError `json:"errors"`   // Services that are not as they should be in the maps
}

// OptedOutPod is a Pod that has opted out of translation at sockets.
type OptedOutPod struct {
	Pod string `json:"pod"` // NAMESPACE/NAME
	UID string `json:"uid"`
	// NoCgroup is set if no cgroup below CgroupRoot has the UID in its name: either no process of
	// the Pod runs, or its sockets are translated nevertheless.
	NoCgroup bool `json:"noCgroup,omitempty"`
}

// ServiceError is a Service that could not be programmed in full.
type ServiceError struct {
	Service string    `json:"service"`
	Error   string    `json:"error"`
	Retry   time.Time `json:"retry,omitzero"`
}

// KernelStatus returns the status without an agent: what is pinned and attached. It
// starts this program's own executable, see [datapath.Verify].
func KernelStatus(ctx context.Context, bpfRoot, cgroupRoot string) (Status, error) {
	status := Status{BPFRoot: bpfRoot, CgroupRoot: cgroupRoot, NotCovered: notCovered(cgroupRoot)}
	status.setEffective(datapath.Verify(ctx, bpfRoot, cgroupRoot))
	var err error
	if status.Hooks, err = datapath.Hooks(bpfRoot, cgroupRoot); err != nil {
		return status, err
	}
	if status.Devices, err = datapath.Devices(bpfRoot); err != nil {
		return status, err
	}
	if status.Others, err = datapath.Others(bpfRoot, cgroupRoot); err != nil {
		return status, err
	}
	if status.MapFolders, err = maps.Folders(bpfRoot); err != nil {
		return status, err
	}
	pinned, err := maps.Load(bpfRoot)
	if errors.Is(err, fs.ErrNotExist) {
		if len(status.MapFolders) > 0 {
			status.Unread = []string{"maps of another build: " + err.Error()}
		}

		return status, nil
	}
	if err != nil {
		return status, err
	}
	defer pinned.Close()
	status.LastRan = pinned.Heartbeat.LastBeat()
	if status.Flows, err = flow.ReadStatus(pinned); err != nil {
		return status, err
	}

	return status, status.readMaps(pinned)
}

// NothingProgrammed reports whether a node without an agent has no maps, of any build, and no programs of Sluice.
func (s Status) NothingProgrammed() bool {
	return len(s.Maps) == 0 && len(s.MapFolders) == 0 &&
		!slices.ContainsFunc(s.Hooks, func(h datapath.HookState) bool { return h.Problem == "" }) &&
		!slices.ContainsFunc(s.Devices, func(d datapath.DeviceState) bool { return d.Attached != "" })
}

// WithoutAgent is what is wrong with a node that has programs and no agent, which last ran at this time; zero if that is
// not known.
func WithoutAgent(lastRan, now time.Time) string {
	const text = "programs without an agent"
	if lastRan.IsZero() {
		return text
	}

	return fmt.Sprintf("%s since %s (%s)", text, lastRan.UTC().Format(time.RFC3339), now.Sub(lastRan).Round(time.Second))
}

// setEffective sets the outcome of the last trial of the hooks.
func (s *Status) setEffective(err error) {
	switch {
	case errors.Is(err, datapath.ErrSlow):
		s.Untried = err.Error()
	case err != nil:
		s.Effective = err.Error()
	}
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
func (s Status) Well() bool { return s.Running && s.Synced && len(s.Troubles()) == 0 }

// Troubles returns why Services may not work as they should, beside that no agent runs, or that it waits for
// the first complete list of Services.
func (s Status) Troubles() []string {
	var troubles []string
	for _, p := range s.OfNode() {
		troubles = append(troubles, p.String())
	}

	return append(s.TroublesBeside(), troubles...)
}

// OfNode returns what of this node is not as it is configured.
func (s Status) OfNode() []lb.Problem {
	return slices.DeleteFunc(slices.Clone(s.Problems), func(p lb.Problem) bool { return p.Effect == lb.LeftOut })
}

// TroublesBeside returns the Troubles beside those of [Status.OfNode].
func (s Status) TroublesBeside() []string {
	troubles := append([]string{s.Effective}, s.AttachTroubles()...)
	troubles = append(troubles, s.Flows.Emergency, s.Files.Trouble())
	troubles = append(troubles, s.Silent()...)
	for _, e := range s.Errors {
		troubles = append(troubles, fmt.Sprintf("Service %s: %s", e.Service, e.Error))
	}

	return slices.DeleteFunc(troubles, func(text string) bool { return text == "" })
}

// MaxSilence is how long a watch may hear nothing: an API server sends a bookmark each minute, and a connection
// that answers no ping is given up after 45 seconds.
const MaxSilence = 2 * time.Minute

// Silent returns the watches that hear nothing.
func (s Status) Silent() []string {
	var silent []string
	for _, resource := range slices.Sorted(stdmaps.Keys(s.Silence)) {
		if lasts := s.Silence[resource]; lasts > MaxSilence {
			silent = append(silent, fmt.Sprintf("the API server has been silent about %s for %s", resource, lasts.Round(time.Second)))
		}
	}

	return silent
}

// AttachTroubles returns what of the pins, hooks and devices is not as it should be, or not known.
func (s Status) AttachTroubles() []string {
	var troubles []string
	for _, text := range s.Unread {
		troubles = append(troubles, "not known: "+text)
	}
	if s.Unpinned != "" {
		troubles = append(troubles, s.Unpinned)
	}
	for _, other := range s.Others {
		troubles = append(troubles, other.String())
	}
	for _, hook := range s.Hooks {
		if hook.Problem != "" {
			troubles = append(troubles, "hook "+hook.Name+": "+hook.Problem)
		}
	}
	for _, device := range s.Devices {
		if device.Problem != "" {
			troubles = append(troubles, "device "+device.Name+": "+device.Problem)
		}
	}

	return troubles
}

func (s *Status) readMaps(m *maps.Pinned) (err error) {
	if s.Maps, err = m.Fills(); err != nil {
		return err
	}
	counts, err := m.ReasonCounts()
	if err != nil {
		return err
	}
	s.Counts = make(map[string]uint64, len(counts))
	for reason, n := range counts {
		s.Counts[reason.String()] = n
	}

	return nil
}
