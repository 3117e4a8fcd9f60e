package conformance

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// crowd is clients that dial and ask until it ends. It records which backend answers
// which client, so that a test can end a backend that no connection needs any more.
type crowd struct {
	stop    atomic.Bool
	running sync.WaitGroup
	members []*member

	mu       sync.Mutex
	failures []string
}

// member is one client of a crowd.
type member struct {
	scene.Dial
	requests int // per connection

	rounds atomic.Int64 // connections so far
	asked  atomic.Int64
	last   atomic.Value // of string: the pod that answered last

	mu       sync.Mutex
	answered map[string]bool // by pod, since mustNeverReach cleared it
}

// join adds clients that ask so often on each connection before they open
// another one.
func (c *crowd) join(requests int, dials ...scene.Dial) {
	for _, d := range dials {
		m := &member{Dial: d, requests: requests, answered: make(map[string]bool)}
		m.last.Store("")
		c.members = append(c.members, m)
		c.running.Go(func() {
			for !c.stop.Load() {
				if err := m.round(&c.stop); err != nil {
					c.fail(fmt.Sprintf("%s, connection %d: %v", d, m.rounds.Load(), err))
				}
				m.rounds.Add(1)
				time.Sleep(breath)
			}
		})
	}
}

// breath is a client's pause after each connection, which leaves time on two CPUs to
// the other processes, the agent among them.
const breath = 5 * time.Millisecond

func (c *crowd) fail(text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failures = append(c.failures, text)
}

// round is one connection.
func (m *member) round(stop *atomic.Bool) error {
	conn, err := m.Open()
	if err != nil {
		return err
	}
	defer conn.Socket.Close()
	for i := 0; i < m.requests && !stop.Load(); i++ {
		answer, err := conn.Ask()
		if err != nil {
			return err
		}
		m.asked.Add(1)
		m.last.Store(answer.Name)
		m.record(answer.Name)
		time.Sleep(60 * time.Millisecond)
	}

	return nil
}

func (m *member) record(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.answered[name] = true
}

// mustNeverReach fails the test if one of these pods answers a client in the next 20
// requests.
func (c *crowd) mustNeverReach(t *testing.T, names ...string) {
	t.Helper()
	for _, m := range c.members {
		m.mu.Lock()
		clear(m.answered)
		m.mu.Unlock()
	}
	for _, m := range c.members {
		asked := m.asked.Load()
		lab.Eventually(t, m.Dial.String()+" is answered", func() bool { return m.asked.Load() > asked+20 })
		m.mu.Lock()
		for _, name := range names {
			if m.answered[name] {
				t.Errorf("%s: %s answers", m.Dial, name)
			}
		}
		m.mu.Unlock()
	}
}

// mustForget waits until no client has a connection that began before, and none was
// last answered by one of these pods.
func (c *crowd) mustForget(t *testing.T, names ...string) {
	t.Helper()
	for _, m := range c.members {
		begun := m.rounds.Load()
		lab.Eventually(t, fmt.Sprintf("%s leaves %v", m.Dial, names), func() bool {
			for _, name := range names {
				if m.last.Load() == name {
					return false
				}
			}

			return m.requests == endless || m.rounds.Load() > begun+1
		})
	}
}

// endless is the number of requests of a connection that stays open.
const endless = 1 << 30

func (c *crowd) end() {
	c.stop.Store(true)
	c.running.Wait()
}

// mustHaveWorked ends the crowd. The test fails if one single request did.
func (c *crowd) mustHaveWorked(t *testing.T) {
	t.Helper()
	c.end()
	total := int64(0)
	for _, m := range c.members {
		total += m.asked.Load()
		if m.asked.Load() < 5 {
			t.Errorf("%s: %d requests, too few", m.Dial, m.asked.Load())
		}
	}
	t.Logf("%d clients, %d requests, %d failures", len(c.members), total, len(c.failures))
	for _, text := range c.failures[:min(len(c.failures), 10)] {
		t.Error(text)
	}
}
