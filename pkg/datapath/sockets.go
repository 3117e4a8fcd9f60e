package datapath

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
)

// Sockets lists the sockets that Sluice translated, for operators. It needs no agent: it loads iterators
// of its own.
type Sockets struct {
	iterators *bpf.Iterators
}

// OpenSockets loads the iterators over sockets. The caller closes the result.
func OpenSockets() (*Sockets, error) {
	if err := maps.LiftMemlock(); err != nil {
		return nil, err
	}
	iterators, err := bpf.LoadIterators()
	if err != nil {
		return nil, err
	}

	return &Sockets{iterators}, nil
}

// Close unloads the iterators.
func (s *Sockets) Close() error { return s.iterators.Close() }

// All returns the TCP and UDP sockets in the maps m that are open at a backend, in every network namespace. An
// unconnected UDP socket is there once for each destination that it stores in itself.
func (s *Sockets) All(m *maps.Pinned) ([]maps.TranslatedSock, error) {
	connected, err := readSocks(s.iterators.Connected, m.SockState())
	if err != nil {
		return nil, err
	}
	dials, err := readSocks(s.iterators.Dials, m.UDPDials())
	if err != nil {
		return nil, err
	}
	all := dials
	for _, sock := range connected {
		if sock.Peer == sock.State.Backend && sock.PeerPort == sock.State.BackendPort {
			all = append(all, sock) // the others have connected to another address since, or in vain
		}
	}

	return all, nil
}

// readSocks runs an iterator over a map.
func readSocks(program *ebpf.Program, m *ebpf.Map) ([]maps.TranslatedSock, error) {
	it, err := link.AttachIter(link.IterOptions{Program: program, Map: m})
	if err != nil {
		return nil, fmt.Errorf("socket iterator: %w", err)
	}
	defer it.Close()
	out, err := it.Open()
	if err != nil {
		return nil, fmt.Errorf("socket iterator: open: %w", err)
	}
	defer out.Close()

	r := bufio.NewReaderSize(out, 1<<16) // each read walks the kernel's table of sockets
	var socks []maps.TranslatedSock
	for {
		var sock maps.TranslatedSock
		err := binary.Read(r, binary.NativeEndian, &sock)
		if errors.Is(err, io.EOF) {
			return socks, nil
		}
		if err != nil {
			return nil, fmt.Errorf("socket iterator: read: %w", err)
		}
		socks = append(socks, sock)
	}
}
