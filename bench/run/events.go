package main

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/sluice-lb/sluice/bench/objects"
)

// events are what the API server tells of the Services that are measured one by
// one: the agents get the same at about the same moment.
type events struct {
	told chan told
	stop func()
}

// told is an endpoint that the API server told of.
type told struct {
	address string
	at      time.Time
}

func watchEvents(ctx context.Context, config *rest.Config) (*events, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("client of the API server: %w", err)
	}
	watch, err := client.DiscoveryV1().EndpointSlices(objects.FewNamespace).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("watch of endpoints: %w", err)
	}
	e := &events{told: make(chan told, 1000), stop: watch.Stop}
	go func() {
		defer close(e.told)
		for event := range watch.ResultChan() {
			at := time.Now()
			slice, ok := event.Object.(*discoveryv1.EndpointSlice)
			if !ok {
				continue
			}
			for _, endpoint := range slice.Endpoints {
				e.told <- told{endpoint.Addresses[0], at}
			}
		}
	}()

	return e, nil
}

// wait returns when the API server told of an endpoint.
func (e *events) wait(ctx context.Context, address netip.Addr) (time.Time, error) {
	for {
		select {
		case <-ctx.Done():
			return time.Time{}, context.Cause(ctx)
		case t, ok := <-e.told:
			if !ok {
				return time.Time{}, fmt.Errorf("the API server has ended the watch")
			}
			if t.address == address.String() {
				return t.at, nil
			}
		}
	}
}

// Close ends the watch.
func (e *events) Close() error {
	e.stop()

	return nil
}
