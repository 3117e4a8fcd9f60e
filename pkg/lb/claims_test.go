package lb

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"
)

// The owner of a frontend does not depend on the order of its claims until Settle, and then on nothing else that
// happens to them. The calls of Moved add up to it.
func TestClaims(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 0))
		owned := make(map[string]bool) // "service number"
		c := Claims[FrontendKey]{Moved: func(s *Claimant, number int, owns bool) {
			what := fmt.Sprint(s.Name, number)
			if owned[what] == owns {
				t.Fatalf("Moved was called twice for %s with owns %v", what, owns)
			}
			owned[what] = owns
		}}
		var services [5]*Claimant
		for i := range services {
			services[i] = &Claimant{ServiceName{"default", fmt.Sprint("s", i)}, time.Unix(r.Int64N(3), 0)}
		}
		key := func(n int) FrontendKey {
			return FrontendKey{Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), Port: 80, Protocol: TCP, Scope: Internal}
		}
		type claim struct {
			contender
			key FrontendKey
		}
		var claims []claim
		settled := r.IntN(500)
		for number := range 500 {
			s, k := services[r.IntN(len(services))], key(r.IntN(4))
			if r.IntN(2) == 0 {
				kind, held := Kind(1+r.IntN(4)), r.IntN(10) == 0
				added := claim{contender{s, uint64(max(1, 1+number-settled)), int32(number), kindRank(kind)}, k}
				again := slices.DeleteFunc(slices.Clone(claims), func(a claim) bool { return a.Claimant != s || a.key != k })
				if held {
					added.since = 0
				} else if len(again) > 0 {
					added.since = slices.MinFunc(again, func(a, b claim) int { return a.compare(b.contender) }).since
				}
				c.Add(s, number, k, kind, held)
				claims = append(claims, added)
			} else {
				c.Remove(s, k)
				claims = slices.DeleteFunc(claims, func(a claim) bool { return a.Claimant == s && a.key == k })
			}
			if number == settled {
				c.Settle()
			}
			keys := make(map[FrontendKey]bool)
			for _, a := range claims {
				keys[a.key] = true
				first := !slices.ContainsFunc(claims, func(b claim) bool { return b.key == a.key && b.compare(a.contender) < 0 })
				if owns := owned[fmt.Sprint(a.Name, a.number)]; owns != first || first && c.Owner(a.key) != a.Claimant {
					t.Fatalf("seed %d: claim %d of %s to %s: owns is %v, want %v", seed, a.number, a.Name, a.key, owns, first)
				}
			}
			if c.Len() != len(keys) {
				t.Fatalf("%d frontends are claimed, want %d", c.Len(), len(keys))
			}
		}
	}
}

func TestPrecedence(t *testing.T) {
	at := func(name string, since uint64, created int64, kind Kind, number int32) contender {
		return contender{&Claimant{Name: ServiceName{"default", name}, Created: time.Unix(created, 0)}, since, number, kindRank(kind)}
	}
	order := []contender{
		at("z", 9, 9, KindClusterIP, 9),
		at("z", 9, 9, KindLoadBalancer, 9),
		at("z", 1, 9, KindExternalIP, 9),
		at("z", 2, 1, KindExternalIP, 9),
		at("a", 2, 2, KindExternalIP, 9),
		at("b", 2, 2, KindExternalIP, 1),
		at("b", 2, 2, KindExternalIP, 2),
		at("a", 1, 1, KindNodePort, 1),
	}
	for i, a := range order {
		for j, b := range order {
			if got := a.compare(b); (got < 0) != (i < j) || (got > 0) != (i > j) {
				t.Errorf("%d before %d: %d", i, j, got)
			}
		}
	}
}

// A Service keeps a frontend while it claims it, whichever Service of the same kind names it later: an older one,
// or one that has waited for it.
func TestClaimInUse(t *testing.T) {
	const key = "198.51.100.1:80"
	name := func(s string) ServiceName { return ServiceName{s, "web"} }
	claimant := func(s string, created int64) *Claimant { return &Claimant{name(s), time.Unix(created, 0)} }
	young, old, first := claimant("young", 200), claimant("old", 100), claimant("first", 300)
	c := Claims[string]{Moved: func(*Claimant, int, bool) {}}
	mustOwn := func(when, want string) {
		t.Helper()
		if owner := c.Owner(key); owner == nil || owner.Name != name(want) {
			t.Fatalf("%s it is %+v's, want %s's", when, owner, want)
		}
	}
	renew := func(s **Claimant, by *Claimant) {
		c.Add(by, 0, key, KindExternalIP, false)
		c.Remove(*s, key)
		*s = by
	}
	c.Add(first, 0, key, KindExternalIP, false)
	c.Add(young, 0, key, KindExternalIP, false)
	mustOwn("when all begin", "young")
	c.Settle()
	c.Add(old, 0, key, KindExternalIP, false)
	mustOwn("when an older Service names it later", "young")
	renew(&young, claimant("young", 200))
	mustOwn("when its owner changes something else", "young")
	renew(&old, claimant("old", 100))
	mustOwn("when the one that waits changes something else", "young")
	at := claimant("cluster", 300)
	c.Add(at, 0, key, KindClusterIP, false)
	mustOwn("when it becomes a ClusterIP", "cluster")
	c.Remove(at, key)
	mustOwn("when it is none any more", "young")
	renew(&young, claimant("young", 250))
	mustOwn("when its owner is deleted and made again", "first")
	c.Remove(first, key)
	mustOwn("when that one is gone", "old")

	held := claimant("held", 400)
	c.Add(held, 0, key, KindExternalIP, true)
	mustOwn("when the maps lead to another one", "held")
	renew(&held, claimant("held", 400))
	mustOwn("when that changes something else", "held")
}
