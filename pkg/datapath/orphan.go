package datapath

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
)

// DestroyOrphans destroys connected UDP sockets, in every network namespace, if their
// backend is gone, or if their original destination does not belong to the Service
// any more. Their next receive fails with ECONNABORTED, a send before it with
// EDESTADDRREQ, and applications connect anew. It does not touch sockets that Sluice
// did not translate, and unconnected ones.
//
// It returns how many it destroyed, also in case of an error.
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

// orphans returns the sockets that have to connect anew, by network namespace.
func (d *Datapath) orphans(socks []maps.TranslatedSock) (map[uint32][]maps.TranslatedSock, error) {
	stays := make(map[maps.SockState]bool)
	orphans := make(map[uint32][]maps.TranslatedSock)
	for _, sock := range socks {
		if sock.Peer != sock.State.Backend || sock.PeerPort != sock.State.BackendPort {
			continue // it has connected to another address since
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

// hasBackend reports whether the backend of a socket still exists: its id may belong to
// another one by now.
func (d *Datapath) hasBackend(given maps.SockState) bool {
	b, ok := d.maps.BackendOf(given.BackendId)

	return ok && b.ServicePortId == given.ServicePortId && b.Addr == given.Backend && b.Port == given.BackendPort
}

// hasFrontend reports whether the original destination of a socket still belongs to the
// same service port, as a frontend of its own or as a node port.
func (d *Datapath) hasFrontend(given maps.SockState) (bool, error) {
	key := maps.FrontendKey{
		Addr: given.OriginalDst, Port: given.OriginalPort,
		Proto: unix.IPPROTO_UDP, Scope: maps.ScopeInternal,
	}
	_, pool, ok, err := d.maps.FrontendOf(key)
	if err == nil && !ok {
		key.Addr = maps.AddrOf(unspecified(given.OriginalDst.IP()))
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
