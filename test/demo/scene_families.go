package main

import (
	"context"

	"github.com/sluice-lb/sluice/test/lab"
)

func playIPv6(ctx context.Context, s *stage) error {
	for _, address := range []string{webIPv6, webMapped} {
		talks, err := s.pod.ask(ctx, dials, lab.Exchange{Network: "tcp6", Address: address})
		if err != nil {
			return err
		}
		counts, err := s.countAnswers(talks, webPort)
		if err != nil {
			return err
		}
		if err := checkPeers(talks, address); err != nil {
			return err
		}
		s.out.seen("%d connections to %-23s %s", len(talks), address, s.shares(counts))
	}

	return nil
}
