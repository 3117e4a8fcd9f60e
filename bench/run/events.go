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

// events are the API server's events of the Services for single measurements: the
// agents get the same ones at about the same moment.
type events struct {
	observed chan observed
	stop     func()
}

// told is an endpoint of an event, and when it arrived.
type observed struct {
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
	e := &events{observed: make(chan observed, 1000), stop: watch.Stop}
	go func() {
		defer close(e.observed)
		for event := range watch.ResultChan() {
			at := time.Now()
			slice, ok := event.Object.(*discoveryv1.EndpointSlice)
			if !ok {
				continue
			}
			for _, endpoint := range slice.Endpoints {
				e.observed <- observed{endpoint.Addresses[0], at}
			}
		}
	}()

	return e, nil
}

// wait returns when the event with an endpoint arrived.
func (e *events) wait(ctx context.Context, address netip.Addr) (time.Time, error) {
	for {
		select {
		case <-ctx.Done():
			return time.Time{}, context.Cause(ctx)
		case t, ok := <-e.observed:
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
