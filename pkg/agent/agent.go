// Package agent wires the parts of Sluice together: it follows the cluster and
// the node, resolves Services, and programs the datapath.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/health"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// Config configures an agent.
type Config struct {
	Version  string
	NodeName string // of this node's Node object, in lower case

	// Services come from the folder Manifests, or else from the API server
	// that Client talks to. APIServer is its address, which is only shown. Stream
	// is as in [kube.Config].
	Manifests string
	Client    kubernetes.Interface
	Stream    *kube.Stream
	APIServer string

	Datapath          datapath.Config
	NodePortAddresses lb.NodePortAddresses
	// Local selects how devices distinguish pods of this node from other clients.
	Local LocalDetector
	// Devices selects the devices that programs are attached to.
	Devices node.Rules
	// ThroughStack makes packets to backends on other nodes always pass this node's network
	// stack, even if no rule there concerns them.
	ThroughStack bool
	// MasqueradeAll is kube-proxy's masqueradeAll: every backend sees this node as the client.
	MasqueradeAll bool
	// Algorithm is used for Services that do not name one.
	Algorithm lb.Algorithm
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
	// Profiling serves /debug/pprof and /debug/flags/v beside the metrics.
	Profiling bool
	// ServiceMetrics limits how many Services have metrics of their own; the others
	// share one series. Zero switches these metrics off.
	ServiceMetrics int
	// Configz is kube-proxy's effective configuration, which /configz shows. Nil
	// shows none.
	Configz any
	// SyncPeriod is kube-proxy's syncPeriod: a change that is not programmed within
	// twice this time makes the node unhealthy. Zero is 30 seconds.
	SyncPeriod time.Duration

	// FailFast ends an agent that cannot attach everything at the first try. If it
	// is not set, the agent keeps trying.
	FailFast bool
	// CheckNode is called once with what is known of the node, before anything is
	// programmed. An error ends the agent. It may be nil.
	CheckNode func(NodeFacts) error

	Socket string // where the agent answers the other verbs

	// DriftInterval is the time between comparisons of the maps with the desired
	// state; zero is ten minutes.
	DriftInterval time.Duration
	// VerifyInterval is the time between checks of hooks, devices and pins, which
	// repair what is missing; zero is 30 seconds.
	VerifyInterval time.Duration

	Log *slog.Logger

	events func(kube.Event) // nil: Events are not recorded
	limits lb.Limits        // of one Service
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
	if err := c.Local.Validate(); err != nil {
		return err
	}

	return c.Datapath.Validate()
}

// ParseUDPMode reads "all", "connected" or "off".
func ParseUDPMode(text string) (bpf.UDPMode, error) {
	switch text {
	case "all":
		return bpf.UDPAll, nil
	case "connected":
		return bpf.UDPConnected, nil
	case "off":
		return bpf.UDPOff, nil
	}

	return 0, fmt.Errorf("%q: it is all, connected or off", text)
}

// source follows the cluster: the API server, or a folder of manifests.
type source interface {
	Run(ctx context.Context) error
	// Synced is closed when all Services and endpoints were received once.
	Synced() <-chan struct{}
	// NodeSynced is closed when the Node was received, or there is none.
	NodeSynced() <-chan struct{}
}

// agent is a running agent. The goroutine that has the turn owns it, except for fields whose comment
// names another owner.
type agent struct {
	turn     sync.Mutex
	cfg      Config
	started  time.Time
	datapath *datapath.Datapath
	writer   *reconcile.Reconciler
	now      func() time.Time // the clock of writer; nil: [time.Now]
	model    *model
	synced   bool
	complete bool                            // all that is known has been programmed once
	resolve  func(lb.Snapshot) lb.Resolution // nil: [lb.Snapshot.Resolve]
	heavy    *heavyWork                      // nil: the loop resolves all Services
	loaded   <-chan struct{}                 // closed when our programs can be attached; nil: the loop has seen it
	attached chan struct{}                   // closed when our programs are attached
	again    <-chan time.Time                // the next try to attach; nil: none is due

	failing    bool  // a write failed since all was known to be in force
	unwritten  bool  // a write failed in this round
	unwritable error // nothing can be written
	slices     int   // that the writer has written
	// throughStack is why packets to backends on other nodes pass the network stack, "" if they need not;
	// nil: that is not known yet.
	throughStack *string
	frontends    maps.Table[maps.FrontendKey, uint32]
	tables       maps.Tables // written by writer, read by any goroutine
	impaired     impaired
	grace        grace

	queue   *eventQueue    // any goroutine may add to it
	source  source         // runs on its own
	lock    *MapsLock      // used by hooks
	hooks   *hookMonitor   // runs on its own
	devices *deviceMonitor // runs on its own
	flows   *flowMonitor   // runs on its own

	proxy  *health.Proxy    // any goroutine
	known  atomic.Bool      // synced, for any goroutine
	checks *health.Services // run on their own
	events *kube.Recorder   // runs on its own; nil: no API server

	counts  *metrics.Services // any goroutine; nil: switched off
	written atomic.Uint64     // moves when ids do
	stats   statsCache        // any goroutine
}

// Run runs an agent until ctx ends. It must be called in the network namespace
// of the node. Maps and programs stay in force afterwards. The error wraps
// [ErrRunning] if another agent has the maps or the socket.
func Run(ctx context.Context, cfg Config) (err error) {
	if err := cfg.Validate(); err != nil {
		return err
	}
	if cfg.Devices, err = deviceRules(cfg); err != nil {
		return err
	}
	cfg.Datapath.ScopeBySource = cfg.Local.BySource()
	cfg.Datapath.NoStats = cfg.ServiceMetrics == 0
	icmp, err := node.ReadICMPLimit()
	if err != nil {
		return err
	}
	cfg.Datapath.ICMPPerSecond, cfg.Datapath.ICMPBurst = icmp.PerSecond, icmp.Burst
	unlockSocket, err := lockSocket(cfg.Socket)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlockSocket()) }()
	events := newRecorder(&cfg)
	proxy := newProxy(cfg)
	queue := newEventQueue()
	queue.enqueued = proxy.Queued
	source, err := newSource(cfg, sink{queue})
	if err != nil {
		return err
	}
	lock, err := LockMaps(cfg.Datapath.BPFRoot)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Release()) }()
	// Objects are read while the kernel creates maps and verifies programs, because
	// both take long.
	collectSeldom()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return source.Run(ctx) })
	group.Go(func() (err error) {
		dp, err := datapath.Open(cfg.Datapath)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, dp.Close()) }()
		a, err := newAgent(cfg, dp, queue, proxy)
		if err != nil {
			return err
		}
		a.source, a.lock, a.events = source, lock, events

		return a.run(ctx)
	})

	return group.Wait()
}

// newAgent returns an agent that has received no object yet, and adopts the maps as
// they are.
func newAgent(cfg Config, dp *datapath.Datapath, queue *eventQueue, proxy *health.Proxy) (*agent, error) {
	if err := logMaps(cfg.Log, dp); err != nil {
		return nil, err
	}
	hadNodePorts, err := nodePortAddrs(dp.Maps().Addrs)
	if err != nil {
		return nil, err
	}
	writer, err := reconcile.New(reconcile.Config{Tables: dp.Maps().Tables})
	if err != nil {
		return nil, err
	}
	cfg.limits = limitsOf(dp.Maps().Tables)
	a := &agent{
		cfg:      cfg,
		started:  time.Now(),
		datapath: dp,
		writer:   writer,
		model:    newModel(cfg),
		loaded:   whenLoaded(dp),
		attached: make(chan struct{}),
		queue:    queue,

		frontends: dp.Maps().FrontendIDs,
		grace:     grace{wait: dp.Maps().WaitForPrograms},
		tables:    dp.Maps().Tables,
		proxy:     proxy,
		checks:    newHealthServices(cfg, proxy),
	}
	a.model.hadNodePorts = hadNodePorts
	a.devices = newDeviceMonitor(dp, cfg.Log, orDefault(cfg.VerifyInterval, verifyInterval), cfg.record)
	a.devices.failFast = cfg.FailFast
	a.devices.reaches = proxy.Attached
	a.hooks = newHookMonitor(a)
	a.flows, err = newFlowMonitor(flow.Config{
		Maps:     dp.Maps(),
		Timeouts: cfg.flowTimeouts(),
	}, cfg.Log, a.pruneAddrs)
	if err != nil {
		return nil, err
	}
	a.flows.record = cfg.record
	a.flows.metrics = queue.metrics
	a.counts, err = a.newServiceMetrics()

	return a, err
}

// nodePortAddrs returns the addresses on which node ports answer according to the map.
func nodePortAddrs(addrs maps.Table[maps.Addr, maps.AddrUse]) (map[netip.Addr]bool, error) {
	answer := make(map[netip.Addr]bool)
	for e, err := range addrs.All() {
		if err != nil {
			return nil, err
		}
		if e.Value.Flags&maps.AddrNodePort != 0 {
			answer[e.Key.IP()] = true
		}
	}

	return answer, nil
}

func newSource(cfg Config, to kube.Sink) (source, error) {
	if cfg.Manifests != "" {
		return kube.NewManifests(kube.ManifestsConfig{
			Dir: cfg.Manifests, NodeName: cfg.NodeName, Sink: to, Log: cfg.Log,
		})
	}

	return kube.NewWatcher(kube.Config{
		Client: cfg.Client, Stream: cfg.Stream, NodeName: cfg.NodeName, Sink: to, Log: cfg.Log,
	})
}

func (a *agent) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return a.serveHealth(ctx) })
	group.Go(func() error { return a.serveMetrics(ctx) })
	group.Go(func() error { return a.runServiceMetrics(ctx) })
	group.Go(func() error { return a.runEvents(ctx) })
	a.writer.Set(probeService, time.Time{}, lb.Resolution{Frontends: []lb.Frontend{probeFrontend()}})
	a.apply()
	group.Go(func() error { return node.Watch(ctx, node.Config{Update: a.setState, Log: a.cfg.Log}) })
	group.Go(func() error { return a.serve(ctx) })
	group.Go(func() error { return a.hooks.run(ctx) })
	group.Go(func() error { return a.devices.run(ctx, a.attached) })
	group.Go(func() error { return a.flows.run(ctx) })
	group.Go(func() error { return a.checks.Run(ctx) })
	group.Go(func() error { return a.loop(ctx) })
	a.cfg.record(kube.Event{Reason: kube.ReasonStarting, Action: actionStart, Normal: true, Note: "Sluice " + a.cfg.Version})

	return group.Wait()
}

func (a *agent) setState(state node.State) {
	a.queue.enqueue(func(m *model) {
		m.setLocalAddrs(state.Addresses)
		m.setDevices(state.Devices)
		m.setConcern(state.Concern)
	})
}
