// Package agent wires the parts of Sluice together: it follows the cluster and
// the node, decides, and programs the datapath.
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

// Config is what an agent needs to know.
type Config struct {
	Version  string
	NodeName string // of this node's Node object, in lower case

	// Services come from the folder Manifests, or else from the API server
	// that Client talks to. APIServer is its address, for people. Stream is as in
	// [kube.Config].
	Manifests string
	Client    kubernetes.Interface
	Stream    *kube.Stream
	APIServer string

	Datapath          datapath.Config
	NodePortAddresses lb.NodePortAddresses
	// Local says how devices tell pods from everybody else.
	Local LocalDetector
	// Devices says which devices programs are attached to.
	Devices node.Rules
	// ThroughStack: packets to backends on other nodes always pass this node's network stack, also
	// if nothing there concerns them.
	ThroughStack bool
	// MasqueradeAll is kube-proxy's: backends see this node, whoever connects.
	MasqueradeAll bool
	// Algorithm is that of Services which do not name one.
	Algorithm lb.Algorithm
	// IgnoreExternalIPs is kube-proxy's feature gate AllowServiceExternalIPs,
	// switched off.
	IgnoreExternalIPs bool
	// NodeIP takes the place of the Node's primary address of its family, and
	// makes that family the first one. The zero value leaves it to the Node.
	NodeIP netip.Addr
	// FlowTimeouts say when devices forget flows.
	FlowTimeouts flow.Timeouts

	// HealthzAddress is where /healthz, /livez and /readyz are answered; the
	// zero value is nowhere. MetricsAddress is where metrics and the like are.
	HealthzAddress netip.AddrPort
	MetricsAddress netip.AddrPort
	// BindAddressHardFail: an address that cannot be listened on ends the agent.
	// Without, it is tried again and again.
	BindAddressHardFail bool
	// Profiling serves /debug/pprof and /debug/flags/v beside the metrics.
	Profiling bool
	// ServiceMetrics is how many Services have metrics of their own; the others
	// share one. Zero switches them off.
	ServiceMetrics int
	// Configz is what /configz shows, nil for nothing: kube-proxy's configuration
	// in its effect.
	Configz any
	// SyncPeriod is kube-proxy's: changes that are not programmed for twice as
	// long make the node unhealthy. Zero is 30 seconds.
	SyncPeriod time.Duration

	// FailFast: an agent that cannot attach everything at the first try ends.
	// Without, it tries again and again.
	FailFast bool
	// CheckNode is told what is known of the node, once, before anything is
	// programmed; nil is nobody. An error ends the agent.
	CheckNode func(NodeFacts) error

	Socket string // where the agent answers the other verbs

	// DriftInterval is how often everything in the maps is compared with what
	// should be there; zero is ten minutes.
	DriftInterval time.Duration
	// VerifyInterval is how often the attachment is checked, and mended;
	// zero is 30 seconds.
	VerifyInterval time.Duration

	Log *slog.Logger

	events func(kube.Event) // nil: nobody to tell
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

// source is what tells of the cluster.
type source interface {
	Run(ctx context.Context) error
	// Synced is closed when all Services and endpoints were told once.
	Synced() <-chan struct{}
	// NodeSynced is closed when the Node was told, or there is none.
	NodeSynced() <-chan struct{}
}

// agent is a running agent. The goroutine that has the turn owns all of it but what says
// otherwise.
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
	heavy    *heavyWork                      // nil: the loop decides about all Services
	loaded   <-chan struct{}                 // closed when our programs can be attached; nil: that was seen to
	attached chan struct{}                   // closed when our programs are in force
	again    <-chan time.Time                // when they are to be attached once more; nil: they need not

	failing    bool  // a write failed since all was known to be in force
	unwritten  bool  // a write failed in this round
	unwritable error // nothing can be written
	slices     int   // that the writer has written
	// throughStack is why packets to backends on other nodes pass the network stack, "" if they need not;
	// nil: that is not known yet.
	throughStack *string
	frontends    maps.Table[maps.FrontendKey, uint32]
	tables       maps.Tables // written by writer, read by anybody
	stock        stock
	grace        grace

	mail    *mailbox      // posted to by anybody
	source  source        // runs on its own
	lock    *MapsLock     // the keeper's
	keeper  *keeper       // runs on its own
	devices *deviceKeeper // runs on its own
	flows   *flowKeeper   // runs on its own

	proxy  *health.Proxy    // anybody's
	known  atomic.Bool      // synced, for anybody
	checks *health.Services // run on their own
	events *kube.Recorder   // runs on its own; nil: nobody to tell

	counts  *metrics.Services // anybody's; nil: nobody wants to know
	written atomic.Uint64     // moves when ids do
	lookout lookout           // anybody's
}

// Run runs an agent until ctx ends. It must be called in the network namespace
// of the node. What it has programmed and attached stays in force afterwards. The
// error wraps [ErrRunning] if another agent has the maps or the socket.
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
	mail := newMailbox()
	mail.posted = proxy.Queued
	source, err := newSource(cfg, sink{mail})
	if err != nil {
		return err
	}
	lock, err := LockMaps(cfg.Datapath.BPFRoot)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Release()) }()
	// What the cluster says is read while the kernel makes maps and verifies
	// programs: both take their time.
	collectSeldom()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return source.Run(ctx) })
	group.Go(func() (err error) {
		dp, err := datapath.Open(cfg.Datapath)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, dp.Close()) }()
		a, err := newAgent(cfg, dp, mail, proxy)
		if err != nil {
			return err
		}
		a.source, a.lock, a.events = source, lock, events

		return a.run(ctx)
	})

	return group.Wait()
}

// newAgent returns an agent that knows of no cluster yet, on maps that it takes
// over as they are.
func newAgent(cfg Config, dp *datapath.Datapath, mail *mailbox, proxy *health.Proxy) (*agent, error) {
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
		mail:     mail,

		frontends: dp.Maps().FrontendIDs,
		grace:     grace{wait: dp.Maps().WaitForPrograms},
		tables:    dp.Maps().Tables,
		proxy:     proxy,
		checks:    newHealthServices(cfg, proxy),
	}
	a.model.hadNodePorts = hadNodePorts
	a.devices = newDeviceKeeper(dp, cfg.Log, orDefault(cfg.VerifyInterval, verifyInterval), cfg.record)
	a.devices.failFast = cfg.FailFast
	a.devices.reaches = proxy.Attached
	a.keeper = newKeeper(a)
	a.flows, err = newFlowKeeper(flow.Config{
		Maps:     dp.Maps(),
		Timeouts: cfg.flowTimeouts(),
	}, cfg.Log, a.pruneAddrs)
	if err != nil {
		return nil, err
	}
	a.flows.record = cfg.record
	a.flows.metrics = mail.metrics
	a.counts, err = a.newServiceMetrics()

	return a, err
}

// nodePortAddrs returns the addresses on which node ports answer, by the map.
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
	group.Go(func() error { return a.keeper.run(ctx) })
	group.Go(func() error { return a.devices.run(ctx, a.attached) })
	group.Go(func() error { return a.flows.run(ctx) })
	group.Go(func() error { return a.checks.Run(ctx) })
	group.Go(func() error { return a.loop(ctx) })
	a.cfg.record(kube.Event{Reason: kube.ReasonStarting, Action: actionStart, Normal: true, Note: "Sluice " + a.cfg.Version})

	return group.Wait()
}

func (a *agent) setState(state node.State) {
	a.mail.post(func(m *model) {
		m.setLocalAddrs(state.Addresses)
		m.setDevices(state.Devices)
		m.setConcern(state.Concern)
	})
}
