package main

import (
	"context"
	"fmt"

	"github.com/sluice-lb/sluice/test/lab"
)

func playUDP(ctx context.Context, s *stage) error {
	for _, way := range []struct {
		calls       string
		unconnected bool
	}{
		{"connect, send, recv", false},
		{"sendto, recvfrom", true},
	} {
		talks, err := s.pod.ask(ctx, dials, lab.Exchange{Network: "udp4", Address: dnsIPv4, Unconnected: way.unconnected})
		if err != nil {
			return err
		}
		counts, err := s.countAnswers(talks, dnsPort)
		if err != nil {
			return err
		}
		s.out.seen("%-20s %d answers from %s, by %s", way.calls, len(talks), dnsIPv4, s.shares(counts))
	}

	return showTogether(ctx, s)
}

// showTogether sends many datagrams from one socket.
func showTogether(ctx context.Context, s *stage) error {
	socket, err := s.pod.Socket("udp4")
	if err != nil {
		return err
	}
	defer func() { _ = socket.Close() }() // at the latest it goes with the client

	const datagrams = 100
	server := ""
	for range datagrams {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := socket.SendTo("who\n", dnsIPv4); err != nil {
			return fmt.Errorf("datagram to %s: %w", dnsIPv4, err)
		}
		text, _, err := socket.Recv()
		if err != nil {
			return fmt.Errorf("answer of %s: %w", dnsIPv4, err)
		}
		answer, err := lab.ParseAnswer(text)
		if err != nil {
			return err
		}
		if server != "" && answer.Name != server {
			return fmt.Errorf("datagrams of one socket went to %s and to %s", server, answer.Name)
		}
		server = answer.Name
	}
	s.out.seen("%d datagrams of one socket, not connected, stay together: %s got them all", datagrams, server)

	return nil
}
