package datapath

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/cilium/ebpf/link"

	"github.com/sluice-lb/sluice/maps"
)

// TranslatedSocks returns the connected UDP sockets that Sluice translated, in
// every network namespace.
func (d *Datapath) TranslatedSocks() ([]maps.TranslatedSock, error) {
	programs, err := d.programs()
	if err != nil {
		return nil, err
	}
	it, err := link.AttachIter(link.IterOptions{Program: programs.Socks, Map: d.maps.SockState()})
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
