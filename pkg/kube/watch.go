package kube

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Config says what a [Watcher] follows, and whom it tells.
type Config struct {
	// Client talks to the API server. Its content type should be protobuf.
	Client kubernetes.Interface

	// Stream is how EndpointSlices are watched, which is nearly all that changes. Nil:
	// by Client, as all else, which costs more and takes longer.
	Stream *Stream

	// NodeName is the name of the Node object of this node, in lower case.
	NodeName string

	Sink Sink

	// Log gets what happens to the requests; nil is [slog.Default]. An API
	// server that cannot be reached is logged once, not once a retry.
	Log *slog.Logger

	// backoff is between tries. The zero value is 0.8 s, growing to 30 s.
	backoff wait.Backoff
}

// Validate returns an error that names the first field that cannot be used.
func (c Config) Validate() error {
	switch {
	case c.Client == nil:
		return errors.New("kube.Config: no Client")
	case c.NodeName == "":
		return errors.New("kube.Config: no NodeName")
	case c.Sink == nil:
		return errors.New("kube.Config: no Sink")
	}
	return nil
}

// Watcher follows an API server. It asks for the very requests that kube-proxy
// makes, so the same RBAC rules do.
type Watcher struct {
	cfg        Config
	synced     chan struct{}
	nodeSynced chan struct{}
}

// NewWatcher returns an error if cfg does not validate. It asks for nothing
// before [Watcher.Run].
func NewWatcher(cfg Config) (*Watcher, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if cfg.Stream != nil {
		cfg.Stream.drained = cfg.Sink.Flush
	}
	if cfg.backoff.Duration == 0 {
		// As client-go's own: an API server that is down should not be kept there.
		cfg.backoff = wait.Backoff{Duration: 800 * time.Millisecond, Cap: 30 * time.Second, Steps: 38, Factor: 2, Jitter: 1}
	}
	return &Watcher{cfg: cfg, synced: make(chan struct{}), nodeSynced: make(chan struct{})}, nil
}

// Synced is closed when the sink has been told about all Services and all
// EndpointSlices once. Before that, what it was not told about may still exist.
func (w *Watcher) Synced() <-chan struct{} { return w.synced }

// NodeSynced is closed when the sink has been told about the Node, or there is
// none. It has addresses only once its kubelet has said so: how long to wait
// for which is the caller's choice (kube-proxy: 30 s, then without).
func (w *Watcher) NodeSynced() <-chan struct{} { return w.nodeSynced }

// Run follows the API server until ctx ends, then returns nil. It is called
// once. Requests that fail are tried again, for as long as it takes; meanwhile
// what the sink was last told stays.
func (w *Watcher) Run(ctx context.Context) error {
	ctx = klog.NewContext(ctx, logr.FromSlogHandler(w.cfg.Log.Handler()))
	services, slices := make(chan struct{}), make(chan struct{})

	var running sync.WaitGroup
	for _, r := range w.resources(services, slices) {
		running.Go(func() { w.follow(ctx, r) })
	}
	for _, first := range []chan struct{}{services, slices} {
		select {
		case <-first:
		case <-ctx.Done():
			running.Wait()
			return nil
		}
	}
	close(w.synced)
	running.Wait()
	return nil
}

// resources is all that is asked for. The channels are closed when the sink has
// been told about all Services, all slices.
func (w *Watcher) resources(services, slices chan struct{}) []*resource {
	log, sink := w.cfg.Log, w.cfg.Sink
	core := w.cfg.Client.CoreV1()
	allServices := core.Services(metav1.NamespaceAll)
	allSlices := w.cfg.Client.DiscoveryV1().EndpointSlices(metav1.NamespaceAll)
	nodes := core.Nodes()
	cidrs := w.cfg.Client.NetworkingV1().ServiceCIDRs()
	return []*resource{
		{name: "services", log: log, sink: sink, example: &corev1.Service{}, synced: services,
			list: lister(selectServices, allServices.List), watch: watcher(selectServices, allServices.Watch)},
		{name: "endpointslices", log: log, sink: sink, example: &discoveryv1.EndpointSlice{}, synced: slices, stream: w.cfg.Stream,
			list: lister(selectSlices, allSlices.List), watch: watcher(selectSlices, allSlices.Watch)},
		{name: "nodes", log: log, sink: sink, example: &corev1.Node{}, synced: w.nodeSynced,
			list: lister(selectNode(w.cfg.NodeName), nodes.List), watch: watcher(selectNode(w.cfg.NodeName), nodes.Watch)},
		{name: "servicecidrs", log: log, sink: sink, example: &networkingv1.ServiceCIDR{}, synced: make(chan struct{}),
			list: lister(selectAll, cidrs.List), watch: watcher(selectAll, cidrs.Watch), optional: true},
	}
}

// follow keeps the sink told about one resource until ctx ends.
func (w *Watcher) follow(ctx context.Context, r *resource) {
	into := &store{ledger: newLedger(w.cfg.Sink, w.cfg.Log), replaced: sync.OnceFunc(func() { close(r.synced) })}
	defer into.close()
	if r.stream != nil {
		r.watch = directWatch(r.stream, into)
	}
	from := cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc:  r.listNoting,
		WatchFuncWithContext: r.watchNoting,
	}, w.cfg.Client)
	reflector := cache.NewReflectorWithOptions(from, r.example, into, cache.ReflectorOptions{
		Name:    r.name,
		Clock:   endingClock{ctx: ctx},
		Backoff: &w.cfg.backoff,
	})

	// Reflector.Run would do the same, and log every try that fails.
	delay := w.cfg.backoff.DelayWithReset(clock.RealClock{}, 2*time.Minute)
	_ = delay.Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		if err := reflector.ListAndWatchWithContext(ctx); err != nil {
			w.cfg.Log.Debug("request ended", "resource", r.name, "err", err)
		}
		return false, nil
	})
}
