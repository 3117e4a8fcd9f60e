package agent

import (
	"time"

	"github.com/sluice-lb/sluice/pkg/datapath"
)

// whenLoaded returns a channel that is closed when loading the programs of hooks has
// succeeded or failed.
func whenLoaded(dp *datapath.Datapath) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = dp.Loaded() // attach returns it
	}()

	return done
}

// attachFirst attaches our programs once they are loaded, even if the API server is
// unreachable, because they work on the maps that an earlier agent filled. If its
// programs work on other maps, ours are new and empty: its programs stay attached until
// ours know every Service.
func (a *agent) attachFirst() error {
	if err := a.datapath.Loaded(); err != nil {
		return err
	}
	others, err := a.datapath.OtherMapsInUse()
	if err != nil || others {
		return err
	}

	return a.attachSynced()
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

// attach attaches our programs. If that fails, it is tried again later, because another
// program may have to be removed first. With FailFast, it returns the error, and the agent
// ends. The agent also ends if programs cannot be loaded.
func (a *agent) attach() error {
	a.again = nil
	if err := a.datapath.Loaded(); err != nil {
		return err
	}
	if err := a.datapath.Attach(); err != nil {
		if a.cfg.FailFast {
			return err
		}
		a.cfg.Log.Error("not attached; trying again", "error", err)
		a.hooks.setEffective(err)
		a.again = time.After(attachRetry)

		return nil
	}
	if err := a.datapath.NotKept(); err != nil {
		a.cfg.Log.Warn("programs could not be kept; the next agent takes longer to start", "error", err)
	}
	close(a.attached)
	a.recordFeatures()
	a.cfg.Log.Info("attached", "version", a.cfg.Version, "cgroup", a.cfg.Datapath.CgroupRoot,
		"pins", a.cfg.Datapath.BPFRoot, "kernel", a.datapath.Features())

	return nil
}
