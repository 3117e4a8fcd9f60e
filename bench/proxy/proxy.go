// Package proxy runs what the benchmark compares: Sluice, and the real kube-proxy in
// each of its modes, on a node of the lab.
//
// All get the same configuration file. It leaves everything at kube-proxy's
// defaults, except for settings of the whole machine.
package proxy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/status"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/realproxy"
	"github.com/sluice-lb/sluice/test/sluice"
)

// Kind is a proxy and its mode.
type Kind string

const (
	Sluice   Kind = "sluice"
	Baseline Kind = "baseline" // another build of Sluice
	// All others are modes of kube-proxy.
	IPTables       = Kind(realproxy.IPTables)
	IPTablesLegacy = Kind(realproxy.IPTablesLegacy)
	NFTables       = Kind(realproxy.NFTables)
	IPVS           = Kind(realproxy.IPVS)
)

// Kinds are all there are.
var Kinds = []Kind{Sluice, Baseline, IPTables, IPTablesLegacy, NFTables, IPVS}

// Missing returns an error that names what this machine lacks for a kind of proxy.
func Missing(kind Kind) error {
	if kind == Sluice || kind == Baseline {
		return nil
	}

	return realproxy.Missing(realproxy.Mode(kind))
}

// Config is what to run, and where.
type Config struct {
	Kind       Kind
	Namespace  *lab.Namespace // the node's
	Cgroup     *lab.Cgroup    // what Sluice attaches to; the proxy itself is not in it
	NodeName   string         // of a Node that the API server has
	Kubeconfig string         // of an API server that the node reaches
	Binary     string         // kube-proxy or sluice
	// Directory gets the proxy's files. It exists, no other proxy has it, and the
	// caller removes it when the proxy is closed.
	Directory string
	// Args are more flags of Sluice's agent; kube-proxy does not get them.
	Args []string
	// ResyncPeriod is how often kube-proxy writes all rules even if nothing has
	// changed. 0: its own default.
	ResyncPeriod time.Duration
}

// configFormat leaves the limits of conntrack alone, which are the machine's, and the
// score by which the kernel kills processes when memory is short. clusterCIDR holds the
// addresses of all pods of the lab.
const configFormat = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %q
hostnameOverride: %q
clusterCIDR: 10.244.0.0/16
clientConnection: {kubeconfig: %q}
conntrack: {maxPerCore: 0}
oomScoreAdj: 0
iptables: {syncPeriod: %[4]s}
ipvs: {syncPeriod: %[4]s}
nftables: {syncPeriod: %[4]s}
`

// Proxy is a proxy that runs. Its methods may be called from many goroutines,
// except Close.
type Proxy interface {
	// Version returns that of the program, and of the tools that it uses: "kube-proxy
	// v1.37.2, nftables v1.0.6 (Lester Gooch #5)".
	Version() string
	// Started returns when, all else being prepared, the process was about to be started.
	Started() time.Time
	PID() int
	// Cgroup returns the proxy's own cgroup.
	Cgroup() *lab.Cgroup
	// Synced returns when the proxy has programmed all that the API server had when it
	// started, or with an error when ctx or the proxy ends. The error quotes what the
	// proxy has printed. It costs the proxy next to nothing.
	Synced(ctx context.Context) error
	// Order returns the addresses, which are ClusterIPs with endpoints, in the order in
	// which a new connection is compared with them, and as they are if there is none.
	Order(addresses []netip.Addr) ([]netip.Addr, error)
	// Close ends the proxy and removes what it has programmed: of kube-proxy, all rules
	// of the namespace.
	Close() error
}

// Start starts the proxy, and returns before it has done anything. The caller
// closes it.
func Start(cfg Config) (p Proxy, err error) {
	switch {
	case cfg.Kind == Sluice || cfg.Kind == Baseline:
		p, err = startAgent(cfg)
	case slices.Contains(Kinds, cfg.Kind):
		p, err = startKubeProxy(cfg)
	default:
		err = fmt.Errorf("it is none of %q", Kinds)
	}
	if err != nil {
		return nil, fmt.Errorf("start of %s: %w", cfg.Kind, err)
	}

	return p, nil
}

// Writes returns how many system calls the proxy has made so far to write to its
// maps; slots, which it writes through memory, are not among them. It is false for all
// but Sluice, and takes some milliseconds of the agent's CPU.
func Writes(p Proxy) (uint64, bool, error) {
	a, ok := p.(*agent)
	if !ok || a.kind != Sluice { // another build counts in its own way
		return 0, false, nil
	}
	status, err := a.node.Client().Status(context.Background()) // it has a timeout
	if err != nil {
		return 0, false, fmt.Errorf("map writes: %w", err)
	}
	calls, _ := CountWrites(status)

	return calls, true, nil
}

// CountWrites returns how often an agent has written to maps: by system calls, and to arrays, which
// are in its memory.
func CountWrites(s status.Status) (calls, stores uint64) {
	for name, writes := range s.Writes {
		switch name {
		case maps.NameFrontends, maps.NamePools, maps.NameSlots, maps.NameBackends:
			stores += writes
		default:
			calls += writes
		}
	}

	return calls, stores
}

// kubeProxy is the real one, with rules that go with it.
type kubeProxy struct{ *realproxy.Proxy }

func startKubeProxy(cfg Config) (*kubeProxy, error) {
	mode := realproxy.Mode(cfg.Kind)
	p, err := realproxy.Start(realproxy.Config{
		Mode:      mode,
		Binary:    cfg.Binary,
		Config:    fmt.Sprintf(configFormat, mode.Name(), cfg.NodeName, cfg.Kubeconfig, cfg.ResyncPeriod),
		Namespace: cfg.Namespace,
		Directory: cfg.Directory,
	})

	return &kubeProxy{p}, err
}

func (k *kubeProxy) Close() error { return errors.Join(k.Proxy.Close(), k.Clean()) }

// agent is Sluice.
type agent struct {
	kind    Kind
	node    *sluice.Node
	version string
	started time.Time
}

func startAgent(cfg Config) (*agent, error) {
	path := filepath.Join(cfg.Directory, "config.yaml")
	// Its addresses of node ports are those of kube-proxy in this mode.
	text := fmt.Sprintf(configFormat, NFTables, cfg.NodeName, cfg.Kubeconfig, cfg.ResyncPeriod)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return nil, err
	}
	out, err := exec.Command(cfg.Binary, "version").Output()
	if err != nil {
		return nil, err
	}
	a := &agent{kind: cfg.Kind}
	a.version, _, _ = strings.Cut(strings.TrimSpace(string(out)), "\n")
	a.started = time.Now()
	a.node, err = sluice.NewNode(sluice.Config{
		Binary:     cfg.Binary,
		Namespace:  cfg.Namespace,
		Cgroup:     cfg.Cgroup,
		NodeName:   cfg.NodeName,
		Production: true,
		Args:       append([]string{"--config", path}, cfg.Args...),
	})
	if err != nil {
		return nil, err
	}
	if err := a.node.Start(); err != nil {
		return nil, errors.Join(err, a.node.Close())
	}

	return a, nil
}

func (a *agent) Version() string                                    { return a.version }
func (a *agent) Started() time.Time                                 { return a.started }
func (a *agent) PID() int                                           { return a.node.PID() }
func (a *agent) Cgroup() *lab.Cgroup                                { return a.node.AgentCgroup() }
func (a *agent) Order(addresses []netip.Addr) ([]netip.Addr, error) { return addresses, nil } // it looks them up
func (a *agent) Close() error                                       { return a.node.Close() }

// Synced asks the agent, which is a lot of work for it, only when it has printed
// something that makes it worth asking, or nothing for a second.
func (a *agent) Synced(ctx context.Context) error {
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
		tail := log[max(0, len(log)-4<<10):]
		if unix.Kill(a.PID(), 0) != nil {
			return fmt.Errorf("it ended: %s", tail)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w; it printed: %s", ctx.Err(), tail)
		case <-time.After(10 * time.Millisecond):
		}
	}
}
