package datapath

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
)

// DestroyOrphans ends connected UDP sockets, in every network namespace, if the
// backend that they were given is gone, or if what they dialled does not lead
// to its Service any more. Their next receive fails with ECONNABORTED, a send
// before it with EDESTADDRREQ, and applications connect anew. Sockets that
// Sluice did not translate, and unconnected ones, are left alone.
//
// It returns how many it ended, also next to an error.
func (d *Datapath) DestroyOrphans() (int, error) {
	socks, err := d.TranslatedSocks()
	if err != nil {
		return 0, err
	}
	orphans, err := d.orphans(socks)
	if err != nil || len(orphans) == 0 {
		return 0, err
	}
	paths, err := netnsPaths()
	if err != nil {
		return 0, err
	}

	var errs []error
	destroyed := 0
	for netns, socks := range orphans {
		n, err := destroyIn(paths[netns], socks)
		destroyed += n
		if err != nil {
			errs = append(errs, fmt.Errorf("network namespace %d: %w", netns, err))
		}
	}

	return destroyed, errors.Join(errs...)
}

// orphans returns the sockets that must connect anew, by network namespace.
func (d *Datapath) orphans(socks []maps.TranslatedSock) (map[uint32][]maps.TranslatedSock, error) {
	stays := make(map[maps.SockState]bool)
	orphans := make(map[uint32][]maps.TranslatedSock)
	for _, sock := range socks {
		if sock.Peer != sock.State.Backend || sock.PeerPort != sock.State.BackendPort {
			continue // it is connected to something else by now
		}
		if _, known := stays[sock.State]; !known {
			leads, err := d.hasFrontend(sock.State)
			if err != nil {
				return nil, err
			}
			stays[sock.State] = leads && d.hasBackend(sock.State)
		}
		if !stays[sock.State] {
			orphans[sock.Netns] = append(orphans[sock.Netns], sock)
		}
	}

	return orphans, nil
}

// hasBackend says that the backend which a socket was given is still there, and
// not another one under its id.
func (d *Datapath) hasBackend(given maps.SockState) bool {
	b, ok := d.maps.BackendOf(given.BackendId)

	return ok && b.ServicePortId == given.ServicePortId && b.Addr == given.Backend && b.Port == given.BackendPort
}

// hasFrontend says that what a socket dialled still leads to the service port
// that it led to then: by itself, or as the port of a node.
func (d *Datapath) hasFrontend(given maps.SockState) (bool, error) {
	key := maps.FrontendKey{
		Addr: given.Dialled, Port: given.DialledPort,
		Proto: unix.IPPROTO_UDP, Scope: maps.ScopeInternal,
	}
	_, pool, ok, err := d.maps.FrontendOf(key)
	if err == nil && !ok {
		key.Addr = maps.AddrOf(unspecified(given.Dialled.IP()))
		_, pool, ok, err = d.maps.FrontendOf(key)
	}

	return ok && pool.ServicePortId == given.ServicePortId, err
}

func unspecified(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}

	return netip.IPv6Unspecified()
}

func destroyIn(paths []string, socks []maps.TranslatedSock) (int, error) {
	destroyed := 0
	err := inNetns(paths, func() error {
		var errs []error
		for _, sock := range socks {
			err := destroyUDP(sock)
			if err == nil {
				destroyed++
			} else if !errors.Is(err, unix.ENOENT) { // closed meanwhile
				errs = append(errs, err)
			}
		}

		return errors.Join(errs...)
	})

	return destroyed, err
}
