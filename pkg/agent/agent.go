// Package agent wires the parts of Sluice together: it follows the cluster and
// the node, resolves Services, and programs the datapath. [Run] is where reading begins: it
// starts all goroutines, and README.md lists what each of them owns.
package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/kubernetes"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/config"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/health"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/pkg/status"
)

// Config configures an agent.
type Config struct {
	Version  string
	NodeName string // of this node's Node object, in lower case

	// Services come from the folder Manifests, or else from the API server
	// that Client talks to. APIServer is its address, which is only shown. Dialer
	// is as in [kube.Config].
	Manifests string
	Client    kubernetes.Interface
	Dialer    *kube.Dialer
	APIServer string

	Datapath datapath.Config
	// FlowMemory is what the flow tables of Datapath take, in bytes.
	FlowMemory        uint64
	NodePortAddresses lb.NodePortAddresses
	// Local selects how devices distinguish pods of this node from other clients.
	Local node.LocalDetector
	// Devices selects the devices that programs are attached to.
	Devices node.Rules
	// ThroughStack makes packets to backends on other nodes always pass this node's network
	// stack, even if no rule there concerns them.
	ThroughStack bool
	// MasqueradeAll is kube-proxy's masqueradeAll: every backend sees this node as the client.
	MasqueradeAll bool
	// Algorithm is used for Services that do not name one.
	Algorithm lb.Algorithm
	// HashTableSize is the size of the tables of Services that hash, one of [maglev.Sizes], or zero
	// for [maglev.DefaultSize].
	HashTableSize int
	// Healing is what is done about backends that do not answer. Services can limit it.
	Healing lb.Healing
	// PodOptOut lets Pods and Namespaces opt out of translation at sockets: see
	// [kube.SocketKey].
	PodOptOut bool
	// IgnoreExternalIPs is set if kube-proxy's feature gate AllowServiceExternalIPs
	// is off.
	IgnoreExternalIPs bool
	// NodeIP takes the place of the Node's primary address of its family, and
	// makes that family the first one. The zero value leaves it to the Node.
	NodeIP netip.Addr
	// FlowTimeouts limit how long devices keep idle flows.
	FlowTimeouts flow.Timeouts

	// HealthzAddress serves /healthz, /livez and /readyz, MetricsAddress serves
	// metrics, profiles and kube-proxy's other paths. The zero value serves nothing.
	HealthzAddress netip.AddrPort
	MetricsAddress netip.AddrPort
	// BindAddressHardFail ends the agent if an address cannot be listened on. If it
	// is not set, the agent keeps trying.
	BindAddressHardFail bool
	// KubeProxyListens reports whether it is kube-proxy that has one of these addresses: that is no problem, it has them
	// until it is stopped. nil: it is not.
	KubeProxyListens func(netip.AddrPort) bool
	// Profiling serves /debug/pprof and /debug/flags/v beside the metrics.
	Profiling bool
	// ServiceMetrics limits how many Services have metrics of their own; the others
	// share one series. Zero switches these metrics off.
	ServiceMetrics int
	// BackendMetrics limits how many backends have metrics of their own.
	BackendMetrics int
	// Configz is kube-proxy's effective configuration, which /configz shows. Nil
	// shows none.
	Configz any
	// Ignored is what of the configuration is not known to the agent, for its status.
	Ignored []string
	// SyncPeriod is kube-proxy's syncPeriod: a change that is not programmed within
	// twice this time makes the node unhealthy. Zero is 30 seconds.
	SyncPeriod time.Duration

	// FailFast ends an agent that cannot attach everything at the first try. If it
	// is not set, the agent keeps trying.
	FailFast bool
	// CheckNode is called once with what is known of the node, before anything is
	// programmed. An error ends the agent. It may be nil.
	CheckNode func(config.Node) error

	Socket string // where the agent answers the other verbs

	// DriftInterval is the time between comparisons of the maps with the desired
	// state; zero is ten minutes.
	DriftInterval time.Duration
	// VerifyInterval is the time between checks of hooks, devices and pins, which
	// repair what is missing; zero is 30 seconds.
	VerifyInterval time.Duration

	Log *slog.Logger
	// LogLost returns how many lines of the log are lost. It may be nil.
	LogLost func() uint64
}

// Validate returns an error that names the first field that cannot be used.
func (c Config) Validate() error {
	switch {
	case c.NodeName == "":
		return errors.New("config: NodeName is empty")
	case c.Manifests == "" && c.Client == nil:
		return errors.New("config: neither Manifests nor Client is set")
	case c.Socket == "":
		return errors.New("config: Socket is empty")
	case c.Log == nil:
		return errors.New("config: Log is nil")
	}
	if err := c.Local.Rules(c.Devices).Validate(); err != nil {
		return fmt.Errorf("config: Devices: %w", err)
	}

	return c.Datapath.Validate()
}

// source follows the cluster: the API server, or a folder of manifests.
type source interface {
	Run(ctx context.Context) error
	// Synced is closed when all Services and endpoints were received once.
	Synced() <-chan struct{}
	// NodeSynced is closed when the Node was received, or there is none.
	NodeSynced() <-chan struct{}
	// PodsSynced is closed when all Pods and Namespaces were received once, if they are followed.
	PodsSynced() <-chan struct{}
	// Silence returns for how long nothing was heard by the watch of each resource. Any goroutine may call it.
	Silence() map[string]time.Duration
}

// Run runs an agent until ctx ends. It must be called in the network namespace
// of the node. Maps and programs stay in force afterwards. The error wraps
// [datapath.ErrRunning] if another agent has the maps or the socket.
func Run(ctx context.Context, cfg Config) (err error) {
	if err := cfg.Validate(); err != nil {
		return err
	}
	icmp, err := node.ReadICMPLimit()
	if err != nil {
		return err
	}
	cfg.VerifyInterval = cmp.Or(cfg.VerifyInterval, 30*time.Second)
	cfg.Devices = cfg.Local.Rules(cfg.Devices)
	cfg.Datapath.ScopeBySource = cfg.Local.BySource()
	cfg.Datapath.PodOptOut = cfg.PodOptOut
	cfg.Datapath.Heal = cfg.Healing >= lb.HealEject
	cfg.Datapath.Resteer = cfg.Healing == lb.HealResteer
	cfg.Datapath.NoStats = cfg.ServiceMetrics == 0
	cfg.Datapath.BackendHandshakes = cfg.BackendMetrics > 0
	cfg.Datapath.ICMPPerSecond, cfg.Datapath.ICMPBurst = icmp.PerSecond, icmp.Burst
	cfg.FlowTimeouts.UDPAnswered = cfg.Datapath.UDPIdle
	unlockSocket, err := status.LockSocket(cfg.Socket)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlockSocket()) }()
	var recorder *kube.Recorder // nil: there is no API server
	if cfg.Manifests == "" {
		recorder = kube.NewRecorder(kube.RecorderConfig{Client: cfg.Client, NodeName: cfg.NodeName, Log: cfg.Log})
	}
	proxy := health.NewProxy(health.ProxyConfig{Families: node.Families(), Timeout: 2 * cfg.SyncPeriod})
	p := parts{queue: queue.New[*model](proxy.Queued), metrics: metrics.NewSync(time.Now), proxy: proxy, events: recorder.Record}
	p.source, err = newSource(cfg, sink{p.queue, p.metrics})
	if err != nil {
		return err
	}
	lock, err := datapath.LockMaps(cfg.Datapath.BPFRoot)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Release()) }()

	collectBySize(startGC)
	group, ctx := errgroup.WithContext(ctx)
	if recorder != nil {
		group.Go(func() error { return recorder.Run(ctx) })
	}
	// Objects are read while the kernel creates maps and verifies programs, because
	// both take long.
	group.Go(func() error { return p.source.Run(ctx) })
	group.Go(func() (err error) {
		warnOfLimits(cfg)
		dp, err := datapath.Open(cfg.Datapath)
		if err != nil {
			return err
		}
		defer func() {
			if !errors.Is(err, errGoesOn) { // what goes on may read maps, in memory that Close takes away
				err = errors.Join(err, dp.Close())
			}
		}()

		return runOn(ctx, cfg, dp, lock, p)
	})

	return group.Wait()
}

// runOn runs an agent on the maps and programs of dp, which it adopts as they are. It adds to p
// what depends on them.
func runOn(ctx context.Context, cfg Config, dp *datapath.Datapath, lock *datapath.MapsLock, p parts) error {
	tables, started := dp.Maps().Tables, time.Now()
	if err := dp.LogSizes(cfg.Log); err != nil {
		return err
	}
	writer, err := reconcile.New(reconcile.Config{Tables: tables, TableSize: cfg.HashTableSize})
	if err != nil {
		return err
	}
	p.limits, p.hadNodePorts, p.hadClientIPs = reconcile.LimitsOf(tables), writer.NodePortAddrs(), writer.ClientIPs()
	p.writer, p.tables, p.firstSync = writer, tables, make(chan struct{})
	m, err := newMonitors(cfg, dp, lock, p)
	if err != nil {
		return err
	}
	p.checks = health.NewServices(health.ServicesConfig{
		Healthy: p.proxy.Healthy,
		Failed: func(service lb.ServiceName, address netip.AddrPort, err error) {
			cfg.Log.Error("health check node port does not answer; trying again", "service", service, "address", address, "error", err)
			p.events.CheckFailed(service, cfg.NodeName, err)
		},
	})
	p.waitForPrograms = dp.Maps().WaitForPrograms
	p.setDevices, p.throughStack = m.devices.Set, alwaysThroughStack(cfg, dp.Features())
	p.endStale = func() { m.hooks.FindOrphans(); m.flows.EndStale() }
	a := newAgent(cfg, p)
	if !cfg.Datapath.Heal {
		if err := health.Forget(tables.Health); err != nil {
			return err
		}
	}
	backends := health.NewBackends(health.BackendsConfig{Tables: tables, Suspected: p.events.Suspect, Log: cfg.Log})
	gatherers, services, err := a.newGatherers(dp, m, backends)
	if err != nil {
		return err
	}
	frontends, err := dp.Maps().ID(maps.NameFrontends)
	if err != nil {
		return err
	}
	a.probe = status.ProbeFrontends(datapath.ProbePort(frontends))
	a.writer.Set(status.ProbeService, time.Time{}, lb.Resolution{Frontends: a.probe})
	a.apply()

	group, ctx := errgroup.WithContext(ctx)
	// Its answers wait for no other goroutine, so that they show when one hangs.
	group.Go(func() error {
		return p.events.Failure(kube.ReasonHealthzFailed, health.Server{
			Name: "healthz", Address: cfg.HealthzAddress, HardFail: cfg.BindAddressHardFail, Log: cfg.Log,
			Listening: a.reportServer("healthzBindAddress", cfg.HealthzAddress),
			Handler: health.Handler(health.Config{
				Proxy: p.proxy, Eligible: a.model.eligible.Load, Observe: p.metrics.Probed,
				Ready: func() []string { return a.unready(m.hooks.Problems(), m.devices.Problems()) },
			}),
		}.Run(ctx))
	})
	group.Go(func() error {
		return p.events.Failure(kube.ReasonMetricsFailed, metrics.Server{
			Address: cfg.MetricsAddress, HardFail: cfg.BindAddressHardFail, Log: cfg.Log,
			Listening: a.reportServer("metricsBindAddress", cfg.MetricsAddress),
			Gatherers: gatherers, Profiling: cfg.Profiling, Configz: cfg.Configz,
		}.Run(ctx))
	})
	if services != nil {
		group.Go(func() error {
			return services.Run(ctx, func(err error) {
				if err != nil {
					cfg.Log.Error("counts of Services are not read; trying again", "error", err)
				}
			})
		})
	}
	group.Go(func() error {
		err := node.Watch(ctx, node.Config{Log: cfg.Log, Bypassed: datapath.Bypassed, Rules: cfg.Devices, Update: func(state node.State) {
			p.queue.Enqueue(func(m *model) { m.here.SetState(state) })
		}})
		if errors.Is(err, unix.EPERM) {
			err = fmt.Errorf("this process may not follow the node's devices, which takes NET_ADMIN: %w", err)
		}

		return err
	})
	group.Go(func() error { return a.newStatusServer(dp, m, started).Run(ctx) })
	group.Go(func() error { return m.hooks.Run(ctx) })
	group.Go(func() error { return m.devices.Run(ctx) })
	group.Go(func() error { return m.flows.Run(ctx) })
	group.Go(func() error { return p.checks.Run(ctx) })
	if cfg.Datapath.Heal {
		group.Go(func() error { return backends.Run(ctx) })
	}
	group.Go(func() error { return a.loop(ctx) })
	missing := dp.Features().Missing()
	for _, text := range missing {
		cfg.Log.Warn("the kernel lacks a feature", "missing", text)
	}
	p.events.Start(cfg.Version, missing)

	return awaitEnd(ctx, group.Wait, endTimeout)
}

// endTimeout limits how long parts of an agent that ends may go on. A kubelet that ends one does not wait longer either.
const endTimeout = 10 * time.Second

// errGoesOn is the error of an agent of which a part does not end. Its process has to, so that another one is started.
var errGoesOn = errors.New("a part of the agent goes on after its end")

// awaitEnd returns the error of waiting for what ends with ctx, or one that wraps [errGoesOn] if that takes longer than limit.
func awaitEnd(ctx context.Context, waiting func() error, limit time.Duration) error {
	ended := make(chan error, 1)
	go func() { ended <- waiting() }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(limit):
		return fmt.Errorf("%w: %v later: %w", errGoesOn, limit, context.Cause(ctx))
	}
}

// warnOfLimits logs limits that an agent may reach, before it does.
func warnOfLimits(cfg Config) {
	if files, err := datapath.MaxFiles(); err == nil && files < datapath.NeededFiles {
		cfg.Log.Warn("the limit of open files is low: maps of many Services and programs at devices take more", "limit", files, "enough", datapath.NeededFiles)
	}
	memory, err := node.ReadMemory()
	if need := datapath.Need(cfg.FlowMemory); err == nil && memory.LimitedBy != "" && memory.Limit < need {
		cfg.Log.Warn("the limit of memory is low: flow tables and maps of 10,000 Services take more",
			"limitMiB", memory.Limit>>20, "file", memory.LimitedBy, "enoughMiB", need>>20, "flowTablesMiB", cfg.FlowMemory>>20)
	}
}

// alwaysThroughStack returns why packets to backends on other nodes have to pass the network stack
// whatever is on the node, or "" if that depends on it.
func alwaysThroughStack(cfg Config, features datapath.Features) string {
	switch {
	case cfg.ThroughStack:
		return "--forwarding stack"
	case !features.FIBMTU:
		return "the kernel's lookup of routes knows no MTU (Linux 5.12)"
	default:
		return ""
	}
}

// monitors keep the datapath as it should be. Each has a goroutine of its own.
type monitors struct {
	hooks   *datapath.HookMonitor
	devices *datapath.DeviceMonitor
	flows   *flow.Monitor
}

func newMonitors(cfg Config, dp *datapath.Datapath, lock *datapath.MapsLock, p parts) (m monitors, err error) {
	m.hooks = datapath.NewHookMonitor(dp, datapath.HookMonitorConfig{
		Lock: lock, Synced: p.firstSync, Interval: cfg.VerifyInterval, FailFast: cfg.FailFast,
		Version: cfg.Version, Effective: p.proxy.Effective, SocketsEnded: p.metrics.SocketsEnded,
		Left: func(left map[maps.Addr]struct{}) {
			p.queue.Enqueue(func(*model) { p.writer.SetLeft(left) }) // the writer is due then
		},
		Record: p.events.Datapath, Log: cfg.Log,
	})
	m.devices = datapath.NewDeviceMonitor(dp, datapath.DeviceMonitorConfig{
		HooksTried: m.hooks.Tried(), Interval: cfg.VerifyInterval, FailFast: cfg.FailFast,
		UplinksAttached: p.proxy.Attached, Record: p.events.Datapath, Log: cfg.Log,
	})
	m.flows, err = flow.NewMonitor(flow.MonitorConfig{
		Config:    flow.Config{Maps: dp.Maps(), Timeouts: cfg.FlowTimeouts},
		Swept:     func(inUse flow.OriginalDsts) { pruneAddrs(p.queue, p.writer, inUse) },
		Searched:  p.metrics.Cleaned,
		Emergency: p.events.Emergency, Log: cfg.Log,
	})

	return m, err
}

// newGatherers returns all metrics, and those of Services again, nil if they are not counted. It
// must be called before ids are assigned, see [metrics.NewServices].
func (a *agent) newGatherers(dp *datapath.Datapath, m monitors, backends *health.Backends) (metrics.Gatherers, *metrics.Services, error) {
	stats := status.NodeStats{
		Model: func(ctx context.Context) (metrics.Node, error) { return queue.Ask(ctx, a.queue, a.modelStats) },
		Hooks: m.hooks, Devices: m.devices, Flows: m.flows.Status, Healing: backends.Totals, Silence: a.source.Silence, Datapath: dp,
	}
	tables := dp.Maps().Tables
	registry, err := metrics.NewRegistry(a.metrics, metrics.NewNodeCollector(a.cfg.Version, stats.Node),
		metrics.NewBackends(tables, a.cfg.BackendMetrics, a.written.Load))
	if err != nil || a.cfg.ServiceMetrics == 0 {
		return metrics.Gatherers{registry}, nil, err
	}
	services, err := metrics.NewServices(metrics.ServicesConfig{
		Tables: tables,
		Stats:  dp.Maps().Stats, Ended: m.flows.EndedBytes, Limit: a.cfg.ServiceMetrics, Moved: a.written.Load,
	})
	if err != nil {
		return nil, nil, err
	}
	stats.Refusals = services.Refusals

	return metrics.Gatherers{services, registry}, services, nil
}

// newStatusServer returns the server that answers the other verbs.
func (a *agent) newStatusServer(dp *datapath.Datapath, m monitors, started time.Time) status.Server {
	return status.Server{
		Socket: a.cfg.Socket, Log: a.cfg.Log, Tables: a.tables,
		Ping: func(ctx context.Context) error {
			_, err := queue.Ask(ctx, a.queue, func() struct{} { return struct{}{} })

			return err
		},
		Status: func(ctx context.Context) (status.Status, error) {
			s, err := a.status(ctx)
			s.Started, s.Silence = started, a.source.Silence()

			return s, err
		},
		Model:    a.services,
		Try:      a.try,
		Datapath: dp, Hooks: m.hooks, Devices: m.devices, Flows: m.flows.Status,
	}
}

func newSource(cfg Config, to kube.Sink) (source, error) {
	if cfg.Manifests != "" {
		return kube.NewManifests(kube.ManifestsConfig{
			Dir: cfg.Manifests, NodeName: cfg.NodeName, Sink: to, Log: cfg.Log,
		})
	}

	return kube.NewWatcher(kube.Config{
		Client: cfg.Client, Dialer: cfg.Dialer, PodOptOut: cfg.PodOptOut, NodeName: cfg.NodeName, Sink: to, Log: cfg.Log,
	})
}

// GOGC, in percent of the live heap. Nearly all that a start reads is garbage at once, and
// collecting it competes with the verifier for processors. In a large cluster memory counts
// more: garbage is limited to mostWaste bytes, or to a quarter of the live heap if that is more.
const (
	startGC   = 200
	usualGC   = 100
	leastGC   = 25
	mostWaste = 100 << 20
)

// collectBySize sets GOGC by the size of the heap, to most percent at most, unless the
// environment sets it.
func collectBySize(most int) {
	if os.Getenv("GOGC") != "" {
		return
	}
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	debug.SetGCPercent(gcPercent(stats.HeapAlloc, most))
}

func gcPercent(kept uint64, most int) int {
	return min(most, int(max(leastGC, mostWaste*100/max(kept, 1))))
}
