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

// Config is the configuration of a [Watcher].
type Config struct {
	// Client talks to the API server. Its content type should be protobuf.
	Client kubernetes.Interface

	// Stream watches EndpointSlices, which are nearly all changes. If nil, Client does,
	// which costs more and takes longer.
	Stream *Stream

	// NodeName is the name of the Node object of this node, in lower case.
	NodeName string

	Sink Sink

	// Log is for failed requests; nil is [slog.Default]. An API server that cannot be
	// reached is logged once, not once per retry.
	Log *slog.Logger

	// backoff is the time between tries. The zero value means 0.8 s, growing to 30 s.
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

// Watcher follows an API server. It makes the same requests as kube-proxy, so it needs the
// same RBAC rules.
type Watcher struct {
	cfg        Config
	synced     chan struct{}
	nodeSynced chan struct{}
}

// NewWatcher returns an error if cfg does not validate. It makes no requests before
// [Watcher.Run].
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
		// client-go's own values, so that retries do not keep an API server down.
		cfg.backoff = wait.Backoff{Duration: 800 * time.Millisecond, Cap: 30 * time.Second, Steps: 38, Factor: 2, Jitter: 1}
	}
	return &Watcher{cfg: cfg, synced: make(chan struct{}), nodeSynced: make(chan struct{})}, nil
}

// Synced returns a channel that is closed when all Services and all EndpointSlices have been
// reported to the sink once. Before that, objects may exist that have not been reported.
func (w *Watcher) Synced() <-chan struct{} { return w.synced }

// NodeSynced returns a channel that is closed when the Node has been reported to the sink, or
// there is none. The Node may have no addresses until its kubelet has set them; the caller
// decides how long to wait for them (kube-proxy: 30 s).
func (w *Watcher) NodeSynced() <-chan struct{} { return w.nodeSynced }

// Run follows the API server until ctx ends, then returns nil. It may be called
// once. It retries failed requests for ever; meanwhile the last reports to the sink stay in
// force.
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

// resources returns all resources that are requested. The channels are closed when all
// Services and all EndpointSlices have been reported.
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

// follow reports one resource to the sink until ctx ends.
func (w *Watcher) follow(ctx context.Context, r *resource) {
	into := &store{tracker: newTracker(w.cfg.Sink, w.cfg.Log), replaced: sync.OnceFunc(func() { close(r.synced) })}
	defer into.close()
	if r.stream != nil {
		r.watch = directWatch(r.stream, into)
	}
	from := cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc:  r.listReported,
		WatchFuncWithContext: r.watchReported,
	}, w.cfg.Client)
	reflector := cache.NewReflectorWithOptions(from, r.example, into, cache.ReflectorOptions{
		Name:    r.name,
		Clock:   endingClock{ctx: ctx},
		Backoff: &w.cfg.backoff,
	})

	// Reflector.Run would do the same, but log every try that fails.
	delay := w.cfg.backoff.DelayWithReset(clock.RealClock{}, 2*time.Minute)
	_ = delay.Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		if err := reflector.ListAndWatchWithContext(ctx); err != nil {
			w.cfg.Log.Debug("request ended", "resource", r.name, "err", err)
		}
		return false, nil
	})
}
