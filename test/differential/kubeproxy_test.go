package differential

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
)

// serviceCount is how many Services there are at most, without twins.
const serviceCount = 6

// Dials have the same outcomes with Sluice as with kube-proxy, for random objects in
// the API server, but for the listed differences. Each of these is seen.
func TestLikeKubeProxy(t *testing.T) {
	lab.NeedsRoot(t)
	c := cluster.Shared(t)
	a := mustAPI(t, c)
	seen := differenceCounts{}
	start := time.Now()
	for seed := *firstSeed; seed == *firstSeed || time.Since(start) < *duration; seed++ {
		ok := t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 0))
			with := randomSettings(r)
			t.Logf("settings: %+v", with)
			p := mustPlay(t, c, a, with, with, seen)
			p.playDirected(t)
			p.playRandom(t, r, *rounds)
		})
		if !ok {
			t.Logf("again: go test ./test/differential -run TestLikeKubeProxy -seed %d -rounds %d", seed, *rounds)
			return
		}
	}
	t.Logf("differences seen:\n%s", seen)
	for _, d := range differences {
		if seen[d.name] == 0 {
			t.Errorf("never seen: %s", d.name)
		}
	}
}

// play is both sides, and what they watch.
type play struct {
	*comparison
	*api
	frontends []frontend // in the last round
	pairs     []*lasting // since then
}

// mustPlay sets both sides up. Settings differ if it is to fail.
func mustPlay(t testing.TB, c *cluster.Cluster, a *api, reference, candidate settings, seen differenceCounts) *play {
	t.Helper()
	p := &play{api: a, comparison: &comparison{
		sides: mustSides(t, c, reference, candidate), settings: reference, listed: differences, seen: seen, log: t.Logf,
		attempts: len(timeouts),
		sources:  make(map[netip.Addr]netip.Addr),
	}}
	lab.Must(t, p.publish(t, objects{}))
	for _, s := range p.sides {
		lab.Must(t, s.addLateAddresses())
	}
	for _, b := range backends {
		for _, address := range b.addresses {
			source, err := p.sides[1].Nodes[0].SourceTo(address)
			lab.Must(t, err)
			p.sources[address] = source
		}
	}

	return p
}

// playDirected makes changes that chance seldom makes.
func (p *play) playDirected(t *testing.T) {
	before, after := directed()
	p.mustRound(t, "before", before, objects{})
	p.mustConnect(t, manyPairs)
	p.mustRound(t, "after", after, before)
	p.mustConnect(t, somePairs)
	p.mustRound(t, "gone", objects{}, after)
}

// playRandom makes random changes, and compares after each.
func (p *play) playRandom(t *testing.T, r *rand.Rand, rounds int) {
	now, before := randomObjects(r, serviceCount), objects{}
	for round := range rounds {
		p.mustRound(t, fmt.Sprint("round ", round), now, before)
		p.mustConnect(t, somePairs)
		now, before = randomChange(r, now, serviceCount), now
	}
}

// mustConnect opens pairs of connections, which last until after the next change.
func (p *play) mustConnect(t *testing.T, limit int) {
	t.Helper()
	var err error
	p.pairs, err = p.connect(p.frontends, limit)
	lab.Must(t, err)
}

// mustRound publishes objects and compares.
func (p *play) mustRound(t *testing.T, name string, now, before objects) {
	t.Helper()
	start := time.Now()
	lab.Must(t, p.publish(t, now))
	p.objects, p.comparison.way = now, p.api.way
	published := time.Since(start)
	dials := p.dials
	p.frontends = p.settings.frontends(now, before)
	// Connections first: dials may change their state.
	lab.Must(t, p.compareFates(p.pairs), p.compare(p.frontends), p.compareHealth())
	t.Logf("%s: %d Services, %d slices, published in %v; %d connections lasted, %d dials, in %v",
		name, len(now.services), len(now.slices), published.Round(time.Millisecond),
		len(p.pairs), p.dials-dials, (time.Since(start) - published).Round(time.Millisecond))
	p.pairs = nil
	if len(p.wrongs) > 0 {
		t.Fatalf("%s:\n%s\nbefore:\n%s\nafter:\n%s", name, p.report(), p.describe(before), p.describe(now))
	}
}

// publish writes objects, and waits until both proxies have taken them in.
func (p *play) publish(t testing.TB, o objects) error {
	if err := p.removeMarker(t.Context(), p.markers); err != nil {
		return err
	}
	if err := p.apply(t.Context(), o); err != nil {
		return err
	}
	p.markers++
	if err := p.putMarker(t.Context(), p.markers); err != nil {
		return err
	}

	return eachSide(p.sides, func(_ int, s *side) error { return s.awaitMarker(p.markers, o.zone) })
}

// describe is the Services that were wrong, as YAML.
func (p *play) describe(o objects) string {
	listed := map[string]bool{}
	var wrong []runtime.Object
	for _, w := range p.wrongs {
		name := w.frontend.service
		if o.services[name] == nil || listed[name] {
			continue
		}
		listed[name] = true
		wrong = append(wrong, o.services[name])
		for _, slice := range o.slicesOf(name) {
			wrong = append(wrong, slice)
		}
	}
	text, err := object.Manifest(wrong...)
	if err != nil {
		return err.Error()
	}

	return fmt.Sprintf("node-1 is in zone %q\n%s", o.zone, text)
}
