package differential

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
)

// comparison dials frontends on both sides, and reports where Sluice is not what
// kube-proxy is.
type comparison struct {
	sides    [2]*side // kube-proxy's comes first
	settings settings
	objects  objects   // that there are
	way      []objects // that led there
	sources  map[netip.Addr]netip.Addr
	listed   []difference
	attempts int // of timeouts
	log      func(format string, args ...any)

	mu     sync.Mutex
	seen   differenceCounts
	dials  int
	wrongs []wrong
	// reached is the outcomes of dials of Services without affinity, on each
	// side.
	reached map[dialKey][2]outcomes
}

// dialKey is a client and a frontend that it dials.
type dialKey struct {
	client   *client
	frontend key
}

// wrong is a difference that is not listed.
type wrong struct {
	client   *client
	frontend frontend
	text     string
}

func (w wrong) String() string {
	return fmt.Sprintf("%s dials %s: %s", w.client.name, w.frontend, w.text)
}

const (
	// atOnce is how many dials are under way at most.
	atOnce = 256
	// enoughWrongs end a comparison: what is wrong with one is wrong with many.
	enoughWrongs = 12
	// manyDials see all of six backends but for one time in ten million.
	manyDials = 100
)

// timeouts are how long to wait for an answer: longer, each time that the sides
// seem to differ. Over a virtual link, a refusal is there before connect(2) has
// released the socket, and then TCP over IPv6 reacts to the next one only, a
// second later.
var timeouts = []time.Duration{1500 * time.Millisecond, 2500 * time.Millisecond, 4 * time.Second, 8 * time.Second}

// compare dials all frontends from all clients: first Services that remember
// affinity, then backends that may reach themselves, then those with affinity.
func (c *comparison) compare(all []frontend) error {
	c.reached = map[dialKey][2]outcomes{}
	plain := func(f frontend) bool { return f.twin == nil }
	if err := c.dialAll(all, func(from *client, f frontend) bool { return plain(f) && from.answers == "" }); err != nil {
		return err
	}
	if err := c.dialAll(all, func(from *client, f frontend) bool {
		return plain(f) && from.answers != "" && c.reaches(f, from.answers)
	}); err != nil {
		return err
	}

	return c.compareSticky(all)
}

// dialAll compares the outcomes of all dials that the filter selects.
func (c *comparison) dialAll(all []frontend, filter func(*client, frontend) bool) error {
	var dialing errgroup.Group
	dialing.SetLimit(atOnce)
	for _, f := range all {
		for _, from := range clients {
			if from.dials(f) && filter(from, f) {
				dialing.Go(func() error { return c.one(from, f) })
			}
		}
	}

	return dialing.Wait()
}

// reaches reports whether a pod of node-1 may reach a server by a frontend.
func (c *comparison) reaches(f frontend, server string) bool {
	for _, all := range c.reached[dialKey{podClient, f.key()}] {
		for o := range all {
			if o.server == server {
				return true
			}
		}
	}

	return false
}

// one compares the outcomes of one client's dials of one frontend. If the sides differ it begins anew, slower,
// until there is no excuse left: a proxy that is behind, a packet that was lost,
// an address that still has an earlier flow.
func (c *comparison) one(from *client, f frontend) error {
	if c.isHopeless() {
		return nil
	}
	var got [2]outcomes
	var text string
	var used []string
	for i := range c.attempts {
		time.Sleep(time.Duration(i) * 500 * time.Millisecond)
		var err error
		if got, err = c.sample(from, f, i); err != nil {
			return err
		}
		if text, used = c.differ(from, f, got); text == "" {
			break
		}
		c.log("after %v: %s", timeouts[i], wrong{from, f, text})
	}
	if text == "" && c.reference(from, f) != from {
		more, err := c.answersPodElsewhere(from, f, got)
		if err != nil {
			return err
		}
		used = append(used, more...)
	}
	if text == "" && f.like.IsValid() {
		more, err := c.answersAlone(from, f, got)
		if err != nil {
			return err
		}
		used = append(used, more...)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reached[dialKey{from, f.key()}] = got
	if text != "" {
		c.wrongs = append(c.wrongs, wrong{from, f, text})
	}
	for _, name := range used {
		c.seen[name]++
	}

	return nil
}

// isHopeless reports whether there is no need to look further.
func (c *comparison) isHopeless() bool {
	c.mu.Lock()
	defer c.mu.Unlock()

	return len(c.wrongs) >= enoughWrongs
}

// sample dials until both sides agree, or often enough that they never will.
func (c *comparison) sample(from *client, f frontend, attempt int) ([2]outcomes, error) {
	got := [2]outcomes{{}, {}}
	for n := range manyDials {
		err := eachSide(c.sides, func(i int, s *side) error {
			to := f.address
			if i == 0 && f.like.IsValid() {
				to = f.like
			}
			by := from
			if i == 0 {
				by = c.reference(from, f)
			}
			o, err := s.dial(by, f.protocol, to, n+f.number()+11*attempt, timeouts[attempt])
			got[i][o]++

			return err
		})
		if err != nil {
			return got, err
		}
		if c.enough(from, f, got, n+1) {
			break
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, all := range got {
		for _, count := range all {
			c.dials += count
		}
	}

	return got, nil
}

// enough reports whether further dials would show nothing more. A side that fails does so
// always; where backends answer, four dials are the least.
func (c *comparison) enough(from *client, f frontend, got [2]outcomes, dials int) bool {
	reference, candidate := answers(got[0]), answers(got[1])
	if reference == 0 && candidate == 0 {
		return true
	}
	if text, _ := c.differ(from, f, got); text == "" {
		return dials >= 4
	}

	return dials-min(reference, candidate) >= 4
}

// answers counts the dials that a server answered.
func answers(all outcomes) int {
	sum := 0
	for o, count := range all {
		if o.failure == "" {
			sum += count
		}
	}

	return sum
}

// differ returns how the outcomes differ from the expected ones, and which listed
// differences that has seen.
func (c *comparison) differ(from *client, f frontend, got [2]outcomes) (string, []string) {
	want, used := expect(probe{from, f, c.settings, c.objects, c.sources}, got[0], c.listed)
	if slices.Equal(want.set(), got[1].set()) {
		return "", used
	}

	return fmt.Sprintf("\n\tkube-proxy: %s\n\twant:       %s\n\tsluice:     %s", got[0], want, got[1]), nil
}

// answersAlone reports whether Sluice answers by a frontend by which kube-proxy does
// not.
func (c *comparison) answersAlone(from *client, f frontend, got [2]outcomes) ([]string, error) {
	if answers(got[1]) == 0 || !slices.ContainsFunc(c.listed, func(d difference) bool { return d.name == string(f.kind) }) {
		return nil, nil
	}
	o, err := c.sides[0].dial(from, f.protocol, f.address, 0, timeouts[0])
	if err != nil || o.failure != refused {
		return nil, err
	}

	return []string{string(f.kind)}, nil
}

// reference is the client that kube-proxy must answer as Sluice answers this one:
// itself, but for what [podElsewhere] is about.
func (c *comparison) reference(from *client, f frontend) *client {
	svc := c.objects.services[f.service]
	if from.place == otherNode && c.settings.detect == "ClusterCIDR" &&
		svc != nil && svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		return outsider
	}

	return from
}

// answersPodElsewhere reports whether Sluice answers a pod of another node and kube-proxy
// does not. Where Sluice does not, kube-proxy must not, either.
func (c *comparison) answersPodElsewhere(from *client, f frontend, got [2]outcomes) ([]string, error) {
	o, err := c.sides[0].dial(from, f.protocol, f.address, f.number(), timeouts[0])
	switch {
	case err != nil:
		return nil, err
	case answers(got[1]) == 0 && o.failure == "":
		c.mu.Lock()
		defer c.mu.Unlock()
		c.wrongs = append(c.wrongs, wrong{from, f, fmt.Sprintf("kube-proxy: %s, sluice: %s", o, got[1])})
	case answers(got[1]) > 0 && o.failure == silence:
		return []string{podElsewhere}, nil
	}

	return nil, nil
}

// report is everything that was wrong, by Service.
func (c *comparison) report() string {
	by := map[string][]string{}
	for _, w := range c.wrongs {
		by[w.frontend.service] = append(by[w.frontend.service], w.String())
	}
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(by)) {
		slices.Sort(by[name])
		for _, line := range by[name] {
			text.WriteString(line + "\n")
		}
	}

	return text.String()
}
