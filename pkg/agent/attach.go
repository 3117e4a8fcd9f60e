package agent

import (
	"time"

	"github.com/sluice-lb/sluice/pkg/datapath"
)

// attachFirst attaches our programs at once, unless those of an earlier agent
// are at work. They stay until ours know every Service: their maps may be of
// another layout, and full, when ours are new and empty.
func (a *agent) attachFirst() error {
	hooks, err := datapath.Hooks(a.cfg.Datapath.BPFRoot, a.cfg.Datapath.CgroupRoot)
	if err != nil {
		return err
	}
	for _, hook := range hooks {
		if hook.Problem == "" {
			return nil
		}
	}

	return a.attach()
}

// attachSynced attaches our programs if they are not yet.
func (a *agent) attachSynced() error {
	select {
	case <-a.attached:
		return nil
	default:
		return a.attach()
	}
}

// attachRetry is how long after a failure the next try comes.
const attachRetry = 5 * time.Second

// attach attaches our programs, or has it tried again: somebody may have to make
// room first. With FailFast, an error is the end.
func (a *agent) attach() error {
	a.again = nil
	if err := a.datapath.Attach(); err != nil {
		if a.cfg.FailFast {
			return err
		}
		a.cfg.Log.Error("not attached; trying again", "error", err)
		a.keeper.setEffective(err)
		a.again = time.After(attachRetry)

		return nil
	}
	close(a.attached)
	a.recordFeatures()
	a.cfg.Log.Info("attached", "version", a.cfg.Version, "cgroup", a.cfg.Datapath.CgroupRoot,
		"pins", a.cfg.Datapath.BPFRoot, "kernel", a.datapath.Features())

	return nil
}
