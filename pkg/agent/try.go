package agent

import (
	"context"
	"errors"
	"slices"

	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/pkg/status"
)

// try returns what a change would make of the Services, without making it. Any goroutine but that which has the turn may call it.
func (a *agent) try(ctx context.Context, content []byte, deleted bool) (status.Tried, error) {
	nodeName, err := queue.Ask(ctx, a.queue, func() string { return a.model.node.Name })
	if err != nil {
		return status.Tried{}, err
	}
	change, problems, err := kube.ReadChange(content, nodeName)
	if err != nil {
		return status.Tried{}, err
	}
	if len(change.Services)+len(change.Slices) == 0 && change.Node == nil {
		return status.Tried{}, errors.New("the change has no Service, no EndpointSlice, and not the Node of this node")
	}
	change.Deleted = deleted
	tried := status.Tried{Problems: problems}
	var known []lb.Snapshot
	tried.Node, err = queue.Ask(ctx, a.queue, func() *lb.Node {
		known = a.model.state.Concerned(&change)

		return a.model.state.Node()
	})
	if err != nil {
		return tried, err
	}
	if change.Node != nil && !deleted { // it concerns all
		known = nil
		if err := queue.Collect(ctx, a.queue, a.model.state.Snapshots(), func(s lb.Snapshot) { known = append(known, s) }); err != nil {
			return tried, err
		}
	}
	tried.Outcomes = change.Outcomes(tried.Node, known)
	if len(change.Services) > 0 && !deleted { // slices bring no frontend
		tried.Owners, err = a.ownersOf(ctx, tried.Outcomes)
	}

	return tried, err
}

// ownersOf returns which frontends that Services would have are those of other Services.
func (a *agent) ownersOf(ctx context.Context, outcomes []lb.Outcome) (map[lb.FrontendKey]status.Owner, error) {
	var claimed []lb.Frontend
	for _, o := range outcomes {
		if o.After.Service != nil {
			claimed = append(claimed, o.After.Resolve().Frontends...)
		}
	}
	owners := make(map[lb.FrontendKey]status.Owner)
	err := queue.Collect(ctx, a.queue, slices.Values(claimed), func(f lb.Frontend) {
		if owner, yields := a.writer.OwnerOf(f.Key, f.Kind); owner != nil && owner.Name != f.Port.Service {
			owners[f.Key] = status.Owner{Service: owner.Name, Yields: yields}
		}
	})

	return owners, err
}
