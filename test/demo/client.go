package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/test/lab"
)

// client is a program that dials: a process of its own, in a namespace and in
// the cgroup.
type client struct {
	*lab.Caller
	name string // of its pod, or of the node
}

func (s *stage) startClient(ns *lab.Namespace, name string) (*client, error) {
	caller, err := lab.StartCaller(ns, s.cgroup)
	if err != nil {
		return nil, err
	}
	s.made("process", procOf(caller.PID()), caller.Close)

	return &client{caller, name}, nil
}

// talk is a question and its answer, as both sides saw them.
type talk struct {
	client lab.Reply
	server lab.Answer
}

// ask has a client ask n times, each time with a new socket, and returns an
// error unless a server answers every time, by the address that was asked.
func (c *client) ask(ctx context.Context, n int, x lab.Exchange) ([]talk, error) {
	talks := make([]talk, n)
	for i := range talks {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		reply, err := c.Exchange(x)
		if err != nil {
			return nil, fmt.Errorf("%s asks %s: %w; want an answer", c.name, x.Address, err)
		}
		answer, err := lab.ParseAnswer(reply.Text)
		if err = errors.Join(err, checkPeer(reply, x.Address)); err != nil {
			return nil, fmt.Errorf("%s asks %s: %w", c.name, x.Address, err)
		}
		talks[i] = talk{reply, answer}
	}

	return talks, nil
}

// countAnswers counts the answers by backend: every backend must have done its share, which
// chance makes up to a third of what it is on average.
func (s *stage) countAnswers(talks []talk, port uint16) (map[string]int, error) {
	counts := make(map[string]int)
	for _, t := range talks {
		isBackend := slices.ContainsFunc(s.backends, func(p *lab.Pod) bool {
			return t.server.Name == p.Name && (t.server.Local == netip.AddrPortFrom(p.IPv4, port) ||
				t.server.Local == netip.AddrPortFrom(p.IPv6, port))
		})
		if !isBackend {
			return nil, fmt.Errorf("%s has answered at %s; want a backend at its own address", t.server.Name, t.server.Local)
		}
		counts[t.server.Name]++
	}
	for _, pod := range s.backends {
		if counts[pod.Name] < len(talks)/len(s.backends)/3 {
			return nil, fmt.Errorf("%d of %d answers are from %s; want about one in %d", counts[pod.Name], len(talks), pod.Name, len(s.backends))
		}
	}

	return counts, nil
}

// shares formats counts in a line: "pod-1-0 34, pod-1-1 29, pod-1-2 37".
func (s *stage) shares(counts map[string]int) string {
	text := ""
	for i, pod := range s.backends {
		if i > 0 {
			text += ", "
		}
		text += fmt.Sprintf("%s %d", pod.Name, counts[pod.Name])
	}

	return text
}

// checkPeer returns an error unless the client has seen the address that it dialed as
// that of its peer, by getpeername, or by recvfrom over UDP.
func checkPeer(seen lab.Reply, address string) error {
	switch want := netip.MustParseAddrPort(address); {
	case !seen.Peer.IsValid() && !seen.From.IsValid():
		return fmt.Errorf("the address that has answered for %s is unknown", address)
	case seen.Peer.IsValid() && seen.Peer != want:
		return fmt.Errorf("getpeername returns %s after connect to %s", seen.Peer, address)
	case seen.From.IsValid() && seen.From != want:
		return fmt.Errorf("recvfrom returns the address %s, asked was %s", seen.From, address)
	}

	return nil
}
