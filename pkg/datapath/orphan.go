package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	stdmaps "maps"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/node"
)

// Orphans are the connected UDP sockets, of every network namespace, whose Service has left the backend that they
// got: it is gone, or their original destination does not belong to the Service any more.
type Orphans struct {
	// Left are the addresses of the backends to which they are connected, where programs look for their datagrams; nil if
	// they are not known.
	Left map[maps.Addr]struct{}
	// Stuck are those whose datagrams no program can lead to another backend, although there is one.
	Stuck []maps.TranslatedSock
	// Passing is how many are known not to be stuck: they may get so.
	Passing int
}

// FindOrphans looks for orphans. It does not see sockets that Sluice did not translate, and unconnected ones. It
// also returns an error if it could not tell of some whether they are stuck.
func (d *Datapath) FindOrphans() (Orphans, error) {
	socks, err := d.TranslatedSocks()
	if err != nil {
		return Orphans{}, err
	}
	orphans, err := d.orphans(socks)
	if err != nil {
		return Orphans{}, err
	}
	found := Orphans{Left: make(map[maps.Addr]struct{})}
	for _, sock := range orphans {
		found.Left[sock.Peer] = struct{}{}
	}
	found.Stuck, found.Passing, err = d.stuck(orphans)

	return found, err
}

// DestroySocks destroys TCP and connected UDP sockets, in every network namespace. The processes that
// have them open get ECONNABORTED, and the peer of a TCP socket an RST. It leaves alone sockets that
// have been closed meanwhile, or connected to another address. It needs CONFIG_INET_DIAG_DESTROY.
//
// It returns how many it destroyed, also in case of an error.
func DestroySocks(socks []maps.TranslatedSock) (int, error) {
	destroyed := 0
	err := eachNetns(socks, func(_ uint64, socks []maps.TranslatedSock) (failed error) {
		for _, sock := range socks {
			err := destroy(sock)
			if err == nil {
				destroyed++
			} else if !errors.Is(err, unix.ENOENT) { // the application has closed it
				failed = errors.Join(failed, err)
			}
		}

		return failed
	})

	return destroyed, err
}

// eachNetns visits the network namespaces of sockets, on a thread there. Errors do not end it.
func eachNetns(socks []maps.TranslatedSock, visit func(inode uint64, socks []maps.TranslatedSock) error) error {
	if len(socks) == 0 {
		return nil
	}
	byNetns := make(map[uint32][]maps.TranslatedSock)
	for _, sock := range socks {
		byNetns[sock.Netns] = append(byNetns[sock.Netns], sock)
	}
	var errs []error
	err := node.EachNamespace(func(inode uint64, ns netns.NsHandle) (done bool, _ error) {
		socks := byNetns[uint32(inode)]
		delete(byNetns, uint32(inode))
		if len(socks) > 0 {
			errs = append(errs, wrap(fmt.Sprintf("network namespace %d", inode),
				node.InNamespace(ns, func() error { return visit(inode, socks) })))
		}

		return len(byNetns) == 0, nil
	})
	for _, inode := range slices.Sorted(stdmaps.Keys(byNetns)) { // so that the same ones make the same error
		errs = append(errs, fmt.Errorf("network namespace %d: %w", inode, ErrNetnsNotFound))
	}

	return errors.Join(append(errs, err)...)
}

// orphans returns the sockets whose Service has left the backend to which they are connected.
func (d *Datapath) orphans(socks []maps.TranslatedSock) ([]maps.TranslatedSock, error) {
	stays := make(map[maps.Translation]bool)
	var orphans []maps.TranslatedSock
	for _, sock := range socks {
		state := sock.State
		if sock.Peer != state.Backend || sock.PeerPort != state.BackendPort {
			continue // it has connected to another address since
		}
		t := maps.Translation{
			OriginalDst: state.OriginalDst, OriginalPort: state.OriginalPort, ServicePortID: state.ServicePortId,
			Backend: state.Backend, BackendPort: state.BackendPort, BackendID: state.BackendId,
		}
		if _, known := stays[t]; !known {
			var err error
			if stays[t], err = d.staysWith(t); err != nil {
				return nil, err
			}
		}
		if !stays[t] {
			orphans = append(orphans, sock)
		}
	}

	return orphans, nil
}

// staysWith reports whether a socket belongs to the backend to which it is connected: it is the one that it got, or has
// come back since.
func (d *Datapath) staysWith(t maps.Translation) (bool, error) {
	current, err := d.maps.IsCurrent(t, unix.IPPROTO_UDP, maps.ScopeInternal)
	if current || err != nil {
		return current, err
	}
	pool, ok, err := d.maps.PoolOf(t.OriginalDst, t.OriginalPort, unix.IPPROTO_UDP, maps.ScopeInternal)
	if !ok || err != nil {
		return false, err
	}
	for b := range d.maps.BackendsOf(pool) {
		if b.Addr == t.Backend && b.Port == t.BackendPort {
			return true, nil
		}
	}

	return false, nil
}

// stuck returns the orphans that have a backend, but whose datagrams pass no device, or only one that cannot lead
// them there, and how many others it could tell of.
func (d *Datapath) stuck(orphans []maps.TranslatedSock) (stuck []maps.TranslatedSock, others int, _ error) {
	own, err := node.NetnsInode()
	if err != nil {
		return nil, 0, err
	}
	err = eachNetns(orphans, func(inode uint64, socks []maps.TranslatedSock) error {
		passes := make(map[maps.Addr]bool)
		for _, sock := range socks {
			if _, known := passes[sock.Peer]; !known {
				var err error
				if passes[sock.Peer], err = node.PassesDevice(sock.Peer.IP(), inode == own); err != nil {
					return err
				}
			}
			anywhere, elsewhere, err := d.hasBackend(sock.State)
			if err != nil {
				return err
			}
			if anywhere && (!passes[sock.Peer] || inode == own && !elsewhere) {
				stuck = append(stuck, sock)
			} else {
				others++
			}
		}

		return nil
	})

	return stuck, others, err
}

// hasBackend reports whether the original destination of a socket leads to a backend, and to one that has no address
// of this node.
func (d *Datapath) hasBackend(of maps.SockState) (anywhere, elsewhere bool, _ error) {
	pool, ok, err := d.maps.PoolOf(of.OriginalDst, of.OriginalPort, unix.IPPROTO_UDP, maps.ScopeInternal)
	if !ok || err != nil {
		return false, false, err
	}
	for b := range d.maps.BackendsOf(pool) {
		use, _, err := d.maps.Addrs.Lookup(b.Addr)
		if err != nil {
			return false, false, err
		}
		if anywhere = true; use.Flags&maps.AddrNode == 0 {
			return true, true, nil
		}
	}

	return anywhere, false, nil
}

// TranslatedSocks returns the connected UDP sockets that Sluice translated, in
// every network namespace.
func (d *Datapath) TranslatedSocks() ([]maps.TranslatedSock, error) {
	programs, err := d.programs()
	if err != nil {
		return nil, err
	}

	return readSocks(programs.Socks, d.maps.SockState())
}

// ErrNetnsNotFound is returned when a socket's network namespace cannot be entered:
// it has no name in this mount namespace, and no process whose namespace this process
// may open, which takes CAP_SYS_PTRACE.
var ErrNetnsNotFound = errors.New("network namespace not found (the agent needs the host's /run/netns, or its /proc and CAP_SYS_PTRACE)")

// destroy destroys one socket by inet_diag. It needs CONFIG_INET_DIAG_DESTROY and
// the module tcp_diag or udp_diag, which the kernel loads.
func destroy(sock maps.TranslatedSock) error {
	request := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
	request.AddData(&diagRequest{sock})
	if _, err := request.Execute(unix.NETLINK_INET_DIAG, 0); err != nil {
		return fmt.Errorf("destroy of the socket to %s: %w", sock.Peer.IP(), err)
	}

	return nil
}

// diagRequest is the kernel's struct inet_diag_req_v2.
type diagRequest struct {
	sock maps.TranslatedSock
}

const diagRequestLen = 56

// Len implements nl.NetlinkRequestData.
func (*diagRequest) Len() int { return diagRequestLen }

// Serialize implements nl.NetlinkRequestData.
func (r *diagRequest) Serialize() []byte {
	b := make([]byte, diagRequestLen)
	b[0], b[1] = uint8(r.sock.Family), r.sock.Proto
	binary.NativeEndian.PutUint32(b[4:], 0xffffffff) // all states
	binary.NativeEndian.PutUint16(b[8:], r.sock.SourcePort)
	binary.NativeEndian.PutUint16(b[10:], r.sock.PeerPort)
	if r.sock.Family == unix.AF_INET {
		copy(b[12:], r.sock.Source.Bytes[12:])
		copy(b[28:], r.sock.Peer.Bytes[12:])
	} else {
		copy(b[12:], r.sock.Source.Bytes[:])
		copy(b[28:], r.sock.Peer.Bytes[:])
	}
	binary.NativeEndian.PutUint32(b[44:], r.sock.Device)
	binary.NativeEndian.PutUint32(b[48:], uint32(r.sock.Cookie))
	binary.NativeEndian.PutUint32(b[52:], uint32(r.sock.Cookie>>32))

	return b
}
