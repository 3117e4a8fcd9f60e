package datapath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// EventKind is a change of the datapath's state that operators of the node should see.
type EventKind int

// The kinds of events.
const (
	HooksNotEffective EventKind = iota
	HooksEffective
	PinsMissing
	PinsMadeAgain
	DevicesNotEffective
	DevicesEffective
	MasqueradePortsLimited
	MasqueradePortsExtended
	OtherTakenOver // another Sluice acted on this node, see [Datapath.TakenOver]
)

// Event is one such change.
type Event struct {
	Kind EventKind
	Note string
}

// HookMonitor attaches the programs of hooks, keeps them attached, effective and pinned, and
// finds the UDP sockets whose Services have left their backends. It has a goroutine of its own, because all of that
// takes long.
type HookMonitor struct {
	datapath *Datapath
	cfg      HookMonitorConfig
	tried    chan struct{}
	orphan   chan struct{}
	// unsearched is why the last search for orphans failed, empty if it did not, and searchRest what it waits for the next.
	unsearched string
	searchRest time.Duration

	mu        sync.Mutex
	effective error // the last check of the hooks
	unpinned  error // why pins are missing, by the last check
}

// HookMonitorConfig configures a [HookMonitor].
type HookMonitorConfig struct {
	// Lock is the lock of the maps, which is renewed before lost pins are restored.
	Lock *MapsLock
	// Synced is closed when the maps have every Service.
	Synced <-chan struct{}
	// Interval is the time between checks.
	Interval time.Duration
	// FailFast ends Run with an error if the first try to attach fails.
	FailFast bool
	// Version of the agent is logged.
	Version string
	// Effective is called after each check with whether hooks are effective.
	Effective func(bool)
	// Left is called after each search with the addresses of backends that Services have left, and
	// to which UDP sockets are connected.
	Left func(map[maps.Addr]struct{})
	// SocketsEnded is called with the number of UDP sockets that were ended, because no program can
	// lead their datagrams to another backend.
	SocketsEnded func(int)
	// Record is called with each change that operators should see.
	Record func(Event)
	Log    *slog.Logger
}

// orphanInterval is how often orphans are looked for while there are some. A search that fails as the last one did, such as by
// a network namespace that the agent cannot enter, is repeated less and less often, down to maxSearchRest, if it has found
// none that may get stuck.
const (
	orphanInterval = 3 * time.Second
	maxSearchRest  = 5 * time.Minute
)

// settlePins is how long after a change of the pins' folders they are looked at.
const settlePins = 20 * time.Millisecond

// attachRetry is how long after a failure the next try comes.
const attachRetry = 5 * time.Second

var errNotChecked = errors.New("not checked yet")

// NewHookMonitor returns a monitor of hooks that are not checked yet.
func NewHookMonitor(d *Datapath, cfg HookMonitorConfig) *HookMonitor {
	return &HookMonitor{
		datapath: d, cfg: cfg, tried: make(chan struct{}), orphan: make(chan struct{}, 1), effective: errNotChecked,
	}
}

// Tried returns a channel that is closed when programs are attached, or cannot be: it is tried again.
func (m *HookMonitor) Tried() <-chan struct{} { return m.tried }

// FindOrphans starts a search for the UDP sockets of backends that Services have left, and does not
// wait for it.
func (m *HookMonitor) FindOrphans() {
	select {
	case m.orphan <- struct{}{}:
	default:
	}
}

// Effective returns why hooks were not effective at the last check, nil if they were, and an error
// that wraps [ErrSlow] if they are attached and that check took too long.
func (m *HookMonitor) Effective() error {
	m.mu.Lock()
	defer m.mu.Unlock()

	return m.effective
}

// Unpinned returns why pins are missing, and nil if they are not.
func (m *HookMonitor) Unpinned() error {
	m.mu.Lock()
	defer m.mu.Unlock()

	return m.unpinned
}

// Problems returns why hooks are not effective, or pins are missing. Any goroutine may call it.
func (m *HookMonitor) Problems() []string {
	var reasons []string
	if err := m.Effective(); err != nil && !errors.Is(err, ErrSlow) {
		reasons = append(reasons, fmt.Sprintf("hooks are not effective: %v", err))
	}
	if err := m.Unpinned(); err != nil {
		reasons = append(reasons, err.Error())
	}

	return reasons
}

// Run attaches programs, then checks hooks and pins at each interval, and pins also when their folders or mounts change, until
// ctx ends. It returns
// an error if programs cannot be loaded, if FailFast is set and they cannot be attached, or one
// that wraps [ErrRunning] if another agent has the maps.
func (m *HookMonitor) Run(ctx context.Context) error {
	if err := m.attachFirst(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	check := time.NewTicker(m.cfg.Interval)
	defer check.Stop()
	search := time.NewTimer(0)
	<-search.C // not before FindOrphans is called: until then, the maps may lack Services
	defer search.Stop()
	changed, follow := m.watchPins(ctx)
	if err := m.restorePins(); err != nil {
		return err
	}
	follow()
	m.checkHooks(ctx)

	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.orphan:
			if rest := m.findOrphans(); rest > 0 {
				search.Reset(rest)
			}
		case <-search.C:
			if rest := m.findOrphans(); rest > 0 {
				search.Reset(rest)
			}
		case <-changed:
			// What removes one pin removes all: it is given the time to.
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(settlePins):
			}
			if err := m.restorePins(); err != nil {
				return err
			}
			follow()
		case <-check.C:
			if err := m.restorePins(); err != nil {
				return err
			}
			follow()
			m.checkHooks(ctx)
			if err := m.datapath.maps.FreeListeners(); err != nil {
				m.cfg.Log.Warn("what a killed `sluice monitor` has left is not freed", "error", err)
			}
		}
	}
}

// attachFirst attaches our programs once they are loaded, even if the API server is
// unreachable, because they work on the maps that an earlier agent filled. If its programs work
// on other maps, ours are new and empty: its programs stay attached until ours have every
// Service. If attaching fails, it is tried again, because another program may have to be removed
// first.
func (m *HookMonitor) attachFirst(ctx context.Context) error {
	loaded := make(chan error, 1)
	go func() { loaded <- m.datapath.Loaded() }()
	select {
	case <-ctx.Done():
		return nil
	case err := <-loaded:
		if err != nil {
			return err
		}
	}
	others, err := m.datapath.OtherMapsInUse()
	if err != nil {
		return err
	}
	if others {
		select {
		case <-ctx.Done():
			return nil
		case <-m.cfg.Synced:
		}
	}
	for tries := 0; ; tries++ {
		err := m.datapath.Attach()
		if err != nil && m.cfg.FailFast {
			return err
		}
		if tries == 0 {
			close(m.tried)
		}
		if err == nil {
			break
		}
		m.cfg.Log.Error("not attached; trying again", "error", err)
		m.setEffective(err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(attachRetry):
		}
	}
	if err := m.datapath.NotKept(); err != nil {
		m.cfg.Log.Warn("programs could not be kept; the next agent takes longer to start", "error", err)
	}
	m.datapath.reportTakenOver(m.cfg.Log, m.cfg.Record)
	m.cfg.Log.Info("attached", "version", m.cfg.Version, "cgroup", m.datapath.cfg.CgroupRoot,
		"pins", m.datapath.cfg.BPFRoot, "kernel", m.datapath.features)

	return nil
}

// checkHooks attaches again what another program has detached, ends other instances, and checks that hooks
// translate a connection to the reserved frontend.
func (m *HookMonitor) checkHooks(ctx context.Context) {
	hooks, err := m.datapath.Hooks()
	for _, hook := range hooks {
		if hook.Problem != "" {
			m.cfg.Log.Warn("attaching again", "hook", hook.Name, "problem", hook.Problem)
			err = m.datapath.Attach()

			break
		}
	}
	m.datapath.endOthers(isSock)
	m.datapath.reportTakenOver(m.cfg.Log, m.cfg.Record)
	if err == nil {
		err = m.datapath.Verify(ctx)
	}
	if ctx.Err() != nil {
		return
	}
	known := m.Effective()
	switch isNew := err != nil && (known == nil || known.Error() != err.Error()); {
	case isNew && errors.Is(err, ErrSlow):
		m.cfg.Log.Warn("hooks are attached, and not tried", "error", err)
	case isNew:
		m.cfg.Log.Error("hooks are not effective", "error", err, "features", m.datapath.features)
	}
	m.setEffective(err)
}

// setEffective sets why hooks are not effective, nil if they are, and reports that. A trial that was
// too slow says nothing of them: one that failed before it stays the last one.
func (m *HookMonitor) setEffective(err error) {
	m.mu.Lock()
	before := m.effective
	if errors.Is(err, ErrSlow) {
		if !errors.Is(before, ErrNotEffective) {
			m.effective = err
		}
		m.mu.Unlock()

		return
	}
	m.effective = err
	m.mu.Unlock()
	if errors.Is(before, ErrSlow) {
		before = nil // nothing was reported
	}
	switch {
	case err != nil && (before == nil || before.Error() != err.Error()):
		m.cfg.Record(Event{HooksNotEffective, "hooks are not effective: " + err.Error()})
	case err == nil && before != nil && before != errNotChecked:
		m.cfg.Record(Event{HooksEffective, "hooks are effective again"})
	}
	// If no probe process could be started, the state of the hooks is unknown.
	if !errors.Is(err, ErrNotProbed) {
		m.cfg.Effective(err == nil)
	}
}

// restorePins makes pins again that are missing, as after bpffs was unmounted or emptied.
// Services work without them. It first locks the folder that is there now: the error wraps
// [ErrRunning] if another agent has locked it.
func (m *HookMonitor) restorePins() error {
	var missing []string
	err := m.cfg.Lock.Renew()
	if errors.Is(err, ErrRunning) {
		return fmt.Errorf("pins were lost, and another agent made new ones: %w", err)
	}
	if err == nil {
		missing, err = m.datapath.MendPins()
	}
	if err != nil {
		err = fmt.Errorf("pins are missing, and cannot be made: %w", err)
	}
	known := m.Unpinned()
	switch {
	case err != nil && (known == nil || known.Error() != err.Error()):
		m.cfg.Log.Error("without pins the next agent finds neither maps nor programs", "error", err)
		m.cfg.Record(Event{PinsMissing, err.Error()})
	case err == nil && len(missing) > 0:
		m.cfg.Log.Warn("pins were missing; made again", "pins", missing)
		m.cfg.Record(Event{PinsMadeAgain,
			fmt.Sprintf("%d pins below %s were missing, and are made again", len(missing), m.datapath.cfg.BPFRoot)})
	case err == nil && known != nil:
		m.cfg.Log.Info("pins are in place again")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.unpinned = err

	return nil
}

// findOrphans reports where orphans are, and ends those that are stuck. It returns after what time to search again, 0 if that
// is not before a change.
func (m *HookMonitor) findOrphans() (rest time.Duration) {
	orphans, err := m.datapath.FindOrphans()
	if orphans.Left != nil {
		m.cfg.Left(orphans.Left)
	}
	n, failed := DestroySocks(orphans.Stuck)
	if n > 0 {
		m.cfg.Log.Info("ended UDP sockets whose backend is gone, and whose datagrams pass no device that could lead them to another one",
			"sockets", n)
		m.cfg.SocketsEnded(n)
	}

	return m.searchAgain(len(orphans.Left), orphans.Passing, errors.Join(err, failed))
}

// searchAgain returns after what time to search again if so many backends were left, which sockets may close, connect anew, or
// get stuck at when a route or a neighbour goes, as those that pass now; or if the search failed, which it logs if that is new.
func (m *HookMonitor) searchAgain(left, passing int, err error) (rest time.Duration) {
	switch {
	case err == nil:
		m.unsearched = ""
		if left > 0 {
			rest = orphanInterval
		}

		return rest
	case err.Error() != m.unsearched:
		m.unsearched, m.searchRest = err.Error(), orphanInterval
		m.cfg.Log.Error("some UDP sockets may stay with backends that are gone; trying again", "error", err)
	case passing > 0:
		m.searchRest = orphanInterval
	default:
		m.searchRest = min(2*m.searchRest, maxSearchRest)
	}

	return m.searchRest
}
