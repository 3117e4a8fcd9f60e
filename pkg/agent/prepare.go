package agent

import (
	"errors"

	"github.com/sluice-lb/sluice/pkg/datapath"
)

// Prepare mounts bpffs where it is missing, and makes the maps and loads the
// programs once, as [Run] does before it attaches anything, so that a kernel that
// refuses them is found out. The maps stay pinned. It must be called in the network
// namespace of the node.
func Prepare(cfg Config) error {
	release, err := Lock(cfg.Socket)
	if err != nil {
		return err
	}
	err = datapath.MountBPFFS(cfg.Datapath.BPFRoot)
	if err == nil {
		var dp *datapath.Datapath
		if dp, err = datapath.Open(cfg.Datapath); err == nil {
			err = errors.Join(dp.Loaded(), dp.Close())
		}
	}

	return errors.Join(err, release())
}
