package proxy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
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

// watchEnv makes this executable watch EndpointSlices. Its value is the path of a kubeconfig.
const watchEnv = "SLUICE_BENCH_WATCH"

// watching is what the process prints once it has all EndpointSlices.
const watching = "watching"

// Main does not return in a process that [StartWatch] has started. Call it first in main.
func Main() {
	kubeconfig := os.Getenv(watchEnv)
	if kubeconfig == "" {
		return
	}
	fmt.Fprintln(os.Stderr, watchSlices(context.Background(), kubeconfig))
	os.Exit(1)
}

// watchSlices follows all EndpointSlices, as client-go does it, and forgets them.
func watchSlices(ctx context.Context, kubeconfig string) error {
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
	listed := sync.OnceFunc(func() { fmt.Println(watching) })
	reflector := cache.NewReflectorWithOptions(from, &discoveryv1.EndpointSlice{}, forgetful{listed}, cache.ReflectorOptions{})

	return reflector.ListAndWatchWithContext(ctx)
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

// Watch is a process that follows all EndpointSlices of an API server by client-go, and
// does nothing with them: the least cost of a proxy on client-go.
type Watch struct{ cgroup *lab.Cgroup }

// StartWatch starts one where a proxy with this configuration would run, and returns when
// it knows all there is. The caller closes it.
func StartWatch(ctx context.Context, cfg Config) (w *Watch, err error) {
	w = new(Watch)
	if w.cgroup, err = lab.NewCgroup("watch"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("watch: %w", errors.Join(err, w.Close()))
		}
	}()
	name := filepath.Join(cfg.Directory, "watch.log")
	log, err := os.Create(name)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), watchEnv+"="+cfg.Kubeconfig)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := lab.Start(cfg.Namespace, w.cgroup, cmd); err != nil {
		return nil, err
	}
	go func() { _ = cmd.Wait() }() // the log has the reason
	ctx, stop := context.WithTimeout(ctx, time.Minute)
	defer stop()
	for {
		text, err := os.ReadFile(name)
		if err != nil || strings.Contains(string(text), watching) {
			return w, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w; it printed: %s", ctx.Err(), text)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// CPU returns the time on processors that it has taken so far.
func (w *Watch) CPU() (time.Duration, error) { return ReadCPU(w.cgroup) }

// Close ends it.
func (w *Watch) Close() error { return w.cgroup.Close() }
