package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// dials is how often a scene dials where it looks at the spread.
const dials = 300

func playClusterIP(ctx context.Context, s *stage) error {
	talks, err := s.pod.ask(ctx, dials, lab.Exchange{Network: "tcp4", Address: webIPv4})
	if err != nil {
		return err
	}
	counts, err := s.countAnswers(talks, webPort)
	if err != nil {
		return err
	}
	var bars []bar
	for _, pod := range s.backends {
		bars = append(bars, bar{fmt.Sprintf("%s  %s", pod.Name, pod.At(webPort)[0]), counts[pod.Name]})
	}
	s.out.chart(bars)

	s.out.seen("%d connections, and for the client each is one to %s, as getpeername shows", len(talks), webIPv4)
	for _, t := range talks {
		if t.server.Client.Addr() != s.clientIn.IPv4 {
			return fmt.Errorf("%s was called by %s, want %s", t.server.Name, t.server.Client, s.clientIn.IPv4)
		}
	}
	s.out.seen("for the backends, each is one from %s to their own address: there is no NAT", s.clientIn.IPv4)

	return showLatency(ctx, s)
}

// showLatency compares connects through the Service with those straight to a
// pod. They take turns, in either order, as a Go map has none.
func showLatency(ctx context.Context, s *stage) error {
	var through, direct []time.Duration
	for i := range dials {
		pod := s.backends[i%len(s.backends)]
		for address, times := range map[string]*[]time.Duration{webIPv4: &through, pod.At(webPort)[0]: &direct} {
			talks, err := s.pod.ask(ctx, 1, lab.Exchange{Network: "tcp4", Address: address})
			if err != nil {
				return err
			}
			*times = append(*times, talks[0].client.Connect)
		}
	}
	s.out.seen("connect() took %s through the Service, %s straight to a pod (medians of %d each)",
		short(median(through)), short(median(direct)), dials)

	return nil
}

func median(times []time.Duration) time.Duration {
	slices.Sort(times)

	return times[len(times)/2]
}

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
		s.out.seen("%d connections to %-23s %s", len(talks), address, s.shares(counts))
	}

	return nil
}

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
		s.out.seen("%d from %-7s to %-18s  %s", len(talks), call.from.name, address, s.shares(counts))
	}

	own := fmt.Sprintf("127.0.0.1:%d", webNode)
	if _, err := s.pod.Request("tcp4", own); lab.Errno(err) != unix.ECONNREFUSED {
		return fmt.Errorf("%s dials its own %s: %v; want it refused", s.pod.name, own, err)
	}
	s.out.seen("but a pod's localhost is its own: from %s to %s is refused", s.pod.name, own)

	return nil
}
