package node

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// subscription tells that something about the devices, addresses or routes of a
// namespace has changed, or of what concerns packets that it forwards; not what: that is asked for
// with its handle.
type subscription struct {
	sockets    []*nl.NetlinkSocket
	handle     *netlink.Handle
	forwarding *forwarding

	changed chan struct{} // holds one, for all changes since it was last read
	broken  chan error    // holds the end: changes may have been lost
}

// subscribe opens a subscription. From here on no change goes unnoticed. The
// caller closes it.
func subscribe(ns netns.NsHandle, receiveBuffer int) (*subscription, error) {
	// All sockets are made on this thread, in that namespace, where they stay.
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

// open opens what a subscription has beside its first socket, the only one that must not lose anything.
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

// read runs until the socket is closed or fails. ENOBUFS says that changes came
// faster than we read them.
func (s *subscription) read(socket *nl.NetlinkSocket) {
	for {
		_, from, err := socket.Receive()
		if lossy := socket != s.sockets[0]; lossy && overrun(err) {
			s.tell() // a ruleset that is loaded is more than we need to read
			continue
		}
		if err != nil {
			s.broken <- fmt.Errorf("receive changes of the node: %w", err)
			return
		}
		if from.Pid != nl.PidKernel {
			continue // anybody may send to a netlink socket
		}
		s.tell()
	}
}

// tell says that something has changed.
func (s *subscription) tell() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// overrun reports whether err says that changes were lost, and nothing worse.
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
