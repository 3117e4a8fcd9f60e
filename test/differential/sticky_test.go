package differential

import (
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
)

// compareSticky dials frontends of Services with affinity: one after
// the other, since one dial may decide where the next one goes. On each side the
// client must always reach the same backend, one of those by which the twin
// answers. Without an answer there is no affinity.
func (c *comparison) compareSticky(all []frontend) error {
	by := map[string][]dialKey{}
	frontends := map[key]frontend{}
	err := c.dialAll(all, func(from *client, f frontend) bool {
		if f.twin == nil || from.answers != "" {
			return false
		}
		frontends[f.key()] = f
		c.mu.Lock()
		defer c.mu.Unlock()
		twin := c.reached[dialKey{from, f.twin.key()}]
		if answers(twin[0]) > 0 || answers(twin[1]) > 0 {
			by[f.service] = append(by[f.service], dialKey{from, f.key()})
			return false
		}
		return true
	})
	if err != nil {
		return err
	}
	var dialing errgroup.Group
	for _, keys := range by {
		dialing.Go(func() error {
			for _, v := range keys {
				if err := c.oneSticky(v.client, frontends[v.frontend]); err != nil {
					return err
				}
			}
			return nil
		})
	}

	return dialing.Wait()
}

// oneSticky compares the dials of one client and frontend.
func (c *comparison) oneSticky(from *client, f frontend) error {
	if f.like.IsValid() || c.reference(from, f) != from || c.isHopeless() {
		return nil
	}

	return eachSide(c.sides, func(i int, s *side) error {
		text := ""
		for attempt, timeout := range timeouts[:c.attempts] {
			time.Sleep(time.Duration(attempt) * 500 * time.Millisecond)
			got, err := s.dialSticky(from, f, timeout)
			if err == nil {
				text, err = c.stickyWrong(i, from, f, got)
			}
			if err != nil || text == "" {
				return err
			}
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.wrongs = append(c.wrongs, wrong{from, f, s.name + text})

		return nil
	})
}

// dialSticky dials some times, from one address.
func (s *side) dialSticky(from *client, f frontend, timeout time.Duration) (outcomes, error) {
	const dials = 4
	got := outcomes{}
	for range dials {
		o, err := s.dial(from, f.protocol, f.address, 0, timeout)
		if err != nil {
			return nil, err
		}
		got[o]++
		if o.failure != "" {
			break
		}
	}

	return got, nil
}

// stickyWrong returns what is wrong with these outcomes on a side. Whether one may be,
// the twin shows, which is dialed until it has shown it.
func (c *comparison) stickyWrong(i int, from *client, f frontend, got outcomes) (string, error) {
	if len(got) != 1 {
		return fmt.Sprintf(" does not remember its client: %s", got), nil
	}
	c.mu.Lock()
	twin := c.reached[dialKey{from, f.twin.key()}][i]
	c.mu.Unlock()
	may := outcomes{}
	for o, count := range twin {
		may[o] = count
	}
	want := got.set()[0]
	for n := 0; may[want] == 0; n++ {
		if n == manyDials {
			return fmt.Sprintf(": %s, but without session affinity: %s", want, may), nil
		}
		o, err := c.sides[i].dial(from, f.protocol, f.twin.address, n, timeouts[0])
		if err != nil {
			return "", err
		}
		may[o]++
		if o.failure != "" && !slices.Contains(twin.set(), o) && may[o] > 3 {
			return fmt.Sprintf(": %s, but without session affinity: %s", want, may), nil
		}
	}

	return "", nil
}
