package agent

import "github.com/sluice-lb/sluice/pkg/datapath"

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

func (a *agent) attach() error {
	if err := a.datapath.Attach(); err != nil {
		return err
	}
	close(a.attached)
	a.cfg.Log.Info("attached", "version", a.cfg.Version, "cgroup", a.cfg.Datapath.CgroupRoot,
		"pins", a.cfg.Datapath.BPFRoot, "kernel", a.datapath.Features())

	return nil
}
