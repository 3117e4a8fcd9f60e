// Package proxy runs what a benchmark compares: Sluice, and the real kube-proxy in
// each of its modes, in a node namespace of the lab.
//
// All get the same configuration file. It leaves everything at kube-proxy's
// defaults, but for what belongs to the machine.
package proxy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// Kind is a proxy and its mode.
type Kind string

// The kinds there are.
const (
	None           Kind = "ref" // no proxy at all
	Sluice         Kind = "sluice"
	Baseline       Kind = "baseline"        // another build of Sluice
	IPTables       Kind = "iptables"        // kube-proxy, with the iptables that writes nf_tables, as Debian's does
	IPTablesLegacy Kind = "iptables-legacy" // kube-proxy, with the iptables of old
	NFTables       Kind = "nftables"        // kube-proxy
	IPVS           Kind = "ipvs"            // kube-proxy
)

// Kinds returns all there are.
func Kinds() []Kind {
	return []Kind{None, Sluice, Baseline, IPTables, IPTablesLegacy, NFTables, IPVS}
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
	// ResyncPeriod is how often kube-proxy writes all there is even if nothing has
	// changed. 0: its own default.
	ResyncPeriod time.Duration
}

// Proxy is a proxy that runs. Its methods may be called from many goroutines,
// except Close.
type Proxy struct {
	cfg     Config
	program program
	version string
	started time.Time
}

// program is the difference between the kinds.
type program interface {
	// prepare writes what start needs.
	prepare() error
	version() (string, error)
	start() error
	pid() int // 0: there is no process
	// The others are for a program that runs.
	cgroup() *lab.Cgroup
	synced(ctx context.Context) error
	order(addresses []netip.Addr) ([]netip.Addr, error)
	close() error
}

// Start starts the proxy, and returns before it has done anything. The caller
// closes it.
func Start(cfg Config) (*Proxy, error) {
	p := &Proxy{cfg: cfg}
	switch {
	case cfg.Kind == None:
		p.program = nothing{}
	case cfg.Kind == Sluice || cfg.Kind == Baseline:
		p.program = &agent{cfg: cfg}
	case slices.Contains(Kinds(), cfg.Kind):
		p.program = &kubeProxy{cfg: cfg}
	default:
		return nil, fmt.Errorf("unknown kind of proxy %q: want one of %q", cfg.Kind, Kinds())
	}
	if err := p.start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start of %s: %w", cfg.Kind, err), p.Close())
	}

	return p, nil
}

func (p *Proxy) start() (err error) {
	if err := p.program.prepare(); err != nil {
		return err
	}
	if p.version, err = p.program.version(); err != nil {
		return err
	}
	p.started = time.Now()

	return p.program.start()
}

// Kind is what runs.
func (p *Proxy) Kind() Kind { return p.cfg.Kind }

// Version is that of the program, and of the tools that it uses: "kube-proxy
// v1.36.3, nftables v1.0.6 (Lester Gooch #5)".
func (p *Proxy) Version() string { return p.version }

// Started is when Start, all else being prepared, was about to start the process.
func (p *Proxy) Started() time.Time { return p.started }

// PID is the proxy's process, or 0 if there is none.
func (p *Proxy) PID() int { return p.program.pid() }

// Synced returns when the proxy has programmed all that the API server had when it
// started, or with an error when ctx or the proxy ends. The error quotes what the
// proxy has printed. It asks the proxy next to nothing.
func (p *Proxy) Synced(ctx context.Context) error {
	if err := p.program.synced(ctx); err != nil {
		return fmt.Errorf("sync of %s: %w", p.cfg.Kind, err)
	}

	return nil
}

// Order returns the addresses, which are ClusterIPs with endpoints, in the order in
// which the proxy tries them for a new connection: iptables' chain of Services,
// which kube-proxy writes in no order. If nothing is tried one by one, they are as
// they were given.
func (p *Proxy) Order(addresses []netip.Addr) ([]netip.Addr, error) {
	ordered, err := p.program.order(addresses)
	if err != nil {
		return nil, fmt.Errorf("order of %s: %w", p.cfg.Kind, err)
	}

	return ordered, nil
}

// Writes returns how many system calls the proxy has made so far to write to its
// maps; slots, which it writes through memory, are not among them. It is false for all
// but Sluice, and takes some milliseconds of the agent's CPU.
func (p *Proxy) Writes() (uint64, bool, error) {
	sluice, ok := p.program.(*agent)
	if !ok || p.cfg.Kind == Baseline {
		return 0, false, nil // another build counts in its own way
	}
	writes, err := sluice.writes()

	return writes, true, err
}

// MapMemory returns how many bytes the kernel has for the proxy's maps, as far as
// it reports them. It is false for all but Sluice.
func (p *Proxy) MapMemory() (int64, bool, error) {
	sluice, ok := p.program.(*agent)
	if !ok || p.cfg.Kind == Baseline {
		return 0, false, nil // its maps may have another layout
	}
	bytes, err := sluice.mapMemory()

	return bytes, true, err
}

// Close ends the proxy and removes what it has programmed: of kube-proxy, all rules
// of the namespace. Settings of the namespace and what conntrack remembers stay, and
// so do, with [IPTablesLegacy], empty tables with their hooks: a namespace that is to
// be as new is thrown away. Closing twice is not an error.
func (p *Proxy) Close() error {
	if err := p.program.close(); err != nil {
		return fmt.Errorf("end of %s: %w", p.cfg.Kind, err)
	}

	return nil
}

// nothing is no proxy.
type nothing struct{}

func (nothing) prepare() error                                     { return nil }
func (nothing) start() error                                       { return nil }
func (nothing) pid() int                                           { return 0 }
func (nothing) cgroup() *lab.Cgroup                                { return nil }
func (nothing) synced(context.Context) error                       { return nil }
func (nothing) order(addresses []netip.Addr) ([]netip.Addr, error) { return addresses, nil }
func (nothing) version() (string, error)                           { return "", nil }
func (nothing) close() error                                       { return nil }
