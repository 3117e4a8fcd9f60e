package model

import (
	"flag"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"
)

var (
	oneSeed = flag.Uint64("seed", 0, "play this one session")
	seeds   = flag.Uint64("seeds", 3000, "how many sessions to play")
	first   = flag.Uint64("first", 1, "the first of them")
)

// With random objects and random changes, the maps answer as CONTRACT.md demands.
func TestModel(t *testing.T) {
	if *oneSeed != 0 {
		play(t, *oneSeed)
		return
	}
	debug.SetGCPercent(400) // sessions are short, and leave nothing
	var next atomic.Uint64
	next.Store(*first)
	var mu sync.Mutex
	var hits clauseHits
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for seed := next.Add(1) - 1; seed < *first+*seeds && !t.Failed(); seed = next.Add(1) - 1 {
				hit := play(t, seed)
				mu.Lock()
				hits.add(hit)
				mu.Unlock()
			}
		})
	}
	workers.Wait()
	if t.Failed() {
		return
	}
	for cl, n := range hits {
		if testing.Verbose() {
			t.Logf("%9d  %s", n, clauseText[cl])
		}
		if n == 0 {
			t.Errorf("never hit in %d sessions: %s", *seeds, clauseText[cl])
		}
	}
}

// play plays the session of a seed. If it fails, play reports the shortest session that does.
func play(t *testing.T, seed uint64) clauseHits {
	s := newSession(seed)
	hits, failed := s.play()
	if failed != nil {
		small, same := shrink(s)
		t.Errorf("seed %d: %v\nReplay: go test ./test/differential/model -run TestModel -seed %d -v\nShortened, %v:\n%s", seed, failed, seed, same, small)
	}
	return hits
}

func (h *clauseHits) add(more clauseHits) {
	for i, n := range more {
		h[i] += n
	}
}
