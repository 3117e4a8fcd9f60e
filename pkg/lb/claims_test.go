package lb

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"
)

// The owner of a frontend depends on its claims and not on their order, and the calls of
// Moved add up to it.
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
		for number := range 500 {
			s, k := services[r.IntN(len(services))], key(r.IntN(4))
			if r.IntN(2) == 0 {
				kind := Kind(1 + r.IntN(4))
				c.Add(s, number, k, kind)
				claims = append(claims, claim{contender{s, int32(number), kindRank(kind)}, k})
			} else {
				c.Remove(s, k)
				claims = slices.DeleteFunc(claims, func(a claim) bool { return a.Claimant == s && a.key == k })
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
	at := func(name string, created int64, kind Kind, number int32) contender {
		return contender{&Claimant{ServiceName{"default", name}, time.Unix(created, 0)}, number, kindRank(kind)}
	}
	order := []contender{
		at("z", 9, KindClusterIP, 9),
		at("z", 9, KindLoadBalancer, 9),
		at("z", 1, KindExternalIP, 9),
		at("a", 2, KindExternalIP, 9),
		at("b", 2, KindExternalIP, 1),
		at("b", 2, KindExternalIP, 2),
		at("a", 1, KindNodePort, 1),
	}
	for i, a := range order {
		for j, b := range order {
			if got := a.compare(b); (got < 0) != (i < j) || (got > 0) != (i > j) {
				t.Errorf("%d before %d: %d", i, j, got)
			}
		}
	}
}
