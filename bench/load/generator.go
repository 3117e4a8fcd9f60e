package load

import (
	"bytes"
	"encoding/gob"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// window is the time in which exchanges are counted, on the clock of [now].
type window struct {
	start    time.Duration // of the first exchange
	from, to time.Duration
}

// now returns the time since the process started, on a monotonic clock.
func now() time.Duration { return time.Since(processStart) }

var processStart = time.Now()

const (
	// The clients have this long to become ready for the first exchange.
	makeReady = 20 * time.Millisecond
	// After a failure, a client of a closed loop waits: where nothing works, it need not be fast.
	pauseAfterFailure = time.Millisecond
	// slotLength is the resolution of [Result.Silence].
	slotLength = 100 * time.Millisecond
)

func slotsOf(d time.Duration) int { return int(d / slotLength) }

// generate is the load generator's process: it reads its [Work], does it, and
// writes its [Result].
func generate(stdin io.Reader, stdout io.Writer) error {
	var work Work
	if err := json.NewDecoder(stdin).Decode(&work); err != nil {
		return fmt.Errorf("read work: %w", err)
	}
	go exitAtEnd()
	result, err := work.do()
	if err != nil {
		return err
	}

	return gob.NewEncoder(stdout).Encode(result)
}

// do runs the clients, reads the machine's CPU time in the window, and adds up what the
// clients counted.
func (w *Work) do() (*Result, error) {
	var clients []*client
	for number := range w.Clients {
		clients = append(clients, newClient(w, number))
	}
	start := now() + makeReady
	window := window{start: start, from: start + w.WarmUp, to: start + w.WarmUp + w.Duration}
	var running sync.WaitGroup
	for _, c := range clients {
		running.Go(func() { c.run(window) })
	}
	pause(window.from - now())
	before, err := ReadCPU()
	if err != nil {
		return nil, err
	}
	pause(window.to - now())
	after, err := ReadCPU()
	running.Wait()
	if err != nil {
		return nil, err
	}

	r := &Result{Latencies: newLatencies(), Lateness: newLatencies(), Machine: after.Sub(before)}
	last, busy := window.to, make([]bool, slotsOf(w.Duration))
	for _, c := range clients {
		r.Succeeded += c.succeeded
		r.Failed += c.failed
		if r.FirstError == "" {
			r.FirstError = c.firstError
		}
		last = max(last, c.last)
		for i, succeeded := range c.slots {
			busy[i] = busy[i] || succeeded
		}
		r.Latencies.Merge(c.latencies.Histogram)
		r.Lateness.Merge(c.lateness.Histogram)
	}
	for _, succeeded := range busy {
		if !succeeded {
			r.Silence += slotLength
		}
	}
	r.Started, r.Elapsed = r.Succeeded+r.Failed, last-window.from

	return r, nil
}

// client is one thread that makes exchanges, one after the other.
type client struct {
	work             *Work
	number           int
	targets, sources []sockaddr

	request, answer []byte
	sent            uint32   // the last request's number
	source          sockaddr // the last datagram's sender
	kept            int      // the socket that stays open; -1: none
	timeout         unix.Timeval

	succeeded, failed   int
	firstError          string
	slots               []bool        // of slotLength each, from the beginning of the window: something succeeded
	last                time.Duration // when the last that counts began
	latencies, lateness Latencies
}

func newClient(w *Work, number int) *client {
	ask := byte(askSize)
	if w.Closing == ServerCloses {
		ask = askLast
	}
	c := &client{
		work: w, number: number, kept: -1, timeout: unix.NsecToTimeval(int64(timeout)),
		request: newRequest(ask, requestSize, responseSize), answer: make([]byte, responseSize),
		slots: make([]bool, slotsOf(w.Duration)), latencies: newLatencies(), lateness: newLatencies(),
	}
	for _, target := range w.Targets {
		c.targets = append(c.targets, newSockaddr(target))
	}
	for _, source := range w.Sources {
		c.sources = append(c.sources, newSockaddr(netip.AddrPortFrom(source, 0)))
	}

	return c
}

// run makes exchanges until the window is over. With a rate, exchanges that could not
// begin within a second after it count as failures.
func (c *client) run(window window) {
	if err := wakeInTime(); err != nil {
		c.fail("set timer slack: " + err.Error())

		return
	}
	for turn := 0; ; turn++ {
		due, began := c.wait(window, turn)
		if due >= window.to {
			return
		}
		if began >= window.to+timeout {
			if due >= window.from {
				c.fail("never begun: the clients are too far behind")
			}

			continue
		}
		target := &c.targets[(c.number+turn)%len(c.targets)]
		clock, fault := c.exchange(target)
		if due >= window.from {
			c.last = began
			if fault.call != "" {
				c.fail(fmt.Sprintf("%s %v: %v", fault.call, addrPortOf(target), fault.errno))
			} else {
				c.succeeded++
				if c.work.Rate > 0 {
					c.lateness.add(began - due)
					clock.from = due
				}
				c.latencies.add(clock.to - clock.from)
				if slot := int((now() - window.from) / slotLength); slot < len(c.slots) {
					c.slots[slot] = true
				}
			}
		}
		if fault.call != "" && c.work.Rate == 0 {
			pause(pauseAfterFailure)
		}
	}
}

// wait waits for the time of a turn, and returns when it was due and what time it
// is. In a closed loop it is due when the client is ready. With a rate, the turns of the
// clients alternate, at even distances.
func (c *client) wait(window window, turn int) (due, began time.Duration) {
	switch rate := int64(c.work.Rate); {
	case rate > 0:
		number := int64(turn)*int64(c.work.Clients) + int64(c.number)
		due = window.start + time.Duration(number/rate)*time.Second + time.Duration(number%rate)*time.Second/time.Duration(rate)
		if began = now(); began < due {
			pause(due - began)
			began = now()
		}

		return due, began
	case turn == 0:
		pause(window.start - now())
	default:
		pause(c.work.Pause)
	}
	began = now()

	return began, began
}

func (c *client) fail(why string) {
	if c.failed == 0 {
		c.firstError = why
	}
	c.failed++
}

// clock is when an exchange's time began, and when it was over.
type clock struct{ from, to time.Duration }

// fault is a failed system call and its errno. The zero fault is none.
type fault struct {
	call  string
	errno syscall.Errno
}

// exchange makes one exchange of the work's kind with a target. A kept socket is
// connected to the client's first target, unless each datagram has its own destination.
func (c *client) exchange(target *sockaddr) (t clock, f fault) {
	switch c.work.Kind {
	case Connect:
		return c.exchangeOnNewConnection(target)
	case UDPNew:
		t.from = now()
		fd, f := c.open(target, unix.SOCK_DGRAM, true)
		if f.call == "" {
			f = c.askByDatagram(fd, nil)
			closeSocket(fd)
		}
		t.to = now()

		return t, f
	}
	kind := unix.SOCK_DGRAM
	if c.work.Kind == Exchange {
		kind = unix.SOCK_STREAM
	}
	if c.kept < 0 {
		first := &c.targets[c.number%len(c.targets)]
		if c.kept, f = c.open(first, kind, c.work.Kind != UDPUnconnected); f.call != "" {
			return t, f
		}
		if one := int32(1); kind == unix.SOCK_STREAM {
			setOption(c.kept, unix.IPPROTO_TCP, unix.TCP_NODELAY, unsafe.Pointer(&one), unsafe.Sizeof(one))
		}
	}
	t.from = now()
	switch c.work.Kind {
	case Exchange:
		f = c.ask(c.kept)
	case UDPConnected:
		f = c.askByDatagram(c.kept, nil)
	default:
		f = c.askByDatagram(c.kept, target)
	}
	t.to = now()
	if f.call != "" {
		// A late answer must not be taken for that to another request.
		closeSocket(c.kept)
		c.kept = -1
	}

	return t, f
}

// exchangeOnNewConnection connects, sends the request, and ends the connection as
// [Work.Closing] demands. By default it closes in an orderly way, first: what follows is a
// FIN, and the connection's last state is kept on this side.
func (c *client) exchangeOnNewConnection(target *sockaddr) (t clock, f fault) {
	fd, f := c.open(target, unix.SOCK_STREAM, false)
	if f.call != "" {
		return t, f
	}
	defer closeSocket(fd)
	if len(c.sources) > 0 {
		// The port is chosen at connect: by then the kernel knows which ports the target has.
		one := int32(1)
		errno := setOption(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, unsafe.Pointer(&one), unsafe.Sizeof(one))
		if errno == 0 {
			errno = bindSocket(fd, &c.sources[(c.number+int(c.sent))%len(c.sources)])
		}
		if errno != 0 {
			return t, fault{"bind for", errno}
		}
	}
	t.from = now()
	errno := connectSocket(fd, target)
	t.to = now()
	if errno != 0 {
		return t, fault{"connect", errno}
	}
	if f := c.ask(fd); f.call != "" {
		return t, f
	}
	switch c.work.Closing {
	case ServerCloses:
		n, errno := receive(fd, c.answer, nil)
		if errno == 0 && n > 0 {
			errno = unix.EBADMSG
		}
		if errno != 0 {
			return t, fault{"receive the end from", errno}
		}
	case ClientResets:
		if errno := resetAtClose(fd); errno != 0 {
			return t, fault{"set SO_LINGER for", errno}
		}
	}

	return t, fault{}
}

// open returns a socket with time-outs, connected if so demanded, or -1.
func (c *client) open(target *sockaddr, kind int, connected bool) (int, fault) {
	fd, errno := openSocket(kind)
	if errno != 0 {
		return -1, fault{"socket for", errno}
	}
	f := fault{}
	if errno := setTimeouts(fd, &c.timeout); errno != 0 {
		f = fault{"set time-out for", errno}
	} else if connected {
		if errno := connectSocket(fd, target); errno != 0 {
			f = fault{"connect", errno}
		}
	}
	if f.call != "" {
		closeSocket(fd)
		fd = -1
	}

	return fd, f
}

// ask exchanges a request and its response on a connection.
func (c *client) ask(fd int) fault {
	c.sent++
	setNumber(c.request, c.sent)
	if errno := send(fd, c.request, nil); errno != 0 {
		return fault{"send to", errno}
	}
	if errno := receiveAll(fd, c.answer); errno != 0 {
		return fault{"receive from", errno}
	}

	return c.check()
}

// askByDatagram exchanges two datagrams, with the connected peer or, if to is not nil,
// with that address, from which the answer must come, too.
func (c *client) askByDatagram(fd int, to *sockaddr) fault {
	c.sent++
	setNumber(c.request, c.sent)
	if errno := send(fd, c.request, to); errno != 0 {
		return fault{"send to", errno}
	}
	var from *sockaddr
	if to != nil {
		from = &c.source
	}
	n, errno := receive(fd, c.answer, from)
	switch {
	case errno != 0:
		return fault{"receive from", errno}
	case n != len(c.answer):
		return fault{"answer of", unix.EBADMSG}
	case to != nil && *from != *to:
		return fault{"answer of", unix.EREMCHG}
	}

	return c.check()
}

// check returns a fault unless the answer is that to the last request.
func (c *client) check() fault {
	if !bytes.Equal(c.answer[:headerSize], c.request[:headerSize]) {
		return fault{"answer of", unix.EBADMSG}
	}

	return fault{}
}
