// Package bpf contains the compiled programs of the datapath, and loads them.
package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	stdmaps "maps"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/sluice-lb/sluice/maps"
)

// UDPMode selects the UDP sockets that are translated.
type UDPMode uint32

// The UDP modes.
const (
	UDPOff       = UDPMode(sockUdpModeUDP_OFF)       // none
	UDPConnected = UDPMode(sockUdpModeUDP_CONNECTED) // those that connect
	UDPAll       = UDPMode(sockUdpModeUDP_ALL)       // and each datagram that names an address
)

// DefaultUDPIdle is how long a UDP flow keeps its backend without a datagram by default: netfilter's
// timeout of a stream.
const DefaultUDPIdle = 120 * time.Second

// Config is the configuration of the socket programs.
type Config struct {
	UDP     UDPMode
	UDPIdle time.Duration // zero: DefaultUDPIdle

	// HostNetnsCookie is the cookie of the node's network namespace; zero means the
	// first namespace of the kernel.
	HostNetnsCookie uint64

	// SetRetval lets connect and sendmsg hooks call bpf_set_retval (Linux 6.1). Without
	// it, a refused connect is redirected to a closed port of loopback, and a refused sendto
	// gets EPERM.
	SetRetval bool

	// NoStats disables the counts per service port.
	NoStats bool
	// Handshakes traces the TCP handshakes and retransmissions of translated sockets (Linux
	// 5.11).
	Handshakes bool
	// BackendHandshakes counts them for each backend, too.
	BackendHandshakes bool
	// NoLocalhostNodePorts disables node ports on loopback.
	NoLocalhostNodePorts bool
	// PodOptOut lets pods opt out: see OptedOut of [maps.Tables].
	PodOptOut bool
	// ProbeAddr is an IPv4 address whose refusals are not reported as events; zero means none.
	ProbeAddr netip.Addr

	// Heal passes over backends that do not answer: see docs/healing.md. It takes the tracing
	// programs, which notice what backends do.
	Heal bool
	// Resteer makes sockets send a SYN again as soon as the backend should have answered. It adds
	// the hook sock_ops, which runs several times for every TCP socket.
	Resteer bool

	// Keep is a folder on bpffs that caches verified programs: the next agent of the same
	// build, with the same configuration and maps, reuses them. Empty: nothing is cached.
	Keep string

	// Kernel caches the types of the kernel, which are slow to read; nil: they are read.
	Kernel *btf.Cache
}

// Hook is a program and its attach type.
type Hook struct {
	Name    string // "connect4", …; or that of a tracepoint
	Attach  ebpf.AttachType
	Program *ebpf.Program
}

// Optional reports whether Services work without the hook.
func (h Hook) Optional() bool { return h.Attach == ebpf.AttachCGroupSockOps }

// Programs are the loaded socket programs, not attached yet.
type Programs struct {
	// Sock are the cgroup hooks.
	Sock []Hook
	// Trace are the tracepoints. Services work without them: if the kernel refuses their
	// programs, these are nil, and NotTraced is the error.
	Trace     []Hook
	NotTraced error
	// Kept are the pins in [Config].Keep, and NotKept is the error if programs could not be pinned
	// there.
	Kept    []string
	NotKept error
	// Socks iterates over the sock_state map and writes one
	// [maps.TranslatedSock] for each connected UDP socket.
	Socks *ebpf.Program
}

// Load loads all socket programs, with the maps m. Verifier errors wrap *ebpf.VerifierError. The caller
// closes the result.
func Load(m *maps.Pinned, cfg Config) (*Programs, error) {
	loader, what := newLoader(m, cfg.Kernel), cfg
	what.Kernel = nil
	programs := make(map[string]*ebpf.Program)
	result := &Programs{}
	for _, part := range []struct {
		name  string
		names []string
		spec  func(Config) (*ebpf.CollectionSpec, error)
	}{
		{tracingPart, traceNames(cfg), traceSpec}, // first: socket programs heal only if it was loaded
		{"socket programs", sockNames, sockSpec},
		{"timeouts of SYNs", synNames(cfg), func(Config) (*ebpf.CollectionSpec, error) { return loadSyn() }},
		{"socket iterator", []string{iterProgSluiceSocks}, func(Config) (*ebpf.CollectionSpec, error) { return iterSpec(iterProgSluiceSocks) }},
	} {
		if len(part.names) == 0 {
			continue
		}
		keep, err := newProgramCache(cfg.Keep, what, m)
		var loaded map[string]*ebpf.Program
		var notKept error
		if err == nil {
			loaded, err, notKept = loader.loadKept(keep, part.names, func() (*ebpf.CollectionSpec, error) { return part.spec(cfg) })
		}
		if err != nil && part.name == tracingPart {
			result.NotTraced = fmt.Errorf("%s: %w", part.name, err)
			cfg.Heal, what.Heal = false, false
			continue
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("%s: %w", part.name, err), closePrograms(programs))
		}
		stdmaps.Copy(programs, loaded)
		result.Kept = append(result.Kept, keep.pins(loaded)...)
		result.NotKept = errors.Join(result.NotKept, notKept)
	}
	missing := func(h Hook) bool { return h.Program == nil }
	result.Sock, result.Trace = slices.DeleteFunc(sockHooks(programs), missing), traceHooks(cfg, programs)
	result.Socks = programs[iterProgSluiceSocks]

	return result, nil
}

// SockHooks returns all socket hooks, including optional ones, without programs.
func SockHooks() []Hook { return sockHooks(nil) }

func sockHooks(programs map[string]*ebpf.Program) []Hook {
	return []Hook{
		{"connect4", ebpf.AttachCGroupInet4Connect, programs[sockProgSluiceConnect4]},
		{"connect6", ebpf.AttachCGroupInet6Connect, programs[sockProgSluiceConnect6]},
		{"sendmsg4", ebpf.AttachCGroupUDP4Sendmsg, programs[sockProgSluiceSendmsg4]},
		{"sendmsg6", ebpf.AttachCGroupUDP6Sendmsg, programs[sockProgSluiceSendmsg6]},
		{"recvmsg4", ebpf.AttachCGroupUDP4Recvmsg, programs[sockProgSluiceRecvmsg4]},
		{"recvmsg6", ebpf.AttachCGroupUDP6Recvmsg, programs[sockProgSluiceRecvmsg6]},
		{"getpeername4", ebpf.AttachCgroupInet4GetPeername, programs[sockProgSluiceGetpeer4]},
		{"getpeername6", ebpf.AttachCgroupInet6GetPeername, programs[sockProgSluiceGetpeer6]},
		{"sock_release", ebpf.AttachCgroupInetSockRelease, programs[sockProgSluiceRelease]},
		{"syn_timeout", ebpf.AttachCGroupSockOps, programs[synProgSluiceSyn]},
	}
}

// sockNames are the names of the socket programs.
var sockNames = []string{
	sockProgSluiceConnect4, sockProgSluiceConnect6, sockProgSluiceSendmsg4, sockProgSluiceSendmsg6,
	sockProgSluiceRecvmsg4, sockProgSluiceRecvmsg6, sockProgSluiceGetpeer4, sockProgSluiceGetpeer6, sockProgSluiceRelease,
}

func synNames(cfg Config) []string {
	if !cfg.Resteer {
		return nil
	}

	return []string{synProgSluiceSyn}
}

// sockSpec returns the socket programs, configured by cfg.
func sockSpec(cfg Config) (*ebpf.CollectionSpec, error) {
	spec, err := loadSock()
	if err != nil {
		return nil, err
	}

	var probe [4]byte
	if cfg.ProbeAddr.IsValid() {
		probe = cfg.ProbeAddr.As4()
	}

	return spec, setVariables(spec, map[string]any{
		sockVarConfigProbeAddr:       binary.NativeEndian.Uint32(probe[:]),
		sockVarConfigUdpMode:         uint32(cfg.UDP),
		sockVarConfigUdpIdleNs:       nanoseconds(cfg.UDPIdle, DefaultUDPIdle),
		sockVarConfigHostNetnsCookie: cfg.HostNetnsCookie,
		sockVarConfigHasSetRetval:    cfg.SetRetval,
		sockVarConfigStats:           !cfg.NoStats,

		sockVarConfigLocalhostNodePorts: !cfg.NoLocalhostNodePorts,
		sockVarConfigPodOptOut:          cfg.PodOptOut,
		sockVarConfigHeal:               cfg.Heal,
		sockVarConfigResteer:            cfg.Resteer,
	})
}

// Close closes the programs; attached ones stay attached.
func (p *Programs) Close() error {
	var errs []error
	for _, hook := range slices.Concat(p.Sock, p.Trace) {
		errs = append(errs, hook.Program.Close())
	}
	if p.Socks != nil {
		errs = append(errs, p.Socks.Close())
	}

	return errors.Join(errs...)
}
