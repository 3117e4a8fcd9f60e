package main

import (
	"context"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

func playNodePort(ctx context.Context, s *stage) error {
	for _, call := range []struct {
		from *client
		at   netip.Addr
	}{
		{s.pod, s.node.IPv4},
		{s.host, s.node.IPv4},
		{s.host, s.node.IPv6},
		{s.host, netip.MustParseAddr("127.0.0.1")},
		{s.host, netip.MustParseAddr("::1")},
	} {
		address := netip.AddrPortFrom(call.at, webNode).String()
		talks, err := call.from.ask(ctx, dials, lab.Exchange{Network: "tcp", Address: address})
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
		s.out.seen("%d from %-7s to %-18s  %s", len(talks), call.from.name, address, s.shares(counts))
	}

	own := fmt.Sprintf("127.0.0.1:%d", webNode)
	if _, err := s.pod.Request("tcp4", own); lab.Errno(err) != unix.ECONNREFUSED {
		return fmt.Errorf("%s dials its own %s: %v; want it refused", s.pod.name, own, err)
	}
	s.out.seen("but a pod's localhost is its own: from %s to %s is refused", s.pod.name, own)

	return nil
}
