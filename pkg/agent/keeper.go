package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/kube"
)

// hookMonitor keeps hooks attached, effective and pinned, and ends UDP sockets whose
// backends are gone. Both take too long for the loop.
type hookMonitor struct {
	agent       *agent
	orphan      chan struct{}
	orphansLeft bool // the last search failed before it had ended all

	mu        sync.Mutex
	effective error // the last check of the hooks
	unpinned  error // why pins are missing, by the last check
}

// verifyInterval is the default of [Config.VerifyInterval].
const verifyInterval = 30 * time.Second

var errNotChecked = errors.New("not checked yet")

func newHookMonitor(a *agent) *hookMonitor {
	return &hookMonitor{agent: a, orphan: make(chan struct{}, 1), effective: errNotChecked}
}

// endOrphans starts a search for the sockets of backends that are gone, and does not wait
// for it.
func (m *hookMonitor) endOrphans() {
	select {
	case m.orphan <- struct{}{}:
	default:
	}
}

// pinned returns why pins are missing, and nil if they are not.
func (m *hookMonitor) pinned() error {
	m.mu.Lock()
	defer m.mu.Unlock()

	return m.unpinned
}

// checked returns why hooks were not effective at the last check, nil if they were.
func (m *hookMonitor) checked() error {
	m.mu.Lock()
	defer m.mu.Unlock()

	return m.effective
}

func (m *hookMonitor) run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-m.agent.attached:
	}
	check := time.NewTicker(orDefault(m.agent.cfg.VerifyInterval, verifyInterval))
	defer check.Stop()
	if err := m.check(ctx); err != nil {
		return err
	}

	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.orphan:
			m.destroyOrphans()
		case <-check.C:
			if err := m.check(ctx); err != nil {
				return err
			}
			if m.orphansLeft {
				m.destroyOrphans()
			}
		}
	}
}

// check restores lost pins and attaches again what was detached. The error wraps
// [ErrRunning] if another agent has the maps now.
func (m *hookMonitor) check(ctx context.Context) error {
	if err := m.mendPins(); err != nil {
		return err
	}
	m.checkHooks(ctx)

	return nil
}

// checkHooks attaches again what another program has detached, and checks that hooks refuse
// a connection to the reserved frontend.
func (m *hookMonitor) checkHooks(ctx context.Context) {
	dp, cfg := m.agent.datapath, m.agent.cfg
	err := m.mendHooks()
	if err == nil {
		err = datapath.Verify(ctx, cfg.Datapath.CgroupRoot)
	}
	if ctx.Err() != nil {
		return
	}
	if known := m.checked(); err != nil && (known == nil || known.Error() != err.Error()) {
		cfg.Log.Error("hooks are not effective", "error", err, "features", dp.Features())
	}
	m.setEffective(err)
}

// setEffective sets whether hooks are effective, and reports that to the health checks and
// as an Event.
func (m *hookMonitor) setEffective(err error) {
	m.agent.cfg.recordHooks(m.checked(), err)
	// If no probe process could be started, the state of the hooks is unknown.
	if !errors.Is(err, datapath.ErrNotProbed) {
		m.agent.proxy.Effective(err == nil)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.effective = err
}

// mendPins restores pins that are missing, as after bpffs was unmounted or emptied. Services
// work without them. It first locks the folder that is there now: the error wraps
// [ErrRunning] if another agent has locked it.
func (m *hookMonitor) mendPins() error {
	cfg := m.agent.cfg
	var missing []string
	err := m.agent.lock.Renew()
	if errors.Is(err, ErrRunning) {
		return fmt.Errorf("pins were lost, and another agent made new ones: %w", err)
	}
	if err == nil {
		missing, err = m.agent.datapath.MendPins()
	}
	if err != nil {
		err = fmt.Errorf("pins are missing, and cannot be made: %w", err)
	}
	known := m.pinned()
	switch {
	case err != nil && (known == nil || known.Error() != err.Error()):
		cfg.Log.Error("without pins the next agent finds neither maps nor programs", "error", err)
		cfg.record(kube.Event{Reason: kube.ReasonPinsMissing, Action: actionCheck, Note: err.Error()})
	case err == nil && len(missing) > 0:
		cfg.Log.Warn("pins were missing; made again", "pins", missing)
		cfg.record(kube.Event{
			Reason: kube.ReasonPinsMadeAgain, Action: actionCheck,
			Note: fmt.Sprintf("%d pins below %s were missing, and are made again", len(missing), cfg.Datapath.BPFRoot),
		})
	case err == nil && known != nil:
		cfg.Log.Info("pins are in place again")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.unpinned = err

	return nil
}

func (m *hookMonitor) mendHooks() error {
	cfg := m.agent.cfg
	hooks, err := m.agent.datapath.Hooks()
	if err != nil {
		return err
	}
	for _, hook := range hooks {
		if hook.Problem != "" {
			cfg.Log.Warn("attaching again", "hook", hook.Name, "problem", hook.Problem)

			return m.agent.datapath.Attach()
		}
	}

	return nil
}

func (m *hookMonitor) destroyOrphans() {
	n, err := m.agent.datapath.DestroyOrphans()
	if n > 0 {
		m.agent.cfg.Log.Info("ended UDP sockets whose backend is gone", "sockets", n)
		m.agent.queue.metrics.SocketsEnded(n)
	}
	if err != nil {
		m.agent.cfg.Log.Error("UDP sockets stay with backends that are gone; trying again", "error", err)
	}
	m.orphansLeft = err != nil
}
