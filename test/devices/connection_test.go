package devices

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

const bulkPort = 9000

// mustSwallow makes every pod take bulk on bulkPort.
func (w *world) mustSwallow(t *testing.T) {
	t.Helper()
	for _, pod := range w.Pods() {
		for _, at := range pod.At(bulkPort) {
			mustSwallow(t, pod.Namespace, at)
		}
	}
}

// mustSwallow starts a server that takes as many bytes as the client asks for, then
// sends as many as it asks for. Both have a pattern that shows when one is not in its
// place.
func mustSwallow(t *testing.T, ns *lab.Namespace, address string) {
	t.Helper()
	listener, err := ns.Listen("tcp", address)
	lab.Must(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return // the test is over
			}
			go func() {
				defer conn.Close()
				var sizes struct{ Up, Down uint64 }
				if binary.Read(conn, binary.BigEndian, &sizes) == nil && receive(conn, sizes.Up) == nil {
					_ = send(conn, sizes.Down) // the client sees whether it did
				}
			}()
		}
	}()
}

// transfer sends bytes both ways over a new connection, and returns how many
// there were a second.
func transfer(from *lab.Namespace, address string, up, down uint64) (upRate, downRate float64, err error) {
	conn, err := from.Dial("tcp", address, dialTimeout)
	if err != nil {
		return 0, 0, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(6 * dialTimeout)); err != nil {
		return 0, 0, err
	}
	start := time.Now()
	err = errors.Join(binary.Write(conn, binary.BigEndian, struct{ Up, Down uint64 }{up, down}), send(conn, up))
	if err != nil {
		return 0, 0, fmt.Errorf("up: %w", err)
	}
	// The first byte back shows that the last one has arrived.
	answers := lateReader{Conn: conn}
	if err := receive(&answers, down); err != nil {
		return 0, 0, fmt.Errorf("down: %w", err)
	}

	return float64(up) / answers.first.Sub(start).Seconds(), float64(down) / time.Since(answers.first).Seconds(), nil
}

// lateReader notes when the first byte came.
type lateReader struct {
	net.Conn
	first time.Time
}

func (r *lateReader) Read(p []byte) (int, error) {
	size, err := r.Conn.Read(p)
	if r.first.IsZero() {
		r.first = time.Now()
	}

	return size, err
}

// noise is an endless stream that both ends know.
func noise() *rand.ChaCha8 { return rand.NewChaCha8([32]byte{}) }

func send(to io.Writer, size uint64) error {
	_, err := io.CopyBuffer(struct{ io.Writer }{to}, io.LimitReader(noise(), int64(size)), make([]byte, 1<<18))

	return err
}

func receive(from io.Reader, size uint64) error {
	want, got, buffer := noise(), uint64(0), make([]byte, 1<<18)
	known := make([]byte, len(buffer))
	for got < size {
		n, err := from.Read(buffer[:min(uint64(len(buffer)), size-got)])
		if _, err := want.Read(known[:n]); err != nil {
			return err
		}
		if !bytes.Equal(buffer[:n], known[:n]) {
			return fmt.Errorf("bytes %d to %d are not those that were sent", got, got+uint64(n))
		}
		got += uint64(n)
		if err != nil && got < size {
			return fmt.Errorf("after %d of %d bytes: %w", got, size, err)
		}
	}

	return nil
}

// TestBulk sends 32 MiB each way as fast as it goes, through everything that
// changes what a packet is on its way through the hooks: 64 KiB that are cut late
// or never, packets as they are on the wire, packets joined on arrival, checksums
// that are there and that are not.
//
//	client ══ node port ══┬══ pod-1-1
//	                      └══ vxlan0 ══ pod-2-0
func TestBulk(t *testing.T) {
	t.Parallel()
	const size = 32 << 20
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, filter: bridgeCNI})
	w.mustBeStrict(t)
	c := casesOf(w)
	c.local.port, c.remote.port = bulkPort, bulkPort
	w.start(t, c.local, c.remote)
	w.mustSwallow(t)

	for _, test := range []struct {
		name string
		off  []lab.Offload
		f    family
	}{
		{"with all offloads", nil, ipv4},
		{"with all offloads", nil, ipv6},
		{"without GRO", []lab.Offload{lab.EarlyCoalescing}, ipv4},
		{"without TSO", []lab.Offload{lab.Segmentation}, ipv6},
		{"without TSO, GSO and GRO", []lab.Offload{lab.Segmentation, lab.LateSplitting, lab.EarlyCoalescing}, ipv6},
		{"with real checksums", []lab.Offload{lab.Checksums}, ipv4},
		{"without anything", []lab.Offload{lab.Checksums, lab.Segmentation, lab.LateSplitting, lab.EarlyCoalescing}, ipv6},
	} {
		t.Run(test.name+", "+test.f.String(), func(t *testing.T) {
			for offload := range lab.EarlyCoalescing + 1 {
				w.mustOffload(t, offload, true)
			}
			for _, offload := range test.off {
				w.mustOffload(t, offload, false)
			}
			for _, to := range []service{c.local, c.remote} {
				up, down, err := transfer(w.Client.Namespace, to.at(nodePort, test.f, w.Nodes[0]), size, size)
				if err != nil {
					t.Errorf("%s: %v", to.backends[0].name, err)
				}
				t.Logf("%s: %.1f Gbit/s up, %.1f down", to.backends[0].name, up*8e-9, down*8e-9)
			}
		})
	}
}
