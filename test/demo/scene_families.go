package main

import (
	"context"

	"github.com/sluice-lb/sluice/test/lab"
)

func playIPv6(ctx context.Context, s *stage) error {
	for _, dialled := range []string{webIPv6, webMapped} {
		talks, err := s.pod.ask(ctx, dials, lab.Exchange{Network: "tcp6", Address: dialled})
		if err != nil {
			return err
		}
		counts, err := s.tally(talks, webPort)
		if err != nil {
			return err
		}
		if err := believes(talks, dialled); err != nil {
			return err
		}
		s.out.seen("%d connections to %-23s %s", len(talks), dialled, s.shares(counts))
	}

	return nil
}
