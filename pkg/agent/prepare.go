package agent

import (
	"errors"

	"github.com/sluice-lb/sluice/pkg/datapath"
)

// Prepare mounts bpffs where it is missing, creates the maps and loads the programs once,
// as [Run] does before it attaches anything. It returns an error if the kernel refuses
// them. The maps stay pinned. It must be called in the network namespace of the node. The
// error wraps [ErrRunning] if an agent has the maps.
func Prepare(cfg Config) (err error) {
	if err := datapath.MountBPFFS(cfg.Datapath.BPFRoot); err != nil {
		return err
	}
	lock, err := LockMaps(cfg.Datapath.BPFRoot)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Release()) }()
	dp, err := datapath.Open(cfg.Datapath)
	if err != nil {
		return err
	}

	return errors.Join(dp.Loaded(), dp.Close())
}
