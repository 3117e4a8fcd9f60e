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
// (ClusterIP, load balancer, external IP, node port), then the one to which the maps led before, then
// the one that has claimed it for the longest time, then by age (the oldest), then by name, then by the number
// of the claim. So a Service keeps what it has while it claims it, whichever Service names it later for
// the same kind. No one knows in which order claims were made that are added before Settle: all are
// equally old. K identifies a frontend.
//
// The zero value can be used once Moved is set.
type Claims[K comparable] struct {
	// Moved is called when a Service begins or ceases to own the frontend that it claims by this
	// number. If it panics, nothing has changed, and the call may be repeated.
	Moved func(s *Claimant, number int, owns bool)

	first  map[K]contender
	others map[K][]contender // in order of precedence; few frontends have any

	settled bool
	added   uint64 // since Settle
}

// contender is one claim to a frontend.
type contender struct {
	*Claimant
	since  uint64 // when it was made: zero is before the agent, one before Settle
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
		cmp.Compare(a.since, b.since),
		a.Created.Compare(b.Created),
		a.Name.compare(b.Name),
		cmp.Compare(a.number, b.number),
	)
}

// Settle has the order count in which claims are added from now on: all Services are known that there were
// at the start.
func (c *Claims[K]) Settle() { c.settled = true }

// Add adds a claim of s to a frontend, with a number that the Service chooses. A Service may
// claim as a new Claimant before it withdraws the claims of its old one: a frontend that both
// claim stays the Service's all the time, and its claim is as old as before, unless the Service was
// deleted meanwhile and created again. Held is set if the maps lead to the Service already, as an
// earlier agent has left them.
func (c *Claims[K]) Add(s *Claimant, number int, key K, kind Kind, held bool) {
	if c.first == nil {
		c.first, c.others = make(map[K]contender), make(map[K][]contender)
	}
	added := contender{s, 1, int32(number), kindRank(kind)}
	owner, claimed := c.first[key]
	switch former := c.former(s, key); {
	case held:
		added.since = 0
	case former != nil:
		added.since = former.since
	case c.settled:
		c.added++
		added.since += c.added
	}
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

// former returns the claim to a frontend that s makes again, or nil.
func (c *Claims[K]) former(s *Claimant, key K) *contender {
	isFormer := func(f contender) bool { return f.Name == s.Name && f.Created.Equal(s.Created) }
	if owner := c.first[key]; owner.Claimant != nil && isFormer(owner) {
		return &owner
	}
	if i := slices.IndexFunc(c.others[key], isFormer); i >= 0 {
		return &c.others[key][i]
	}

	return nil
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

// Yields reports whether the owner of a frontend would lose it to another Service that claims it with an address of this kind.
func (c *Claims[K]) Yields(key K, kind Kind) bool {
	owner, claimed := c.first[key]

	return claimed && kindRank(kind) < owner.rank
}

// Len returns how many frontends are claimed.
func (c *Claims[K]) Len() int { return len(c.first) }
