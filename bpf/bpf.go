// Package bpf contains the compiled programs of the datapath, and loads them.
package bpf

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	stdmaps "maps"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/maps"
)

// UDPMode selects the UDP sockets of pods that are translated.
type UDPMode uint32

// The UDP modes.
const (
	UDPOff = UDPMode(sockUdpModeUDP_OFF) // none
	UDPAll = UDPMode(sockUdpModeUDP_ALL) // those that connect, and each datagram that names an address
)

// ParseUDPMode reads "all" or "off".
func ParseUDPMode(text string) (UDPMode, error) {
	switch text {
	case "all":
		return UDPAll, nil
	case "off":
		return UDPOff, nil
	}

	return 0, fmt.Errorf("%q: it is all or off", text)
}

// AgentMark is the mark (SO_MARK) with which a TCP socket of the node's own namespace is left alone when it connects. The
// program of the hook takes it off at an address of Services. Elsewhere who set it does, once the socket is connected.
const AgentMark = int(sockAgentMarkAGENT_MARK)

// SeedOf returns the seed of hashes that follows from a text, zero from none: then clients can know what is chosen by a
// hash. It never changes, because nodes of different versions must choose alike.
func SeedOf(text string) uint32 {
	if text == "" {
		return 0
	}
	sum := sha256.Sum256([]byte(text))

	return binary.BigEndian.Uint32(sum[:])
}

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
	// HostNetnsInode is the inode of the node's network namespace: sockets of other namespaces are
	// translated if a device of that one, or hardware, leads to them.
	HostNetnsInode uint32

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
	// NoLocalhostNodePortsV4 disables node ports on 127.0.0.1, and NoLocalhostNodePortsV6 on ::1.
	NoLocalhostNodePortsV4, NoLocalhostNodePortsV6 bool
	// PodOptOut lets pods opt out: see OptedOut of [maps.Tables].
	PodOptOut bool
	// ProbeAddr is an IPv4 address whose refusals are not reported as events; zero means none.
	ProbeAddr netip.Addr

	// HashSeed is the seed of what programs hash, the same on all nodes: see [SeedOf].
	HashSeed uint32

	// Heal passes over backends that do not answer: see docs/healing.md. It takes the tracing
	// programs, which notice what backends do.
	Heal bool
	// Resteer makes sockets send a SYN again as soon as the backend should have answered. It adds
	// the hook sock_ops, which runs several times for every TCP socket.
	Resteer bool

	// Keep is a folder on bpffs that caches verified programs: the next agent of the same
	// build, with the same configuration and maps, reuses them. Empty: nothing is cached.
	Keep string
}

// Hook is a program and its attach type.
type Hook struct {
	Name    string // "connect4", …; or that of a tracepoint
	Attach  ebpf.AttachType
	Program *ebpf.Program // nil unless it is loaded

	program string // its name in the object file
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
	loader := newLoader(m)
	programs := make(map[string]*ebpf.Program)
	trace, sock := TraceHooks(cfg), SockHooks()
	last := len(sock) - 1
	sock, syn := sock[:last], sock[last:]
	if !cfg.Resteer {
		syn = nil
	}
	result := &Programs{}
	for _, part := range []struct {
		name  string
		names []string
		spec  func(Config) (*ebpf.CollectionSpec, error)
	}{
		{tracingPart, namesOf(trace), traceSpec}, // first: socket programs heal only if it was loaded
		{"socket programs", namesOf(sock), sockSpec},
		{"timeouts of SYNs", namesOf(syn), func(Config) (*ebpf.CollectionSpec, error) { return loadSyn() }},
		{"socket iterator", []string{iterProgSluiceSocks}, func(Config) (*ebpf.CollectionSpec, error) { return iterSpec(iterProgSluiceSocks) }},
	} {
		if len(part.names) == 0 {
			continue
		}
		keep, err := newProgramCache(cfg.Keep, cfg, m)
		var loaded map[string]*ebpf.Program
		var notKept error
		if err == nil {
			loaded, err, notKept = loader.loadKept(keep, part.names, func() (*ebpf.CollectionSpec, error) { return part.spec(cfg) })
		}
		if err != nil && part.name == tracingPart {
			result.NotTraced = fmt.Errorf("%s: %w", part.name, err)
			cfg.Heal = false
			continue
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("%s: %w", part.name, err), closePrograms(programs))
		}
		stdmaps.Copy(programs, loaded)
		result.Kept = append(result.Kept, keep.pins(loaded)...)
		result.NotKept = errors.Join(result.NotKept, notKept)
	}
	for _, hooks := range [][]Hook{sock, syn, trace} {
		for i := range hooks {
			hooks[i].Program = programs[hooks[i].program]
		}
	}
	result.Sock, result.Trace, result.Socks = slices.Concat(sock, syn), trace, programs[iterProgSluiceSocks]

	return result, nil
}

// namesOf returns the names of the programs of these hooks.
func namesOf(hooks []Hook) []string {
	var names []string
	for _, hook := range hooks {
		names = append(names, hook.program)
	}

	return names
}

// SockHooks returns all socket hooks without programs. The last one is optional.
func SockHooks() []Hook {
	return []Hook{
		{Name: "connect4", Attach: ebpf.AttachCGroupInet4Connect, program: sockProgSluiceConnect4},
		{Name: "connect6", Attach: ebpf.AttachCGroupInet6Connect, program: sockProgSluiceConnect6},
		{Name: "sendmsg4", Attach: ebpf.AttachCGroupUDP4Sendmsg, program: sockProgSluiceSendmsg4},
		{Name: "sendmsg6", Attach: ebpf.AttachCGroupUDP6Sendmsg, program: sockProgSluiceSendmsg6},
		{Name: "recvmsg4", Attach: ebpf.AttachCGroupUDP4Recvmsg, program: sockProgSluiceRecvmsg4},
		{Name: "recvmsg6", Attach: ebpf.AttachCGroupUDP6Recvmsg, program: sockProgSluiceRecvmsg6},
		{Name: "getpeername4", Attach: ebpf.AttachCgroupInet4GetPeername, program: sockProgSluiceGetpeer4},
		{Name: "getpeername6", Attach: ebpf.AttachCgroupInet6GetPeername, program: sockProgSluiceGetpeer6},
		{Name: "sock_release", Attach: ebpf.AttachCgroupInetSockRelease, program: sockProgSluiceRelease},
		{Name: "syn_timeout", Attach: ebpf.AttachCGroupSockOps, program: synProgSluiceSyn},
	}
}

// TraceHooks returns the tracepoints that are used with this configuration, without programs.
func TraceHooks(cfg Config) []Hook {
	if (!cfg.Handshakes || cfg.NoStats) && !cfg.Heal {
		return nil
	}

	return []Hook{
		{Name: "inet_sock_set_state", Attach: ebpf.AttachTraceRawTp, program: traceProgSluiceHandshake},
		{Name: "tcp_retransmit_skb", Attach: ebpf.AttachTraceRawTp, program: traceProgSluiceRetransmit},
	}
}

const tracingPart = "tracing programs"

// traceSpec returns the tracing programs, configured by cfg.
func traceSpec(cfg Config) (*ebpf.CollectionSpec, error) {
	spec, err := loadTrace()
	if err != nil {
		return nil, err
	}

	return spec, setVariables(spec, map[string]any{traceVarConfigHeal: cfg.Heal, traceVarConfigBackendHandshakes: cfg.BackendHandshakes})
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
		sockVarConfigHostNetnsInode:  cfg.HostNetnsInode,
		sockVarConfigHasSetRetval:    cfg.SetRetval,
		sockVarConfigStats:           !cfg.NoStats,

		sockVarConfigLocalhostNodePortsV4: !cfg.NoLocalhostNodePortsV4,
		sockVarConfigLocalhostNodePortsV6: !cfg.NoLocalhostNodePortsV6,
		sockVarConfigPodOptOut:            cfg.PodOptOut,
		sockVarConfigHashSeed:             cfg.HashSeed,
		sockVarConfigHeal:                 cfg.Heal,
		sockVarConfigResteer:              cfg.Resteer,
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

// Iterators are the programs that list translated sockets for operators. Each writes
// [maps.TranslatedSock]. The agent needs none of them.
type Iterators struct {
	Connected *ebpf.Program // over sock_state: TCP and connected UDP
	Dials     *ebpf.Program // over udp_dials: one for each destination of an unconnected UDP socket
}

// LoadIterators loads the programs that list sockets. They use no map, but read the one that they are
// attached to. The caller closes the result.
func LoadIterators() (*Iterators, error) {
	spec, err := iterSpec(iterProgSluiceConnected, iterProgSluiceDials)
	if err != nil {
		return nil, err
	}
	programs, err := newLoader(&maps.Pinned{}).load(spec)
	if err != nil {
		return nil, fmt.Errorf("socket iterators: %w", err)
	}

	return &Iterators{Connected: programs[iterProgSluiceConnected], Dials: programs[iterProgSluiceDials]}, nil
}

// Close closes the programs.
func (i *Iterators) Close() error { return errors.Join(i.Connected.Close(), i.Dials.Close()) }

// iterSpec returns the iterators with these names.
func iterSpec(names ...string) (*ebpf.CollectionSpec, error) {
	spec, err := loadIter()
	if err != nil {
		return nil, err
	}
	stdmaps.DeleteFunc(spec.Programs, func(name string, _ *ebpf.ProgramSpec) bool { return !slices.Contains(names, name) })

	return spec, nil
}
