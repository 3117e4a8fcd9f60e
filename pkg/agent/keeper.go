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

// keeper keeps hooks attached, effective and pinned, and ends UDP sockets whose
// backends are gone. Both take too long for the loop.
type keeper struct {
	agent       *agent
	orphan      chan struct{}
	orphansLeft bool // the last round ended none or not all

	mu        sync.Mutex
	effective error // the last check of the hooks
	unpinned  error // why pins are missing, by the last check
}

// verifyInterval is how often attachments are checked, unless the configuration
// says otherwise.
const verifyInterval = 30 * time.Second

var errNotChecked = errors.New("not checked yet")

func newKeeper(a *agent) *keeper {
	return &keeper{agent: a, orphan: make(chan struct{}, 1), effective: errNotChecked}
}

// endOrphans has the sockets of backends that are gone ended, soon.
func (k *keeper) endOrphans() {
	select {
	case k.orphan <- struct{}{}:
	default:
	}
}

// pinned returns why pins are missing, and nil if they are not.
func (k *keeper) pinned() error {
	k.mu.Lock()
	defer k.mu.Unlock()

	return k.unpinned
}

// checked returns what the last check of the hooks found.
func (k *keeper) checked() error {
	k.mu.Lock()
	defer k.mu.Unlock()

	return k.effective
}

func (k *keeper) run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-k.agent.attached:
	}
	check := time.NewTicker(orDefault(k.agent.cfg.VerifyInterval, verifyInterval))
	defer check.Stop()
	if err := k.check(ctx); err != nil {
		return err
	}

	for {
		select {
		case <-ctx.Done():
			return nil
		case <-k.orphan:
			k.destroyOrphans()
		case <-check.C:
			if err := k.check(ctx); err != nil {
				return err
			}
			if k.orphansLeft {
				k.destroyOrphans()
			}
		}
	}
}

// check makes lost pins anew and attaches again what was detached. The error wraps
// [ErrRunning] if another agent has the maps now.
func (k *keeper) check(ctx context.Context) error {
	if err := k.mendPins(); err != nil {
		return err
	}
	k.checkHooks(ctx)

	return nil
}

// checkHooks attaches again what another program detached, and dials the reserved
// frontend.
func (k *keeper) checkHooks(ctx context.Context) {
	dp, cfg := k.agent.datapath, k.agent.cfg
	err := k.mendHooks()
	if err == nil {
		err = datapath.Verify(ctx, cfg.Datapath.CgroupRoot)
	}
	if ctx.Err() != nil {
		return
	}
	if known := k.checked(); err != nil && (known == nil || known.Error() != err.Error()) {
		cfg.Log.Error("hooks are not effective", "error", err, "features", dp.Features())
	}
	k.setEffective(err)
}

// setEffective notes whether hooks are effective, and has those told who go by it.
func (k *keeper) setEffective(err error) {
	k.agent.cfg.recordHooks(k.checked(), err)
	// That a process could not be started says nothing about the hooks.
	if !errors.Is(err, datapath.ErrNotProbed) {
		k.agent.proxy.Effective(err == nil)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.effective = err
}

// mendPins makes pins anew that are missing, as after bpffs was unmounted or emptied.
// Services work all the same. The folder that is there now is locked first: the error
// wraps [ErrRunning] if another agent was faster.
func (k *keeper) mendPins() error {
	cfg := k.agent.cfg
	var missing []string
	err := k.agent.lock.Renew()
	if errors.Is(err, ErrRunning) {
		return fmt.Errorf("pins were lost, and another agent made new ones: %w", err)
	}
	if err == nil {
		missing, err = k.agent.datapath.MendPins()
	}
	if err != nil {
		err = fmt.Errorf("pins are missing, and cannot be made: %w", err)
	}
	known := k.pinned()
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
	k.mu.Lock()
	defer k.mu.Unlock()
	k.unpinned = err

	return nil
}

func (k *keeper) mendHooks() error {
	cfg := k.agent.cfg
	hooks, err := k.agent.datapath.Hooks()
	if err != nil {
		return err
	}
	for _, hook := range hooks {
		if hook.Problem != "" {
			cfg.Log.Warn("attaching again", "hook", hook.Name, "problem", hook.Problem)

			return k.agent.datapath.Attach()
		}
	}

	return nil
}

func (k *keeper) destroyOrphans() {
	n, err := k.agent.datapath.DestroyOrphans()
	if n > 0 {
		k.agent.cfg.Log.Info("ended UDP sockets whose backend is gone", "sockets", n)
		k.agent.mail.metrics.SocketsEnded(n)
	}
	if err != nil {
		k.agent.cfg.Log.Error("UDP sockets stay with backends that are gone; trying again", "error", err)
	}
	k.orphansLeft = err != nil
}
