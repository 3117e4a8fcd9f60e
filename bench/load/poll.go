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
	// How long a system call of a try may take. What comes later is not waited for:
	// the next try may meet another backend.
	probePatience = 20 * time.Millisecond
)

// poll is the probe's process: it reads questions and writes news.
func poll(stdin io.Reader, stdout io.Writer) error {
	p := &poller{
		questions: make(chan question),
		news:      json.NewEncoder(stdout),
		request:   newRequest(askWho, headerSize, whoSize),
		answer:    make([]byte, whoSize),
		patience:  unix.NsecToTimeval(int64(probePatience)),
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
	news      *json.Encoder

	request, answer []byte
	patience        unix.Timeval
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
	var n news
	for {
		who, connected, ok := p.try(&target)
		n.Tries++
		if !ok {
			n.Failures++
		}
		if n.Tries == 1 {
			if err := p.news.Encode(news{Begun: true}); err != nil {
				return err
			}
		}
		switch {
		case ok && netip.AddrFrom16(who).Unmap() == netip.AddrFrom16(want).Unmap():
			n.First = connected

			return p.news.Encode(n)
		case p.stop.Load():
			n.GaveUp = true

			return p.news.Encode(n)
		}
		pause(probePause)
	}
}

// try makes a connection, asks who answers, and resets it: so nobody has to
// remember it, neither a socket here nor a node that tracks connections.
func (p *poller) try(target *sockaddr) (who [16]byte, connected int64, ok bool) {
	fd, errno := openSocket(target.family, unix.SOCK_STREAM)
	if errno != 0 {
		return who, 0, false
	}
	defer closeSocket(fd)
	linger := unix.Linger{Onoff: 1}
	if setOption(fd, unix.SOL_SOCKET, unix.SO_LINGER, unsafe.Pointer(&linger), unsafe.Sizeof(linger)) != 0 ||
		setPatience(fd, &p.patience) != 0 ||
		connectSocket(fd, target) != 0 {
		return who, 0, false
	}
	connected, err := readMonotonic()
	if err != nil || send(fd, p.request, nil) != 0 || receiveAll(fd, p.answer) != 0 {
		return who, 0, false
	}

	return [16]byte(p.answer[headerSize:]), connected, true
}
