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
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Config is the configuration of a [Watcher].
type Config struct {
	// Client talks to the API server. Its content type should be protobuf.
	Client kubernetes.Interface

	// Dialer makes the connections of Client. If nil, [Watcher.Silence] and [Sink].SetDialed know
	// nothing.
	Dialer *Dialer

	// PodOptOut follows the Pods of this node and the Namespaces with the label [SocketKey],
	// too. It takes RBAC rules that kube-proxy does not have.
	PodOptOut bool

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
	resources  []*resource
	synced     chan struct{}
	nodeSynced chan struct{}
	podsSynced chan struct{}
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
	if cfg.Dialer != nil {
		cfg.Dialer.dialed = cfg.Sink.SetDialed
	}
	if cfg.backoff.Duration == 0 {
		// client-go's own values, so that retries do not keep an API server down.
		cfg.backoff = wait.Backoff{Duration: 800 * time.Millisecond, Cap: 30 * time.Second, Steps: 38, Factor: 2, Jitter: 1}
	}

	w := &Watcher{cfg: cfg, synced: make(chan struct{}), nodeSynced: make(chan struct{}), podsSynced: make(chan struct{})}
	w.resources = w.newResources()

	return w, nil
}

// Synced returns a channel that is closed when all Services and all EndpointSlices have been
// reported to the sink once. Before that, objects may exist that have not been reported.
func (w *Watcher) Synced() <-chan struct{} { return w.synced }

// NodeSynced returns a channel that is closed when the Node has been reported to the sink, or
// there is none. The Node may have no addresses until its kubelet has set them; the caller
// decides how long to wait for them (kube-proxy: 30 s).
func (w *Watcher) NodeSynced() <-chan struct{} { return w.nodeSynced }

// PodsSynced returns a channel that is closed when all Pods of this node and all Namespaces
// with a label have been reported to the sink once, if [Config].PodOptOut is set.
func (w *Watcher) PodsSynced() <-chan struct{} { return w.podsSynced }

// Silence returns for how long the watch of each resource has heard nothing: no event, no bookmark, and no answer to a
// ping of its connection. It lacks optional resources that the API server does not have or forbids. Any goroutine may call it.
func (w *Watcher) Silence() map[string]time.Duration {
	silence := map[string]time.Duration{}
	for _, r := range w.resources {
		if at, ok := r.hearing.at(); ok && w.cfg.Dialer != nil {
			silence[r.name] = time.Since(at)
		}
	}

	return silence
}

// Run follows the API server until ctx ends, then returns nil. It may be called
// once. It retries failed requests for ever; meanwhile the last reports to the sink stay in
// force.
func (w *Watcher) Run(ctx context.Context) error {
	ctx = klog.NewContext(ctx, logr.FromSlogHandler(w.cfg.Log.Handler()))
	var running sync.WaitGroup
	for _, r := range w.resources {
		running.Go(func() { w.follow(ctx, r) })
	}
	for _, part := range []chan struct{}{w.synced, w.nodeSynced, w.podsSynced} {
		running.Go(func() { w.closeAfter(ctx, part) })
	}
	running.Wait()

	return nil
}

// closeAfter closes part when all resources of it have been reported, unless ctx ends before or there are none.
func (w *Watcher) closeAfter(ctx context.Context, part chan struct{}) {
	some := false
	for _, r := range w.resources {
		if r.part != part {
			continue
		}
		some = true
		select {
		case <-r.synced:
		case <-ctx.Done():
			return
		}
	}
	if some {
		close(part)
	}
}

// newResources returns all resources that are requested.
func (w *Watcher) newResources() []*resource {
	core, cidrs := w.cfg.Client.CoreV1(), w.cfg.Client.NetworkingV1().ServiceCIDRs()
	services, slices := core.Services(metav1.NamespaceAll), w.cfg.Client.DiscoveryV1().EndpointSlices(metav1.NamespaceAll)
	resources := []*resource{
		{name: "services", example: &corev1.Service{}, part: w.synced, selects: selectServices,
			list: listOf(services.List), watch: services.Watch},
		{name: "endpointslices", example: &discoveryv1.EndpointSlice{}, part: w.synced, selects: selectSlices,
			list: listOf(slices.List), watch: slices.Watch},
		{name: "nodes", example: &corev1.Node{}, part: w.nodeSynced, selects: selectNode(w.cfg.NodeName),
			list: listOf(core.Nodes().List), watch: core.Nodes().Watch},
		{name: "servicecidrs", example: &networkingv1.ServiceCIDR{}, selects: func(*metav1.ListOptions) {},
			list: listOf(cidrs.List), watch: cidrs.Watch, optional: true},
	}
	if w.cfg.PodOptOut {
		pods, namespaces := core.Pods(metav1.NamespaceAll), core.Namespaces()
		resources = append(resources,
			&resource{name: "pods", example: &corev1.Pod{}, part: w.podsSynced, selects: selectPods(w.cfg.NodeName),
				list: listOf(pods.List), watch: pods.Watch},
			&resource{name: "namespaces", example: &corev1.Namespace{}, part: w.podsSynced, selects: selectNamespaces,
				list: listOf(namespaces.List), watch: namespaces.Watch})
	}
	for _, r := range resources {
		r.synced = make(chan struct{})
		r.hearing.stop(time.Now())
	}

	return resources
}

// follow reports one resource to the sink until ctx ends.
func (w *Watcher) follow(ctx context.Context, r *resource) {
	into := &store{tracker: newTracker(w.cfg.Sink, w.cfg.Log), replaced: sync.OnceFunc(func() { close(r.synced) })}
	from := cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			r.selects(&options)
			list, err := r.list(ctx, options)
			w.report(ctx, r, err)
			// An authorizer answers before it is known whether the API server has the resource, and kube-proxy's own
			// credentials may not list ServiceCIDRs.
			if r.optional && (apierrors.IsNotFound(err) || apierrors.IsForbidden(err)) {
				r.hearing.stop(time.Time{})
				sleep(ctx, absentRetry)
			}
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			r.selects(&options)
			traced, heard := r.hearing.traced(ctx)
			events, err := r.watch(traced, options)
			if options.SendInitialEvents == nil || !refused(err) {
				w.report(ctx, r, err)
			}
			if err != nil {
				return nil, err
			}

			return heard(events), nil
		},
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

// report logs and reports the outcome of a request if it differs from that of the last one.
func (w *Watcher) report(ctx context.Context, r *resource, err error) {
	switch {
	case ctx.Err() != nil:
	case err == nil && r.failure != "":
		r.failure = ""
		w.cfg.Log.Info("the API server answers again", "resource", r.name)
		w.cfg.Sink.Report(r.name, nil)
	case err != nil && r.failure != err.Error():
		r.failure = err.Error()
		w.cfg.Log.Warn("the API server does not answer; its last answers stay in force", "resource", r.name, "err", err)
		w.cfg.Sink.Report(r.name, []lb.Problem{{Object: "API server", Field: r.name, Message: r.failure}})
	}
}

// absentRetry is the time between requests to an API server that does not have an optional resource, or does not let us
// read it. It is long because only an upgrade or an administrator changes that.
const absentRetry = 10 * time.Minute

// resource is one kind of objects, the requests for them, and the outcome of the last one.
type resource struct {
	name     string // as in the request's path
	example  runtime.Object
	selects  func(*metav1.ListOptions) // sets the selectors
	list     cache.ListWithContextFunc
	watch    cache.WatchFuncWithContext
	part     chan struct{} // of the Watcher, closed when all resources of it have been reported; nil: it is of none
	synced   chan struct{} // closed when all objects have been reported once
	hearing  hearing
	optional bool   // an API server may not have it, or forbid it
	failure  string // the error of the last request, empty if it succeeded
}

// listOf returns list with the type that a Reflector takes.
func listOf[L runtime.Object](list func(context.Context, metav1.ListOptions) (L, error)) cache.ListWithContextFunc {
	return func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
		return list(ctx, options)
	}
}

// refused reports whether err is the answer of a server, other than that it is busy. A
// server that does not stream lists gives one: a plain list is requested next, and the
// outcome of that counts.
func refused(err error) bool {
	var answer apierrors.APIStatus
	return errors.As(err, &answer) && !apierrors.IsTooManyRequests(err)
}

// endingClock is a clock that does not wait beyond the end of ctx. With a real one, a
// Reflector does when it backs off from a server that refuses connections.
type endingClock struct {
	clock.RealClock
	ctx context.Context
}

func (c endingClock) After(d time.Duration) <-chan time.Time {
	after := make(chan time.Time, 1)
	go func() {
		sleep(c.ctx, d)
		after <- time.Now()
	}()
	return after
}

// sleep returns after d, or when ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// labelServiceProxyName marks a Service as one of another proxy, with any value.
const labelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// The select functions set the selectors of requests, which are those of kube-proxy, but for
// Services of other proxies: their addresses must not be taken for ones that no Service has. A
// watch reports an object that stops matching as deleted.

func selectServices(options *metav1.ListOptions) {
	options.FieldSelector = fields.OneTermNotEqualSelector("spec.clusterIP", corev1.ClusterIPNone).String()
}

func selectSlices(options *metav1.ListOptions) {
	options.LabelSelector = "!" + corev1.IsHeadlessService
}

func selectNamespaces(options *metav1.ListOptions) { options.LabelSelector = SocketKey }

func selectNode(name string) func(*metav1.ListOptions) {
	return func(options *metav1.ListOptions) {
		options.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
	}
}

// selected reports whether the selectors match an object, for objects that do not come
// from an API server.
func selected(obj any, nodeName string) bool {
	switch obj := obj.(type) {
	case *corev1.Service:
		return obj.Spec.ClusterIP != corev1.ClusterIPNone
	case *discoveryv1.EndpointSlice:
		_, headless := obj.Labels[corev1.IsHeadlessService]
		return !headless
	case *corev1.Node:
		return obj.Name == nodeName
	case *corev1.Pod:
		return obj.Spec.NodeName == nodeName
	case *corev1.Namespace:
		_, decides := obj.Labels[SocketKey]
		return decides
	}
	return true
}
