package main

import (
	"context"
	"errors"
	"fmt"
	gomaps "maps"
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
	had, err := s.frontendIDs()
	if err != nil {
		return err
	}

	s.out.command("kill -9 %d", s.agent.PID())
	if err := s.agent.Kill(); err != nil {
		return err
	}
	if err := s.tellWithoutAgent(ctx, x); err != nil {
		return err
	}
	if err := s.tellRestart(ctx, had); err != nil {
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

// tellWithoutAgent dials, and waits until the open connections, which take
// turns, were all used.
func (s *stage) tellWithoutAgent(ctx context.Context, x lab.Exchange) error {
	died, made, answered := time.Now(), s.connections(), s.answers()
	talks, err := s.pod.ask(ctx, dials, x)
	if err != nil {
		return err
	}
	if _, err := s.tally(talks, webPort); err != nil {
		return err
	}
	carried := func() int { return s.answers() - answered - dials }
	for deadline := time.Now().Add(patience); carried() < openConnections; {
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

// tellRestart starts the agent again. What it has programmed must be what it
// has found.
func (s *stage) tellRestart(ctx context.Context, had map[maps.FrontendKey]uint32) error {
	begin := time.Now()
	if err := s.runAgent(ctx); err != nil {
		return err
	}
	has, err := s.frontendIDs()
	if err != nil {
		return err
	}
	if !gomaps.Equal(had, has) {
		return fmt.Errorf("the new agent has given frontends other ids: had %v, has %v", had, has)
	}
	s.out.seen("the next agent was ready after %s, and has kept all %d frontends with their ids", short(time.Since(begin)), len(has))

	return nil
}

// frontendIDs reads which address has which id in the maps.
func (s *stage) frontendIDs() (map[maps.FrontendKey]uint32, error) {
	pinned, err := maps.Load(s.agent.BPFRoot())
	if err != nil {
		return nil, err
	}
	ids := make(map[maps.FrontendKey]uint32)
	for entry, err := range pinned.Tables.Frontends.All() {
		if err != nil {
			return nil, errors.Join(err, pinned.Close())
		}
		ids[entry.Key] = entry.Value.Id
	}

	return ids, pinned.Close()
}
