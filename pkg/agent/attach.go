package agent

import (
	"time"

	"github.com/sluice-lb/sluice/pkg/datapath"
)

// whenLoaded is closed when the programs of hooks are loaded, or cannot be.
func whenLoaded(dp *datapath.Datapath) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = dp.Loaded() // attach returns it
	}()

	return done
}

// attachFirst attaches our programs once they are loaded, also if the API server
// cannot be asked: they work on the maps that an earlier agent filled. If its
// programs work on other maps, they stay until ours know every Service: our maps are
// new and empty.
func (a *agent) attachFirst() error {
	if err := a.datapath.Loaded(); err != nil {
		return err
	}
	others, err := a.datapath.OthersWork()
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

// attach attaches our programs, or has it tried again: somebody may have to make
// room first. With FailFast, an error is the end; that programs cannot be loaded
// always is.
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
		a.keeper.setEffective(err)
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
