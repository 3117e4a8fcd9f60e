package main

import (
	"context"
	"fmt"
	"time"
)

// waitTimeout limits waits for what takes far less.
const waitTimeout = 10 * time.Second

// pause waits for a while, unless ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// connections is how many connections the backends of web have accepted.
func (s *stage) connections() (n int) {
	for _, server := range s.servers {
		n += server.Connections()
	}

	return n
}

// answers is how many questions the backends of web have answered.
func (s *stage) answers() (n int) {
	for _, server := range s.servers {
		n += server.Answers()
	}

	return n
}

// awaitConnections waits until the backends of web have accepted so many.
func (s *stage) awaitConnections(ctx context.Context, n int) error {
	for deadline := time.Now().Add(waitTimeout); s.connections() < n; {
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("of the connections that a load makes, %d are missing", n-s.connections())
		}
	}

	return nil
}
