package datapath

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
)

// DestroyOrphans ends the connected UDP sockets that were given a backend
// which is not in the backends map any more, in every network namespace. Their
// next receive fails with ECONNABORTED, a send before it with EDESTADDRREQ, and
// applications connect anew. Sockets that Sluice did not translate, and
// unconnected ones, are left alone.
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

// orphans returns the sockets whose backend is gone, by network namespace.
func (d *Datapath) orphans(socks []maps.TranslatedSock) (map[uint32][]maps.TranslatedSock, error) {
	type backend struct{ id, frontend uint32 }
	lives := make(map[backend]bool)
	orphans := make(map[uint32][]maps.TranslatedSock)
	for _, sock := range socks {
		if !isConnectedUDP(sock) {
			continue
		}
		has := backend{sock.State.BackendId, sock.State.FrontendId}
		if _, known := lives[has]; !known {
			found, ok, err := d.maps.Backends.Lookup(has.id)
			if err != nil {
				return nil, err
			}
			lives[has] = ok && found.FrontendId == has.frontend
		}
		if !lives[has] {
			orphans[sock.Netns] = append(orphans[sock.Netns], sock)
		}
	}

	return orphans, nil
}

// isConnectedUDP says that the socket is connected to the backend it was given.
func isConnectedUDP(sock maps.TranslatedSock) bool {
	return sock.Proto == unix.IPPROTO_UDP && sock.Connected != 0 &&
		sock.Peer == sock.State.Backend && sock.PeerPort == sock.State.BackendPort
}

func destroyIn(path string, socks []maps.TranslatedSock) (int, error) {
	if path == "" {
		return 0, ErrNetnsNotFound
	}
	destroyed := 0
	err := inNetns(path, func() error {
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
