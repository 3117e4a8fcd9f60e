package top

import (
	"fmt"
	stdmaps "maps"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
)

// Sample is one reading of all that the kernel counts.
type Sample struct {
	at       time.Time
	took     time.Duration
	ports    map[uint32]maps.ServicePort // by id
	counts   map[maps.StatKey]uint64
	reasons  map[maps.Reason]uint64 // of the whole node
	backends []backend
	sockets  map[uint64]connection // of TCP, by cookie
	flows    map[maps.FlowKey]connection
}

// backend is a backend that is in the maps.
type backend struct {
	maps.Backend
	live int
}

// connection is what one connection has sent and received, as far as no count of its Service has it.
type connection struct {
	servicePortID, backendID    uint32
	sent, received, retransmits uint64
	rtt                         uint32
}

// Reader reads samples.
type Reader struct {
	bpfRoot string
	sockets *datapath.Sockets
}

// NewReader returns a reader of the maps that are pinned below bpfRoot. The caller closes it.
func NewReader(bpfRoot string) (*Reader, error) {
	sockets, err := datapath.OpenSockets()
	if err != nil {
		return nil, err
	}

	return &Reader{bpfRoot, sockets}, nil
}

// Close closes the reader.
func (r *Reader) Close() error { return r.sockets.Close() }

// Read returns a new sample. It opens the maps anew: they grow, and an agent of another version has others.
// The error wraps [fs.ErrNotExist] if there are none.
func (r *Reader) Read() (*Sample, error) {
	pinned, err := maps.Load(r.bpfRoot)
	if err != nil {
		return nil, err
	}
	defer pinned.Close()
	s := &Sample{at: time.Now(), sockets: make(map[uint64]connection), flows: make(map[maps.FlowKey]connection)}
	if s.ports, err = maps.Collect(pinned.ServicePorts.All()); err != nil {
		return nil, err
	}
	stdmaps.DeleteFunc(s.ports, func(_ uint32, port maps.ServicePort) bool { return port.IsProbe() })
	if s.counts, err = maps.Collect(pinned.Stats.All()); err != nil {
		return nil, err
	}
	if s.reasons, err = pinned.ReasonCounts(); err != nil {
		return nil, err
	}
	for _, b := range pinned.Backends.All() {
		if b.Id != 0 {
			s.backends = append(s.backends, backend{b, max(0, pinned.Loads.Load(b.Id).Live())})
		}
	}
	for _, table := range []*maps.Map[maps.FlowKey, maps.Flow]{pinned.HalfOpen, pinned.Unanswered, pinned.Flows} {
		for e, err := range table.All() {
			if err != nil {
				return nil, fmt.Errorf("flows: %w", err)
			}
			c := connection{servicePortID: e.Value.ServicePortId, backendID: e.Value.BackendId}
			if e.Value.Role == maps.FlowFromClient {
				c.sent = e.Value.Bytes
			} else {
				c.received = e.Value.Bytes
			}
			s.flows[e.Key] = c
		}
	}
	socks, err := r.sockets.All(pinned)
	s.addSockets(socks)
	s.took = time.Since(s.at)

	return s, err
}

// maxShare limits the time that readings take, as the inverse of their share of all time.
const maxShare = 10

// Pause returns the time to wait for the next reading.
func (s *Sample) Pause(interval time.Duration) time.Duration { return max(interval, maxShare*s.took) }

func (s *Sample) addSockets(socks []maps.TranslatedSock) {
	for _, sock := range socks {
		// Programs count the bytes of a socket when its process closes it, though it may yet send some.
		// Those of the kernel's own sockets, which no process has, they do not count.
		closed := sock.Inode == 0 && sock.State.Counted != 0
		if sock.Proto == unix.IPPROTO_TCP && !closed {
			s.sockets[sock.Cookie] = connection{
				sock.State.ServicePortId, sock.State.BackendId,
				sock.BytesSent, sock.BytesReceived, uint64(sock.Retransmits), sock.Rtt,
			}
		}
	}
}
