package load

import (
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// client is one thread that makes exchanges, one after the other.
type client struct {
	work     *Work
	number   int
	targets  []sockaddr
	sources  []sockaddr
	exchange func(*client, *sockaddr) (clock, fault)

	request, answer []byte
	sent            uint32   // the last request's number
	source          sockaddr // the last datagram's sender
	kept            int      // the socket that stays open; -1: none
	timeout         unix.Timeval

	succeeded, failed   int
	slots               []bool // of slotLength each, from the beginning of the window: something succeeded
	first               failure
	last                time.Duration // when the last that counts began
	latencies, lateness samples
}

// clock is when an exchange's time began, and when it was over.
type clock struct{ from, to time.Duration }

// fault is a failed system call and its errno. The zero fault is none.
type fault struct {
	call  string
	errno syscall.Errno
}

// failure is a fault in an exchange with a target.
type failure struct {
	fault
	target *sockaddr
}

// text is "" for no failure.
func (f failure) text() string {
	switch {
	case f.call == "":
		return ""
	case f.target == nil:
		return f.call
	default:
		return fmt.Sprintf("%s %v: %v", f.call, f.target.addrPort(), f.errno)
	}
}

func newClient(w *Work, number int) *client {
	ask := byte(askSize)
	if w.Closing == ServerCloses {
		ask = askLast
	}
	c := &client{
		work:      w,
		number:    number,
		exchange:  exchanges[w.Kind],
		request:   newRequest(ask, w.Request, w.Response),
		answer:    make([]byte, w.Response),
		kept:      -1,
		timeout:   unix.NsecToTimeval(int64(timeout)),
		latencies: newSamples(),
		slots:     make([]bool, slotsOf(w.Duration)),
	}
	if w.Rate > 0 {
		c.lateness = newSamples()
	}
	for _, target := range w.Targets {
		c.targets = append(c.targets, newSockaddr(target))
	}

	for _, source := range w.Sources {
		c.sources = append(c.sources, newSockaddr(netip.AddrPortFrom(source, 0)))
	}

	return c
}

// Where nothing works, one need not be fast.
const pauseAfterFailure = time.Millisecond

// run makes exchanges until the window is over.
func (c *client) run(window window) {
	if err := wakeInTime(); err != nil {
		c.count(clock{}, fault{call: "set timer slack: " + err.Error()}, nil)

		return
	}
	for turn := 0; ; turn++ {
		due, began := c.wait(window, turn)
		if due >= window.to {
			return
		}
		if began >= window.to+timeout {
			c.giveUp(window, turn)

			return
		}
		target := &c.targets[(c.number+turn)%len(c.targets)]
		clock, fault := c.exchange(c, target)
		if due >= window.from {
			c.last = began
			if c.work.Rate > 0 {
				c.addLateness(fault, began-due)
				clock.from = due
			}
			c.count(clock, fault, target)
			c.noteSlot(fault, now()-window.from)
		}
		if fault.call != "" && c.work.Rate == 0 {
			pause(pauseAfterFailure)
		}
	}
}

// wait waits for the time of a turn, and returns when it was due and what time it
// is. In a closed loop it is due when the client is ready.
func (c *client) wait(window window, turn int) (due, began time.Duration) {
	if c.work.Rate > 0 {
		due = c.due(window, turn)
		began = now()
		if began < due {
			pause(due - began)
			began = now()
		}

		return due, began
	}
	if turn == 0 {
		pause(window.start - now())
	} else {
		pause(c.work.Pause)
	}
	began = now()

	return began, began
}

// due is when a turn is due: the clients' turns alternate, at even distances.
func (c *client) due(window window, turn int) time.Duration {
	number := int64(turn)*int64(c.work.Clients) + int64(c.number)
	seconds, rest := number/int64(c.work.Rate), number%int64(c.work.Rate)

	return window.start + time.Duration(seconds)*time.Second + time.Duration(rest)*time.Second/time.Duration(c.work.Rate)
}

// giveUp counts the turns that can not begin any more as failures.
func (c *client) giveUp(window window, turn int) {
	for ; c.due(window, turn) < window.to; turn++ {
		if c.due(window, turn) >= window.from {
			c.count(clock{}, fault{call: "never begun: the clients are too far behind"}, nil)
		}
	}
}

// slotLength is how long nothing may succeed before it shows in [Result.Silence].
const slotLength = 100 * time.Millisecond

func slotsOf(d time.Duration) int { return int(d / slotLength) }

// noteSlot notes that something has succeeded, so long after the window began.
func (c *client) noteSlot(f fault, at time.Duration) {
	if slot := int(at / slotLength); f.call == "" && slot < len(c.slots) {
		c.slots[slot] = true
	}
}

func (c *client) addLateness(f fault, late time.Duration) {
	if f.call == "" {
		c.lateness.add(late)
	}
}

func (c *client) count(clock clock, f fault, target *sockaddr) {
	if f.call == "" {
		c.succeeded++
		c.latencies.add(clock.to - clock.from)

		return
	}
	if c.failed == 0 {
		c.first = failure{f, target}
	}
	c.failed++
}
