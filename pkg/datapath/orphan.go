package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"github.com/vishvananda/netlink/nl"
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
	if err != nil {
		return 0, err
	}

	return DestroySocks(orphans)
}

// DestroySocks destroys TCP and connected UDP sockets, in every network namespace. The processes that
// have them open get ECONNABORTED, and the peer of a TCP socket an RST. It leaves alone sockets that
// have been closed meanwhile, or connected to another address. It needs CONFIG_INET_DIAG_DESTROY.
//
// It returns how many it destroyed, also in case of an error.
func DestroySocks(socks []maps.TranslatedSock) (int, error) {
	if len(socks) == 0 {
		return 0, nil
	}
	byNetns := make(map[uint32][]maps.TranslatedSock)
	for _, sock := range socks {
		byNetns[sock.Netns] = append(byNetns[sock.Netns], sock)
	}
	paths, err := netnsPaths()
	if err != nil {
		return 0, err
	}

	var errs []error
	destroyed := 0
	for netns, socks := range byNetns {
		err := inNetns(paths[netns], func() error {
			var errs []error
			for _, sock := range socks {
				err := destroy(sock)
				if err == nil {
					destroyed++
				} else if !errors.Is(err, unix.ENOENT) { // the application has closed it
					errs = append(errs, err)
				}
			}

			return errors.Join(errs...)
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("network namespace %d: %w", netns, err))
		}
	}

	return destroyed, errors.Join(errs...)
}

// orphans returns the sockets that have to connect anew.
func (d *Datapath) orphans(socks []maps.TranslatedSock) ([]maps.TranslatedSock, error) {
	stays := make(map[maps.SockState]bool)
	var orphans []maps.TranslatedSock
	for _, sock := range socks {
		if sock.Peer != sock.State.Backend || sock.PeerPort != sock.State.BackendPort {
			continue // it has connected to another address since
		}
		state := sock.State
		// Of all that connected alike, one is looked up.
		state.Since, state.Client, state.Answered, state.Counted = 0, 0, 0, 0
		if _, known := stays[state]; !known {
			leads, err := d.hasFrontend(state)
			if err != nil {
				return nil, err
			}
			// The id of the backend may belong to another one by now.
			b, ok := d.maps.BackendOf(state.BackendId)
			exists := ok && b.ServicePortId == state.ServicePortId &&
				b.Addr == state.Backend && b.Port == state.BackendPort
			stays[state] = leads && exists
		}
		if !stays[state] {
			orphans = append(orphans, sock)
		}
	}

	return orphans, nil
}

// hasFrontend reports whether the original destination of a socket still belongs to the
// same service port, as a frontend of its own or as a node port.
func (d *Datapath) hasFrontend(given maps.SockState) (bool, error) {
	key := maps.FrontendKey{
		Addr: given.OriginalDst, Port: given.OriginalPort,
		Proto: unix.IPPROTO_UDP, Scope: maps.ScopeInternal,
	}
	_, pool, ok, err := d.maps.FrontendOf(key)
	if err == nil && !ok { // a node port has an unspecified address of the family
		unspecified := netip.IPv6Unspecified()
		if given.OriginalDst.IP().Is4() {
			unspecified = netip.IPv4Unspecified()
		}
		key.Addr = maps.AddrOf(unspecified)
		_, pool, ok, err = d.maps.FrontendOf(key)
	}

	return ok && pool.ServicePortId == given.ServicePortId, err
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

// netnsPaths returns the paths of every network namespace that has a name or a
// process, by inode number. Names come first, since processes may end.
func netnsPaths() (map[uint32][]string, error) {
	named, err := filepath.Glob("/run/netns/*")
	if err != nil {
		return nil, fmt.Errorf("named network namespaces: %w", err)
	}
	processes, err := filepath.Glob("/proc/[0-9]*/ns/net")
	if err != nil {
		return nil, fmt.Errorf("network namespaces of processes: %w", err)
	}
	paths := make(map[uint32][]string)
	for _, path := range slices.Concat(named, processes) {
		var stat unix.Stat_t
		if unix.Stat(path, &stat) == nil { // the process may be gone
			paths[uint32(stat.Ino)] = append(paths[uint32(stat.Ino)], path)
		}
	}

	return paths, nil
}

// inNetns runs f in another network namespace, which has one of these paths. If the
// thread cannot return to its own namespace, it ends with the goroutine.
func inNetns(paths []string, f func() error) error {
	var target *os.File
	for _, path := range paths { // the first that still exists
		var err error
		if target, err = os.Open(path); err == nil {
			break
		}
	}
	if target == nil {
		return ErrNetnsNotFound
	}
	defer target.Close()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return fmt.Errorf("network namespace of this thread: %w", err)
	}
	defer home.Close()

	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("setns: %w", err)

			return
		}
		err := f()
		back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET)
		if back == nil {
			runtime.UnlockOSThread()
		}
		done <- errors.Join(err, back)
	}()

	return <-done
}

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
