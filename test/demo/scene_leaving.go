package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// loadRate is how many connections arrive per second while things change.
const loadRate = 500

// elsewhere is how many connections in a row must go to other backends, for one
// to have left. By chance, that many do once in 10¹³ times.
const elsewhere = 75

func playLeaving(ctx context.Context, s *stage) error {
	leaving := s.backends[2]
	load, err := s.pod.StartLoad(lab.Load{Exchange: lab.Exchange{Network: "tcp4", Address: webIPv4}, Rate: loadRate})
	if err != nil {
		return err
	}
	socket, err := s.connectUDPTo(ctx, leaving.Name)
	if err != nil {
		return err
	}
	ended := endOf(socket)
	if err := s.awaitConnections(ctx, s.connections()+elsewhere); err != nil {
		return err
	}

	s.out.command("sed -i '/# %s$/d' %s/*.yaml", leaving.Name, s.manifests())
	edit := time.Now()
	if err := takeAway(s.manifests(), leaving.Name); err != nil {
		return err
	}
	last, err := s.lastConnection(ctx, s.servers[leaving.Name], edit)
	if err != nil {
		return err
	}
	s.out.seen("%s after the edit, %s got its last connection; 50 ms the agent waits for more edits", short(last.Sub(edit)), leaving.Name)
	if err := s.showUDPEnd(ctx, socket, ended, edit, leaving.Name); err != nil {
		return err
	}
	if err := s.showReturn(ctx, leaving); err != nil {
		return err
	}
	report, err := load.Stop()
	if err != nil {
		return err
	}
	if len(report.Failures) > 0 {
		return fmt.Errorf("%d of %d connections failed, the first one at %s", len(report.Failures), report.Started, report.Failures[0])
	}
	s.out.seen("%d connections were made in all this time, %d failed", report.Succeeded, len(report.Failures))

	return nil
}

// connectUDPTo returns a socket that is connected to dns, and by chance to one
// pod.
func (s *stage) connectUDPTo(ctx context.Context, pod string) (*lab.Socket, error) {
	for range dials {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		socket, err := s.pod.Socket("udp4")
		if err != nil {
			return nil, err
		}
		name, err := askDNS(socket)
		if err != nil {
			return nil, err
		}
		if name == pod {
			return socket, socket.SetTimeout(waitTimeout)
		}
		if err := socket.Close(); err != nil {
			return nil, err
		}
	}

	return nil, fmt.Errorf("none of %d UDP sockets was connected to %s", dials, pod)
}

// askDNS connects a socket to dns and returns the name of the pod that answers.
func askDNS(socket *lab.Socket) (string, error) {
	if err := socket.Connect(dnsIPv4); err != nil {
		return "", fmt.Errorf("connect to %s: %w", dnsIPv4, err)
	}
	if err := socket.Send("who\n"); err != nil {
		return "", fmt.Errorf("datagram to %s: %w", dnsIPv4, err)
	}
	text, _, err := socket.Recv()
	if err != nil {
		return "", fmt.Errorf("answer of %s: %w", dnsIPv4, err)
	}
	answer, err := lab.ParseAnswer(text)

	return answer.Name, err
}

// end is how a socket has ended.
type end struct {
	at  time.Time
	err error
}

// endOf waits for the end of a socket that gets no more answers.
func endOf(socket *lab.Socket) <-chan end {
	ended := make(chan end, 1)
	go func() {
		_, _, err := socket.Recv()
		ended <- end{time.Now(), err}
	}()

	return ended
}

// showUDPEnd connects again when the socket has ended, as a program does.
func (s *stage) showUDPEnd(ctx context.Context, socket *lab.Socket, ended <-chan end, edit time.Time, leaving string) error {
	var got end
	select {
	case <-ctx.Done():
		return ctx.Err()
	case got = <-ended:
	}
	if lab.Errno(got.err) != unix.ECONNABORTED {
		return fmt.Errorf("the UDP socket to %s: %v; want it ended with ECONNABORTED", leaving, got.err)
	}
	name, err := askDNS(socket)
	if err != nil {
		return err
	}
	if name == leaving {
		return fmt.Errorf("the UDP socket is connected to %s again", name)
	}
	s.out.seen("%s after the edit, and some grace, its UDP socket was ended with ECONNABORTED, so that the program connects again: %s answers", short(got.at.Sub(edit)), name)

	return nil
}

// lastConnection waits until all connections go elsewhere, and returns when the
// last one arrived at a server.
func (s *stage) lastConnection(ctx context.Context, server *lab.Server, since time.Time) (time.Time, error) {
	last, count, all := since, server.Connections(), s.connections()
	for s.connections() < all+elsewhere {
		if err := pause(ctx, time.Millisecond); err != nil {
			return last, err
		}
		if n := server.Connections(); n > count {
			last, count, all = time.Now(), n, s.connections()
		}
		if time.Since(since) > waitTimeout {
			return last, fmt.Errorf("connections still arrive at %s, %s after it has left", server.Name, short(time.Since(since)))
		}
	}

	return last, nil
}

// showReturn puts the manifests back and waits until the pod gets connections.
func (s *stage) showReturn(ctx context.Context, pod *lab.Pod) error {
	server := s.servers[pod.Name]
	count, edit := server.Connections(), time.Now()
	if err := copyManifests(s.manifests()); err != nil {
		return err
	}
	for server.Connections() == count {
		if err := pause(ctx, time.Millisecond); err != nil {
			return err
		}
		if time.Since(edit) > waitTimeout {
			return fmt.Errorf("no connection arrives at %s, %s after it has come back", pod.Name, short(time.Since(edit)))
		}
	}
	s.out.seen("%s after the lines were put back, %s got a connection again", short(time.Since(edit)), pod.Name)

	return nil
}
