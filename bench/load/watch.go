package load

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/sluice-lb/sluice/test/lab"
)

// Watch is a process that follows all EndpointSlices of an API server by client-go, and
// does nothing with them: the least cost of a proxy on client-go.
type Watch struct{ process *process }

// StartWatch starts one in a namespace and a cgroup, and returns when it knows all there is. The
// caller closes it.
func StartWatch(ctx context.Context, ns *lab.Namespace, cg *lab.Cgroup, kubeconfig string) (*Watch, error) {
	ctx, stop := context.WithTimeout(ctx, time.Minute)
	defer stop()
	p, err := startRole(ns, cg, "watcher", 0)
	if err == nil {
		defer context.AfterFunc(ctx, func() { _ = p.kill() })()
		err = p.awaitReady(kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("watch: %w", errors.Join(err, context.Cause(ctx)))
	}

	return &Watch{p}, nil
}

// Close ends it.
func (w *Watch) Close() error { return w.process.close() }

// follow is the process: it follows all EndpointSlices, as client-go does it, and forgets them.
func follow(stdin io.Reader, stdout io.Writer) error {
	var kubeconfig string
	if err := json.NewDecoder(stdin).Decode(&kubeconfig); err != nil {
		return fmt.Errorf("read path of kubeconfig: %w", err)
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	cfg.ContentType = runtime.ContentTypeProtobuf
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	slices := client.DiscoveryV1().EndpointSlices(metav1.NamespaceAll)
	from := cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			return slices.List(ctx, options)
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			return slices.Watch(ctx, options)
		},
	}, client)
	listed := sync.OnceFunc(func() { fmt.Fprintln(stdout, ready) })
	reflector := cache.NewReflectorWithOptions(from, &discoveryv1.EndpointSlice{}, forgetful{listed}, cache.ReflectorOptions{})

	return reflector.ListAndWatchWithContext(context.Background())
}

// forgetful is a store that keeps nothing.
type forgetful struct{ listed func() }

func (forgetful) Add(any) error    { return nil }
func (forgetful) Update(any) error { return nil }
func (forgetful) Delete(any) error { return nil }
func (forgetful) Resync() error    { return nil }

func (f forgetful) Replace([]any, string) error {
	f.listed()

	return nil
}
