package main

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// refusal is a dial of a Service without endpoints, and how it fails.
type refusal struct {
	what    string
	address string
	errno   unix.Errno
	reason  maps.Reason
}

func playRefused(ctx context.Context, s *stage) error {
	for _, r := range []refusal{
		{"a Service without endpoints", emptyIPv4, unix.ECONNREFUSED, maps.ReasonRejectNoBackend},
		{"a port that web does not have", wrongPort, unix.ECONNREFUSED, maps.ReasonRejectNoPort},
		{"an address that no Service has", unusedIPv4, unix.EHOSTUNREACH, maps.ReasonDropUnallocated},
	} {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := s.showRefusal(r); err != nil {
			return err
		}
	}

	return nil
}

// showRefusal dials a Service without endpoints, and checks that `sluice status` has
// counted it.
func (s *stage) showRefusal(r refusal) error {
	before, err := s.agent.Status()
	if err != nil {
		return err
	}
	reply, err := s.pod.Request("tcp4", r.address)
	if lab.Errno(err) != r.errno {
		return fmt.Errorf("%s dials %s: %v; want %s", s.pod.name, r.address, err, unix.ErrnoName(r.errno))
	}
	after, err := s.agent.Status()
	if err != nil {
		return err
	}
	reason := r.reason.String()
	more := after.Counts[reason] - before.Counts[reason]
	if more < 1 {
		return fmt.Errorf("%s has dialed %s, and sluice status counts no more of %q", s.pod.name, r.address, reason)
	}
	s.out.seen("%-14s  %-31s  %s after %s", r.address, r.what, unix.ErrnoName(r.errno), short(reply.Latency))
	s.out.line("     sluice status: +%d %s", more, s.out.styled(cyan, reason))

	return nil
}
