package reconcile

import (
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// owners knows for how long Services have claimed frontends, as they were Set, and finds frontends that a Service
// loses although it has claimed them without a pause since the maps lead to it.
type owners struct {
	strict bool // a claim is later than those that an agent found in the maps
	pruned bool // a claim that is made now is later than all others
	claims map[claim]*ownedClaim
	leads  map[maps.FrontendKey]lb.ServiceName
	writer *Reconciler // it may be behind what was Set: it writes an earlier Service of the same name then
}

type claim struct {
	service lb.ServiceName
	key     maps.FrontendKey
}

type ownedClaim struct {
	kind    lb.Kind
	created time.Time
	inUse   bool // the maps began to lead to the Service while it claimed the frontend
}

func newOwners() *owners {
	return &owners{claims: make(map[claim]*ownedClaim), leads: make(map[maps.FrontendKey]lb.ServiceName)}
}

// set records what a Service claims from now on.
func (o *owners) set(name lb.ServiceName, created time.Time, res lb.Resolution) {
	next := make(map[claim]*ownedClaim)
	for _, f := range res.Frontends {
		c := claim{name, keyOf(f.Key)}
		next[c] = &ownedClaim{kind: f.Kind, created: created}
		if was := o.claims[c]; was != nil && was.created.Equal(created) {
			next[c].inUse = was.inUse
		}
	}
	for c := range o.claims {
		if c.service == name {
			delete(o.claims, c)
		}
	}
	for c, claimed := range next {
		o.claims[c] = claimed
	}
}

// prune records that all Services are known that there were when the agent started.
func (o *owners) prune() { o.strict, o.pruned = true, true }

// restart records that the next agent takes what the maps say for the order of claims.
func (o *owners) restart() {
	o.strict, o.pruned = true, false
	for c, claimed := range o.claims {
		claimed.inUse = o.leads[c.key] == c.service
	}
}

// isWritten reports whether what is written of a Service is that of this creation.
func (o *owners) isWritten(name lb.ServiceName, created time.Time) bool {
	svc := o.writer.services[name]

	return svc != nil && svc.plan.claimant != nil && svc.plan.claimant.Created.Equal(created)
}

// check records where the maps lead now. It fails the test if a Service has lost a frontend to one whose claim is of
// the same kind or a worse one.
func (g *checker) checkOwners() {
	leads := make(map[maps.FrontendKey]lb.ServiceName)
	for key, id := range g.FrontendIDs.Entries {
		f := g.Tables.Frontends.Get(id)
		port, there := g.ServicePorts.Entries[g.Pools.Get(f.PoolId).ServicePortId]
		if !there {
			continue
		}
		namespace, name, _ := port.Parts()
		owner := lb.ServiceName{Namespace: namespace, Name: name}
		leads[key] = owner
		former, led := g.owners.leads[key]
		if led && former == owner {
			continue
		}
		was, now := g.owners.claims[claim{former, key}], g.owners.claims[claim{owner, key}]
		if g.owners.strict && led && was != nil && was.inUse && rank(was.kind) <= rank(lb.Kind(f.Kind)) {
			g.fail("frontend %s was %s's, and is %s's by a later claim", modelKey(key), former, owner)
		}
		if now != nil {
			now.inUse = g.owners.pruned && g.owners.isWritten(owner, now.created)
		}
	}
	g.owners.leads = leads
}

// rank orders kinds: a claim of one that comes first takes a frontend from those of the others.
func rank(kind lb.Kind) int {
	return map[lb.Kind]int{lb.KindClusterIP: 1, lb.KindLoadBalancer: 2, lb.KindExternalIP: 3, lb.KindNodePort: 4}[kind]
}
