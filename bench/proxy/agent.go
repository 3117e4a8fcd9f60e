package proxy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// agent is Sluice.
type agent struct {
	cfg    Config
	config string       // file
	node   *sluice.Node // nil before start and after close
}

func (a *agent) prepare() (err error) {
	// Its addresses of node ports are those of kube-proxy in this mode.
	a.config, err = writeConfig(a.cfg, "nftables")

	return err
}

func (a *agent) start() (err error) {
	a.node, err = sluice.NewNode(sluice.Config{
		Binary:     a.cfg.Binary,
		Namespace:  a.cfg.Namespace,
		Cgroup:     a.cfg.Cgroup,
		NodeName:   a.cfg.NodeName,
		Production: true,
		Args:       []string{"--config", a.config},
	})
	if err != nil {
		return err
	}

	return a.node.Start()
}

func (a *agent) pid() int {
	if a.node == nil {
		return 0
	}

	return a.node.PID()
}

func (a *agent) cgroup() *lab.Cgroup { return a.node.AgentCgroup() }

// synced asks the agent, which is a lot of work for it, only when it has printed
// something that makes it worth asking, or nothing for a second.
func (a *agent) synced(ctx context.Context) error {
	var asked time.Time
	for seen := ""; ; {
		log := a.node.Log()
		if strings.Contains(log, "msg=synced") && (log != seen || time.Since(asked) > time.Second) {
			seen, asked = log, time.Now()
			status, err := a.node.Client().Status(ctx)
			if err == nil && sluice.Synced(status) {
				return nil
			}
		}
		if unix.Kill(a.pid(), 0) != nil {
			return fmt.Errorf("it ended: %s", tail(log))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w; it printed: %s", ctx.Err(), tail(log))
		case <-time.After(pollInterval):
		}
	}
}

// order returns the addresses as they are: Sluice looks Services up in a hash table.
func (a *agent) order(addresses []netip.Addr) ([]netip.Addr, error) { return addresses, nil }

func (a *agent) version() (string, error) {
	out, err := exec.Command(a.cfg.Binary, "version").Output()
	line, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")

	return line, err
}

func (a *agent) writes() (uint64, error) {
	status, err := a.node.Client().Status(context.Background()) // it has a timeout
	if err != nil {
		return 0, fmt.Errorf("map writes: %w", err)
	}
	var sum uint64
	for name, writes := range status.Writes {
		switch name {
		case maps.NameFrontends, maps.NamePools, maps.NameSlots, maps.NameBackends: // in memory
		default:
			sum += writes
		}
	}

	return sum, nil
}

func (a *agent) mapMemory() (int64, error) {
	pinned, err := maps.Load(a.node.BPFRoot())
	if err != nil {
		return 0, err
	}
	sizes, err := pinned.Sizes()
	if err := errors.Join(err, pinned.Close()); err != nil {
		return 0, err
	}
	var sum int64
	for _, size := range sizes {
		sum += int64(size.Bytes)
	}

	return sum, nil
}

func (a *agent) close() error {
	if a.node == nil {
		return nil
	}
	err := a.node.Close()
	a.node = nil

	return err
}
