package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const (
	// quietTime is the least time between two lists of the node, and between two readings of its concerns. On a node with very
	// many routes, or rules of a firewall, it is this multiple of the time that the one or the other takes.
	quietTime     = 50 * time.Millisecond
	quietMultiple = 10
	// relistTime is the time after which the node is listed without a notification.
	relistTime = time.Minute
	// A subscription that breaks repeatedly is renewed with exponential backoff.
	firstRetry = quietTime
	lastRetry  = 10 * time.Second
	// receiveBuffer holds the notifications that a hundred new pods cause at once.
	receiveBuffer = 4 << 20
)

// Config is the configuration of [Watch].
type Config struct {
	// Update receives the whole state: at once, and again after each change. It may
	// keep the state. Watch calls it on its own goroutine; changes that come while
	// it runs are reported together afterwards.
	Update func(State)
	// Netns is the network namespace to watch, which may be closed when Watch
	// has returned. Nil means that of the calling thread.
	Netns *os.File
	// Bypassed names a program or filter of another owner that sees no packets which leave again at the
	// ingress of their device, by the index of that device, or 0 if it is in the network stack. It is
	// called in the namespace, with the devices at which packets may leave again. Nil means that there
	// is none.
	Bypassed func(devices []int) (map[int]string, error)
	// Rules decide which these devices are, as those of [Decide].
	Rules Rules
	// Log gets a warning when a subscription breaks and is renewed. Nil means
	// no log.
	Log *slog.Logger

	// concern reads the concerns; nil means [reader.concern].
	concern func() concern
	// 0 means the constant of that name.
	receiveBuffer         int // bytes
	relistTime, quietTime time.Duration
}

// Validate returns an error if the configuration lacks a field.
func (c Config) Validate() error {
	if c.Update == nil {
		return errors.New("node: Config.Update is nil")
	}

	return nil
}

// Watch reports the addresses and devices of this node, and every change, until ctx
// ends; then it returns nil. It reports the first change after a quiet time at once,
// and those of a burst together, at most 50 ms late. Devices do not wait for concerns to be read. It reports an IPv6 address when
// duplicate address detection has succeeded.
//
// Watch returns an error only if it cannot begin. Later it renews a subscription
// that breaks, and lists everything again, so that no change is lost for good.
func Watch(ctx context.Context, config Config) error {
	if err := config.Validate(); err != nil {
		return err
	}
	config.receiveBuffer = cmp.Or(config.receiveBuffer, receiveBuffer)
	config.relistTime = cmp.Or(config.relistTime, relistTime)
	config.quietTime = cmp.Or(config.quietTime, quietTime)
	w := watcher{config: config, log: config.Log, concerns: make(chan concern, 1)}
	if w.log == nil {
		w.log = slog.New(slog.DiscardHandler)
	}
	if config.Netns != nil {
		w.ns = netns.NsHandle(config.Netns.Fd())
	} else {
		// Later sockets must not depend on the thread.
		ns, err := netns.Get()
		if err != nil {
			return fmt.Errorf("network namespace of this thread: %w", err)
		}
		defer ns.Close()
		w.ns = ns
	}
	if w.config.concern == nil {
		r, err := newReader(w.ns)
		if err != nil {
			return err
		}
		defer r.close()
		w.config.concern = r.concern
	}
	defer w.reading.Wait()

	for {
		err := w.follow(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if w.reported == nil {
			return err
		}
		w.log.Warn("Watch of the node is renewed", "overrun", overrun(err), "err", err)
		if !sleep(ctx, w.retry) {
			return nil
		}
		w.retry = min(2*w.retry, lastRetry)
	}
}

// watcher is the state of a Watch.
type watcher struct {
	config Config
	log    *slog.Logger
	ns     netns.NsHandle

	reported *State        // nil before the first report
	listed   State         // the last list
	next     time.Time     // of the earliest list after a notification
	retry    time.Duration // before the next subscription

	// Concerns are read beside the lists, by sockets of their own: a renewed subscription does not wait for that, either.
	concern   concern      // as last read
	concerns  chan concern // has room for one that was read
	busy, due bool         // they are being read, and have to be read again
	rested    time.Time    // when they may be read again
	reading   sync.WaitGroup
}

// follow subscribes before it lists, so that no change is lost in between. It
// returns when the subscription breaks or ctx ends.
func (w *watcher) follow(ctx context.Context) error {
	s, err := subscribe(w.ns, w.config.receiveBuffer)
	if err != nil {
		return err
	}
	defer s.close()
	s.reader.bypassed, s.reader.devices = w.config.Bypassed, w.config.Rules

	return w.listOnChange(ctx, s)
}

// listOnChange lists the node at once, after each change, and after relistTime. Each list is followed by a reading of the
// concerns, in a goroutine of its own and not more often than they allow. Only the first report of all waits for one.
func (w *watcher) listOnChange(ctx context.Context, s *subscription) error {
	isFirst := w.reported == nil
	if isFirst {
		w.concern = w.config.concern()
	}
	if err := w.report(s); err != nil {
		return err
	}
	relist := time.NewTicker(w.config.relistTime)
	defer relist.Stop()
	again := time.NewTimer(0)
	again.Stop()
	defer again.Stop()
	readAgain := func() {
		if w.due = true; !w.busy {
			again.Reset(time.Until(w.rested))
		}
	}
	if !isFirst { // changes of the concerns may have been lost
		readAgain()
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-s.broken:
			return err
		case w.concern = <-w.concerns:
			w.busy = false
			if w.due {
				readAgain()
			}
			w.update()

			continue
		case <-again.C:
			w.busy, w.due = true, false
			w.reading.Go(w.readConcern)

			continue
		case <-relist.C:
		case <-s.changed:
			if !sleep(ctx, time.Until(w.next)) {
				return nil
			}
		}
		if err := w.report(s); err != nil {
			return err
		}
		readAgain()
	}
}

// readConcern reads the concerns.
func (w *watcher) readConcern() {
	begin := time.Now()
	concern := w.config.concern()
	took := time.Since(begin)
	w.rested = time.Now().Add(max(w.config.quietTime, quietMultiple*took))
	w.concerns <- concern
}

// report lists the node, and reports its state if it has changed.
func (w *watcher) report(s *subscription) error {
	select {
	case <-s.changed: // the list below includes the change
	default:
	}
	begin := time.Now()
	state, err := s.reader.read()
	if err != nil {
		return err
	}
	took := time.Since(begin)
	w.listed, w.next, w.retry = state, begin.Add(took+max(w.config.quietTime, quietMultiple*took)), firstRetry
	w.update()

	return nil
}

// update reports what was listed and the concern that was read last, if either has changed.
func (w *watcher) update() {
	state := w.listed
	state.add(w.concern)
	if w.reported == nil || !w.reported.equal(state) {
		w.reported = &state
		w.config.Update(state)
	}
}

// sleep waits for the pause, and returns false if ctx ends before.
func sleep(ctx context.Context, pause time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(pause):
		return true
	}
}

// subscription notifies that the devices, addresses or routes of a namespace have
// changed, or its rules for forwarded packets. It does not report what has changed: its
// reader reads the state.
type subscription struct {
	sockets []*nl.NetlinkSocket
	reader  *reader

	changed chan struct{} // has one element if there were changes since it was last read
	broken  chan error    // why a socket was given up: changes may have been lost
}

// subscribe opens a subscription, which notifies of all changes from then on. The
// caller closes it.
func subscribe(ns netns.NsHandle, receiveBuffer int) (*subscription, error) {
	// Sockets stay in the namespace in which they are created.
	socket, err := nl.SubscribeAt(ns, netns.None(), unix.NETLINK_ROUTE,
		unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE,
		unix.RTNLGRP_TC)
	if err != nil {
		return nil, fmt.Errorf("subscribe to changes of the node: %w", err)
	}
	s := &subscription{
		sockets: []*nl.NetlinkSocket{socket},
		changed: make(chan struct{}, 1),
		broken:  make(chan error, 3),
	}
	if err := s.open(ns, receiveBuffer); err != nil {
		s.close()

		return nil, err
	}
	for _, socket := range s.sockets {
		go s.read(socket)
	}

	return s, nil
}

// open opens the other sockets of a subscription. Only the first one needs room to lose nothing.
func (s *subscription) open(ns netns.NsHandle, receiveBuffer int) error {
	if err := s.sockets[0].SetReceiveBufferSize(receiveBuffer, true); err != nil {
		return fmt.Errorf("receive buffer: %w", err)
	}
	more, err := subscribeForwarding(ns)
	s.sockets = append(s.sockets, more...)
	if err != nil {
		return err
	}
	s.reader, err = newReader(ns)

	return err
}

// read receives notifications until the socket is closed or fails. It fails with
// ENOBUFS when they arrive faster than they are read.
func (s *subscription) read(socket *nl.NetlinkSocket) {
	for {
		_, from, err := socket.Receive()
		if lossy := socket != s.sockets[0]; lossy && overrun(err) {
			s.notify() // by a large ruleset: it is listed again anyway
			continue
		}
		if err != nil {
			s.broken <- fmt.Errorf("receive changes of the node: %w", err)
			return
		}
		if from.Pid != nl.PidKernel {
			continue // any process may send to a netlink socket
		}
		s.notify()
	}
}

// notify marks the state as changed.
func (s *subscription) notify() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// overrun reports whether err is that of a socket whose buffer was full, so that
// notifications were lost.
func overrun(err error) bool { return errors.Is(err, unix.ENOBUFS) }

func (s *subscription) close() {
	for _, socket := range s.sockets {
		socket.Close()
	}
	if s.reader != nil {
		s.reader.close()
	}
}
