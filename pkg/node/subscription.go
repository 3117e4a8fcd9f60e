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
// namespace has changed; not what: that is asked for with its handle.
type subscription struct {
	socket *nl.NetlinkSocket
	handle *netlink.Handle

	changed chan struct{} // holds one, for all changes since it was last read
	broken  chan error    // holds the end: changes may have been lost
}

// subscribe opens a subscription. From here on no change goes unnoticed. The
// caller closes it.
func subscribe(ns netns.NsHandle, receiveBuffer int) (*subscription, error) {
	// Both sockets are made on this thread, in that namespace, where they stay.
	socket, err := nl.SubscribeAt(ns, netns.None(), unix.NETLINK_ROUTE,
		unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("subscribe to changes of the node: %w", err)
	}
	if err := socket.SetReceiveBufferSize(receiveBuffer, true); err != nil {
		socket.Close()
		return nil, fmt.Errorf("receive buffer: %w", err)
	}
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		socket.Close()
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	s := &subscription{
		socket:  socket,
		handle:  handle,
		changed: make(chan struct{}, 1),
		broken:  make(chan error, 1),
	}
	go s.read()

	return s, nil
}

// read runs until the socket is closed or fails. ENOBUFS says that changes came
// faster than we read them.
func (s *subscription) read() {
	for {
		_, from, err := s.socket.Receive()
		if err != nil {
			s.broken <- fmt.Errorf("receive changes of the node: %w", err)
			return
		}
		if from.Pid != nl.PidKernel {
			continue // anybody may send to a netlink socket
		}
		select {
		case s.changed <- struct{}{}:
		default:
		}
	}
}

// overrun reports whether err says that changes were lost, and nothing worse.
func overrun(err error) bool { return errors.Is(err, unix.ENOBUFS) }

func (s *subscription) close() {
	s.socket.Close()
	s.handle.Close()
}
