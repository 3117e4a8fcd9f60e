package agent

import (
	"context"
	"slices"

	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/pkg/status"
)

// try returns what a change would make of the Services, without making it. Any goroutine but that which has the turn may call it.
func (a *agent) try(ctx context.Context, content []byte, deleted bool) (status.TrialInput, error) {
	nodeName, err := queue.Ask(ctx, a.queue, func() string { return a.model.node.Name })
	if err != nil {
		return status.TrialInput{}, err
	}
	change, problems, err := kube.ReadChange(content, nodeName, deleted)
	if err != nil {
		return status.TrialInput{}, err
	}
	tried := status.TrialInput{Problems: problems}
	concerned := a.model.state.Concerned(&change)
	if change.Node != nil { // it concerns all
		concerned = a.model.state.Snapshots()
	}
	var known []lb.Snapshot
	if err := queue.Collect(ctx, a.queue, concerned, func(s lb.Snapshot) { known = append(known, s) }); err != nil {
		return tried, err
	}
	if tried.Node, err = queue.Ask(ctx, a.queue, a.model.state.Node); err != nil {
		return tried, err
	}
	tried.Outcomes = change.Outcomes(tried.Node, known)
	if len(change.Services) > 0 && !deleted { // slices bring no frontend
		tried.Owners, err = a.ownersOf(ctx, tried.Outcomes)
	}

	return tried, err
}

// ownersOf returns which Services have the frontends that Services would have, and would go on to have them, or would be the first
// to have them.
func (a *agent) ownersOf(ctx context.Context, outcomes []lb.Outcome) (map[lb.FrontendKey]status.Owner, error) {
	var claimed []lb.Frontend
	changed := make(map[lb.ServiceName]bool)
	claims := make(map[lb.ServiceName]map[lb.FrontendKey]bool) // of those that change
	among := lb.Claims[lb.FrontendKey]{Moved: func(*lb.Claimant, int, bool) {}}
	for _, o := range outcomes {
		changed[o.Name] = true
		if o.After.Service == nil {
			continue
		}
		frontends := o.After.Resolve().Frontends
		claimed = append(claimed, frontends...)
		claims[o.Name] = make(map[lb.FrontendKey]bool, len(frontends))
		claimant := &lb.Claimant{Name: o.Name, Created: o.After.Service.Created}
		for i := range frontends {
			claims[o.Name][frontends[i].Key] = true
			among.Add(claimant, i, frontends[i].Key, frontends[i].Kind, false)
		}
	}
	owners := make(map[lb.FrontendKey]status.Owner)
	err := queue.Collect(ctx, a.queue, slices.Values(claimed), func(f lb.Frontend) {
		owner, yields := a.writer.OwnerOf(f.Key, f.Kind)
		if owner != nil && (!changed[owner.Name] || claims[owner.Name][f.Key]) {
			owners[f.Key] = status.Owner{Service: owner.Name, Yields: yields}
		} else {
			owners[f.Key] = status.Owner{Service: among.Owner(f.Key).Name}
		}
	})

	return owners, err
}
