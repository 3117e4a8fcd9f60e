package main

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-lb/sluice/bench/objects"
)

// changeTimeout is how long a change may take to become effective.
const changeTimeout = 2 * time.Minute

// one replaces the endpoint of the Service "single", and returns how long after
// the write, and after the API server's event, a client gets the new one.
func (c *control) one(ctx context.Context) (fromWrite, fromEvent time.Duration, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, changeTimeout, fmt.Errorf("not effective after %v", changeTimeout))
	defer cancel()
	c.singles++
	awaited, err := c.probe.Await(ctx, netip.AddrPortFrom(objects.SingleIP, objects.Port), c.plan.SingleAddress(c.singles))
	if err != nil {
		return 0, 0, err
	}
	begin := time.Now()
	if err := c.writer.ChangeSingle(ctx, c.singles); err != nil {
		return 0, 0, err
	}
	event, err := c.events.wait(ctx, c.plan.SingleAddress(c.singles))
	if err != nil {
		return 0, 0, err
	}
	first, _, _, err := awaited.Wait(ctx)
	if err != nil {
		return 0, 0, err
	}

	return first.Sub(begin), first.Sub(event), nil
}

// answered waits until a backend answers.
func (c *control) answered(ctx context.Context, target netip.AddrPort, want netip.Addr) error {
	ctx, cancel := context.WithTimeoutCause(ctx, changeTimeout, fmt.Errorf("%v does not answer at %v after %v", want, target, changeTimeout))
	defer cancel()
	awaited, err := c.probe.Await(ctx, target, want)
	if err != nil {
		return err
	}
	_, _, _, err = awaited.Wait(ctx)

	return err
}

// changesAtOnce is how many of the requests that make churn are under way at once.
const changesAtOnce = 8

// change replaces endpoints at a steady rate, count of them or, with 0, until ctx
// ends, which is no error. It leaves alone the Services that are asked.
func (b *bencher) change(ctx context.Context, services, rate, count int) error {
	var requests errgroup.Group
	requests.SetLimit(changesAtOnce)
	due := time.NewTicker(time.Second / time.Duration(rate))
	defer due.Stop()
	for n := 0; count == 0 || n < count; n++ {
		select {
		case <-ctx.Done():
			return requests.Wait()
		case <-due.C:
		}
		b.changed++
		i, generation := b.changed%services, 1+b.changed/services
		requests.Go(func() error {
			if err := b.writer.Change(ctx, i, generation); err != nil && ctx.Err() == nil {
				return err
			}
			return nil
		})
	}

	return requests.Wait()
}
