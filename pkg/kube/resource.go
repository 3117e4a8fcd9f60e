package kube

import (
	"context"
	"errors"
	"log/slog"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// absentRetry is the time between requests to an API server that does not have a resource.
// It is long because only an upgrade adds the resource.
const absentRetry = 10 * time.Minute

// resource is one kind of objects, the requests for them, and the outcome of the last one.
type resource struct {
	name     string // as in the request's path
	example  runtime.Object
	list     cache.ListWithContextFunc
	watch    cache.WatchFuncWithContext
	stream   *Stream       // if not nil, [directWatch] replaces watch
	synced   chan struct{} // closed when all objects have been reported once
	optional bool          // an API server may not have it

	log  *slog.Logger
	sink Sink

	// failure is the error of the last request, empty if it succeeded.
	failure string
}

// lister returns list with a selector, in the type that a Reflector takes.
func lister[L runtime.Object](sel func(*metav1.ListOptions), list func(context.Context, metav1.ListOptions) (L, error)) cache.ListWithContextFunc {
	return func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
		sel(&options)
		return list(ctx, options)
	}
}

// watcher returns open with a selector.
func watcher(sel func(*metav1.ListOptions), open cache.WatchFuncWithContext) cache.WatchFuncWithContext {
	return func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
		sel(&options)
		return open(ctx, options)
	}
}

// listReported lists and reports the outcome.
func (r *resource) listReported(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	list, err := r.list(ctx, options)
	r.report(ctx, err)
	if r.optional && apierrors.IsNotFound(err) {
		sleep(ctx, absentRetry)
	}
	return list, err
}

// watchReported watches and reports the outcome.
func (r *resource) watchReported(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	w, err := r.watch(ctx, options)
	if options.SendInitialEvents == nil || !refused(err) {
		r.report(ctx, err)
	}
	return w, err
}

// refused reports whether err is the answer of a server, other than that it is busy. A
// server that does not stream lists gives one: a plain list is requested next, and the
// outcome of that counts.
func refused(err error) bool {
	var answer apierrors.APIStatus
	return errors.As(err, &answer) && !apierrors.IsTooManyRequests(err)
}

// report logs and reports the outcome of a request if it differs from that of the last one.
func (r *resource) report(ctx context.Context, err error) {
	switch {
	case ctx.Err() != nil:
	case err == nil && r.failure != "":
		r.failure = ""
		r.log.Info("the API server answers again", "resource", r.name)
		r.sink.Report(r.name, nil)
	case err != nil && r.failure != err.Error():
		r.failure = err.Error()
		r.log.Warn("the API server does not answer; its last answers stay in force", "resource", r.name, "err", err)
		r.sink.Report(r.name, []lb.Problem{{Object: "API server", Field: r.name, Message: r.failure}})
	}
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
