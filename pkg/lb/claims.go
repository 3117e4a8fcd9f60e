package lb

import (
	"cmp"
	"slices"
	"time"
)

// Claimant is a Service that claims frontends. Its fields must not change while it
// claims any.
type Claimant struct {
	Name    ServiceName
	Created time.Time
}

// Claims decides which Service owns a frontend that several claim: the first by kind
// (ClusterIP, load balancer, external IP, node port), then by age (the oldest), then by name,
// then by the number of the claim. The owner does not depend on the order of the calls. K
// identifies a frontend.
//
// The zero value can be used once Moved is set.
type Claims[K comparable] struct {
	// Moved is called when a Service begins or ceases to own the frontend that it claims by this
	// number. If it panics, nothing has changed, and the call may be repeated.
	Moved func(s *Claimant, number int, owns bool)

	first  map[K]contender
	others map[K][]contender // in order of precedence; few frontends have any
}

// contender is one claim to a frontend.
type contender struct {
	*Claimant
	number int32
	rank   uint8
}

// kindRank orders the kinds of frontends. An unknown kind comes last.
func kindRank(k Kind) uint8 {
	switch k {
	case KindClusterIP:
		return 1
	case KindLoadBalancer:
		return 2
	case KindExternalIP:
		return 3
	case KindNodePort:
		return 4
	}

	return 5
}

func (a contender) compare(b contender) int {
	return cmp.Or(
		cmp.Compare(a.rank, b.rank),
		a.Created.Compare(b.Created),
		a.Name.compare(b.Name),
		cmp.Compare(a.number, b.number),
	)
}

// Add adds a claim of s to a frontend, with a number that the Service chooses. A Service may
// claim as a new Claimant before it withdraws the claims of its old one: a frontend that both
// claim stays the Service's all the time.
func (c *Claims[K]) Add(s *Claimant, number int, key K, kind Kind) {
	if c.first == nil {
		c.first, c.others = make(map[K]contender), make(map[K][]contender)
	}
	added := contender{s, int32(number), kindRank(kind)}
	owner, claimed := c.first[key]
	takesPlace := claimed && owner.Name == s.Name && owner.Claimant != s && c.precedes(added, key)
	if claimed && !takesPlace && added.compare(owner) >= 0 {
		c.wait(key, added)

		return
	}
	if claimed {
		c.Moved(owner.Claimant, int(owner.number), false)
	}
	c.Moved(s, number, true)
	if claimed && !takesPlace {
		c.wait(key, owner)
	}
	c.first[key] = added
}

// precedes reports whether a comes before all claims that wait for a frontend.
func (c *Claims[K]) precedes(a contender, key K) bool {
	waiting := c.others[key]

	return len(waiting) == 0 || a.compare(waiting[0]) < 0
}

func (c *Claims[K]) wait(key K, loser contender) {
	waiting := c.others[key]
	at, _ := slices.BinarySearchFunc(waiting, loser, contender.compare)
	c.others[key] = slices.Insert(waiting, at, loser)
}

// Remove withdraws all claims of s to a frontend.
func (c *Claims[K]) Remove(s *Claimant, key K) {
	owner, claimed := c.first[key]
	if !claimed {
		return
	}
	waiting := c.others[key]
	if len(waiting) > 0 {
		waiting = slices.DeleteFunc(waiting, func(w contender) bool { return w.Claimant == s })
		c.others[key] = waiting
	}
	if owner.Claimant == s {
		c.Moved(s, int(owner.number), false)
		if len(waiting) == 0 {
			delete(c.first, key)
		} else {
			c.Moved(waiting[0].Claimant, int(waiting[0].number), true)
			c.first[key], waiting = waiting[0], waiting[1:]
		}
	}
	if c.others[key] = waiting; len(waiting) == 0 {
		delete(c.others, key)
	}
}

// Owner returns the Service that owns a frontend, or nil if none claims it.
func (c *Claims[K]) Owner(key K) *Claimant { return c.first[key].Claimant }

// Len returns how many frontends are claimed.
func (c *Claims[K]) Len() int { return len(c.first) }
