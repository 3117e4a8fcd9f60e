package load

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// The one that asks, the one that reads, and what the runtime may want.
	probeThreads = 4
	// Between two tries, so that the probe is no load.
	probePause = 50 * time.Microsecond
	// How long a system call of a try may take. It does not wait longer, because
	// the next try may reach another backend.
	tryTimeout = 20 * time.Millisecond
)

// poll is the probe's process: it reads questions and writes results.
func poll(stdin io.Reader, stdout io.Writer) error {
	p := &poller{
		questions: make(chan question),
		results:   json.NewEncoder(stdout),
		request:   newRequest(askAddress, headerSize, addressSize),
		answer:    make([]byte, addressSize),
		timeout:   unix.NsecToTimeval(int64(tryTimeout)),
	}
	go p.run()
	questions := json.NewDecoder(stdin)
	for {
		var q question
		if err := questions.Decode(&q); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read question: %w", err)
		}
		if !q.Target.IsValid() {
			p.stop.Store(true)

			continue
		}
		p.stop.Store(false)
		p.questions <- q
	}
}

// poller is the thread that asks.
type poller struct {
	questions chan question
	stop      atomic.Bool
	results   *json.Encoder

	request, answer []byte
	timeout         unix.Timeval
}

func (p *poller) run() {
	err := wakeInTime()
	for err == nil {
		err = p.await(<-p.questions)
	}
	fmt.Fprintln(os.Stderr, "load:", err)
	os.Exit(1)
}

// await asks until the wanted backend answers, or until it is stopped.
func (p *poller) await(q question) error {
	target, want := newSockaddr(q.Target), q.Want.As16()
	var r result
	for {
		server, connected, ok := p.try(&target)
		r.Tries++
		if !ok {
			r.Failures++
		}
		if r.Tries == 1 {
			if err := p.results.Encode(result{Begun: true}); err != nil {
				return err
			}
		}
		switch {
		case ok && netip.AddrFrom16(server).Unmap() == netip.AddrFrom16(want).Unmap():
			r.First = connected

			return p.results.Encode(r)
		case p.stop.Load():
			r.GaveUp = true

			return p.results.Encode(r)
		}
		pause(probePause)
	}
}

// try makes a connection, asks for the address of the server, and resets it, so that
// neither a socket here nor a node that tracks connections keeps state.
func (p *poller) try(target *sockaddr) (server [16]byte, connected int64, ok bool) {
	fd, errno := openSocket(target.family, unix.SOCK_STREAM)
	if errno != 0 {
		return server, 0, false
	}
	defer closeSocket(fd)
	linger := unix.Linger{Onoff: 1}
	if setOption(fd, unix.SOL_SOCKET, unix.SO_LINGER, unsafe.Pointer(&linger), unsafe.Sizeof(linger)) != 0 ||
		setTimeouts(fd, &p.timeout) != 0 ||
		connectSocket(fd, target) != 0 {
		return server, 0, false
	}
	connected, err := readMonotonic()
	if err != nil || send(fd, p.request, nil) != 0 || receiveAll(fd, p.answer) != 0 {
		return server, 0, false
	}

	return [16]byte(p.answer[headerSize:]), connected, true
}
