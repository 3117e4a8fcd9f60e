package node

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// subscription notifies that the devices, addresses or routes of a namespace have
// changed, or its rules for forwarded packets. It does not report what has changed: its
// handle lists the state.
type subscription struct {
	sockets    []*nl.NetlinkSocket
	handle     *netlink.Handle
	forwarding *forwarding

	changed chan struct{} // has one element if there were changes since it was last read
	broken  chan error    // why a socket was given up: changes may have been lost
}

// subscribe opens a subscription, which notifies of all changes from then on. The
// caller closes it.
func subscribe(ns netns.NsHandle, receiveBuffer int) (*subscription, error) {
	// Sockets stay in the namespace in which they are created.
	socket, err := nl.SubscribeAt(ns, netns.None(), unix.NETLINK_ROUTE,
		unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE)
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
	if s.handle, err = netlink.NewHandleAt(ns, unix.NETLINK_ROUTE); err != nil {
		return fmt.Errorf("netlink socket: %w", err)
	}
	s.forwarding, err = newForwarding(ns, s.handle)

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
	if s.handle != nil {
		s.handle.Close()
	}
	if s.forwarding != nil {
		s.forwarding.close()
	}
}
