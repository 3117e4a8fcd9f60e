package main

import (
	"context"
	"fmt"
	gomaps "maps"
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// openConnections is how many connections are open when the agent dies.
const openConnections = 500

func playKilled(ctx context.Context, s *stage) error {
	x := lab.Exchange{Network: "tcp4", Address: webIPv4}
	made := s.connections()
	load, err := s.pod.StartLoad(lab.Load{Exchange: x, Rate: 2 * openConnections, Keep: openConnections})
	if err != nil {
		return err
	}
	if err := s.awaitConnections(ctx, made+openConnections); err != nil {
		return err
	}
	had, err := s.backendIDs()
	if err != nil {
		return err
	}

	s.out.command("kill -9 %d", s.agent.PID())
	if err := s.agent.Kill(); err != nil {
		return err
	}
	if err := s.showWithoutAgent(ctx, x); err != nil {
		return err
	}
	if err := s.showRestart(ctx, had); err != nil {
		return err
	}

	report, err := load.Stop()
	if err != nil {
		return err
	}
	if len(report.Failures) > 0 {
		return fmt.Errorf("%d of %d requests failed, the first one at %s", len(report.Failures), report.Started, report.Failures[0])
	}
	s.out.seen("before, during and after, the open connections have carried %d answers; %d failed", report.Succeeded, len(report.Failures))

	return nil
}

// showWithoutAgent dials, and waits until the open connections, which take
// turns, were all used.
func (s *stage) showWithoutAgent(ctx context.Context, x lab.Exchange) error {
	died, made, answered := time.Now(), s.connections(), s.answers()
	talks, err := s.pod.ask(ctx, dials, x)
	if err != nil {
		return err
	}
	if _, err := s.countAnswers(talks, webPort); err != nil {
		return err
	}
	carried := func() int { return s.answers() - answered - dials }
	for deadline := time.Now().Add(waitTimeout); carried() < openConnections; {
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d open connections have carried %d answers in %s", openConnections, carried(), short(time.Since(died)))
		}
	}
	if more := s.connections() - made; more != dials {
		return fmt.Errorf("%d connections were made, want %d: open ones were lost", more, dials)
	}
	s.out.seen("%s without an agent: %d open connections have carried %d answers", short(time.Since(died)), openConnections, carried())
	s.out.seen("%d connections were made meanwhile, to all backends", len(talks))

	return nil
}

// showRestart starts the agent again. What it has programmed must be what it
// has found.
func (s *stage) showRestart(ctx context.Context, had map[uint32]netip.AddrPort) error {
	begin := time.Now()
	if err := s.runAgent(ctx); err != nil {
		return err
	}
	has, err := s.backendIDs()
	if err != nil {
		return err
	}
	if !gomaps.Equal(had, has) {
		return fmt.Errorf("the new agent has given backends other ids: had %v, has %v", had, has)
	}
	s.out.seen("the next agent was ready after %s, and has kept all %d backends with their ids", short(time.Since(begin)), len(has))

	return nil
}

// backendIDs reads which address each id has in the maps.
func (s *stage) backendIDs() (map[uint32]netip.AddrPort, error) {
	pinned, err := maps.Load(s.agent.BPFRoot())
	if err != nil {
		return nil, err
	}
	ids := make(map[uint32]netip.AddrPort)
	for _, backend := range pinned.Backends.All() {
		if backend.Id != 0 {
			ids[backend.Id] = backend.AddrPort()
		}
	}

	return ids, pinned.Close()
}
