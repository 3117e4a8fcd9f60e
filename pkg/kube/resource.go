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

// absentRetry is how long an API server that does not know a resource is left
// alone: it takes an upgrade to learn it.
const absentRetry = 10 * time.Minute

// resource is one kind of objects, how to ask an API server for them, and how
// that goes.
type resource struct {
	name     string // as in the request's path
	example  runtime.Object
	list     cache.ListWithContextFunc
	watch    cache.WatchFuncWithContext
	stream   *Stream       // in place of watch, if not nil: for [directWatch]
	synced   chan struct{} // closed when the sink has been told about all once
	optional bool          // an API server need not know it

	log  *slog.Logger
	sink Sink

	// failure is what the last request met with, empty if it went well.
	failure string
}

// lister is list as a Reflector wants it, with a selector.
func lister[L runtime.Object](sel func(*metav1.ListOptions), list func(context.Context, metav1.ListOptions) (L, error)) cache.ListWithContextFunc {
	return func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
		sel(&options)
		return list(ctx, options)
	}
}

// watcher is watch with a selector.
func watcher(sel func(*metav1.ListOptions), open cache.WatchFuncWithContext) cache.WatchFuncWithContext {
	return func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
		sel(&options)
		return open(ctx, options)
	}
}

// listNoting lists and notes how that went.
func (r *resource) listNoting(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	list, err := r.list(ctx, options)
	r.note(ctx, err)
	if r.optional && apierrors.IsNotFound(err) {
		sleep(ctx, absentRetry)
	}
	return list, err
}

// watchNoting watches and notes how that went.
func (r *resource) watchNoting(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	w, err := r.watch(ctx, options)
	if options.SendInitialEvents == nil || !refused(err) {
		r.note(ctx, err)
	}
	return w, err
}

// refused says whether err is the answer of a server that will not stream a
// list. It is asked for a plain one next, and what comes of that counts.
func refused(err error) bool {
	var answer apierrors.APIStatus
	return errors.As(err, &answer) && !apierrors.IsTooManyRequests(err)
}

// note logs and reports a request that went otherwise than the one before.
func (r *resource) note(ctx context.Context, err error) {
	switch {
	case ctx.Err() != nil:
	case err == nil && r.failure != "":
		r.failure = ""
		r.log.Info("the API server answers again", "resource", r.name)
		r.sink.Report(r.name, nil)
	case err != nil && r.failure != err.Error():
		r.failure = err.Error()
		r.log.Warn("the API server does not say what there is; what it said last stays in force", "resource", r.name, "err", err)
		r.sink.Report(r.name, []lb.Problem{{Object: "API server", Field: r.name, Message: r.failure}})
	}
}

// endingClock does not wait beyond the end of ctx. A Reflector does, when it
// backs off from a server that refuses connections.
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
