package bpf

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/maps"
)

// DefaultMasqueradePorts overlap neither the default ephemeral ports of the kernel nor the default node
// ports of Kubernetes.
var DefaultMasqueradePorts = PortRange{Low: 10000, High: 29999}

// DefaultUDPUnanswered is how long an unanswered UDP flow keeps its backend at a device: netfilter's
// timeout.
const DefaultUDPUnanswered = 30 * time.Second

// PortRange is a range of ports, both ends included.
type PortRange struct{ Low, High uint16 }

// String returns the range as the kernel writes it.
func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.Low, r.High) }

// Len returns the number of ports.
func (r PortRange) Len() int { return int(r.High) - int(r.Low) + 1 }

// Mark sets the bits of Mask in the mark of a packet to those of Value. Zero changes none.
type Mark struct{ Value, Mask uint32 }

// DeviceConfig is the configuration of the programs of a kind of device.
type DeviceConfig struct {
	Class      uint32 // maps.DevicePods or maps.DeviceUplink
	NoEthernet bool   // packets start with the IP header
	BridgePort bool   // the devices are ports of a bridge

	// ScopeBySource limits the internal scope to sources in the local_cidrs map, on devices of
	// pods.
	ScopeBySource bool

	Mark            Mark          // of packets from clients to Services
	MasqueradePorts PortRange     // zero: DefaultMasqueradePorts
	MorePorts       PortRange     // more ports to masquerade with; zero: none
	UDPIdle         time.Duration // zero: DefaultUDPIdle
	UDPUnanswered   time.Duration // zero: DefaultUDPUnanswered

	// ICMPPerSecond and ICMPBurst limit the rate of ICMP errors for refused packets. Without
	// the first, there is only the limit of each client.
	ICMPPerSecond, ICMPBurst uint32

	FIBSource    bool // bpf_fib_lookup returns source addresses (Linux 6.7)
	ChecksumIPv6 bool // bpf_l4_csum_replace knows BPF_F_IPV6 (Linux 6.16)
	Conntrack    bool // see [KnowsConntrack]

	// ConntrackHidden is that netfilter may track connections that programs cannot look up: see
	// [ShowsConntrack].
	ConntrackHidden bool

	NoStats  bool   // see [Config]
	HashSeed uint32 // see [Config]
	Heal     bool   // see [Config]
	Resteer  bool   // connections whose backend does not answer go to another one
	Keep     string // see [Config]
}

// DevicePrograms are the loaded programs of a kind of device, not attached yet.
type DevicePrograms struct {
	Ingress *ebpf.Program
	Egress  *ebpf.Program
	// Kept are the pins in [DeviceConfig].Keep, and NotKept is the error if programs could not be
	// pinned there.
	Kept    []string
	NotKept error
}

// LoadDevice loads the programs of a kind of device, with the maps m. Verifier errors wrap
// *ebpf.VerifierError. The caller closes the result.
func LoadDevice(m *maps.Pinned, cfg DeviceConfig) (*DevicePrograms, error) {
	keep, err := newProgramCache(cfg.Keep, cfg, m)
	if err != nil {
		return nil, fmt.Errorf("device programs: %w", err)
	}
	names := []string{deviceProgSluiceIngress, deviceProgSluiceEgress}
	programs, err, notKept := newLoader(m).loadKept(keep, names, func() (*ebpf.CollectionSpec, error) { return deviceSpec(m, cfg) })
	if err != nil {
		return nil, fmt.Errorf("device programs: %w", err)
	}

	return &DevicePrograms{
		Ingress: programs[deviceProgSluiceIngress], Egress: programs[deviceProgSluiceEgress], Kept: keep.pins(programs), NotKept: notKept,
	}, nil
}

func deviceSpec(m *maps.Pinned, cfg DeviceConfig) (*ebpf.CollectionSpec, error) {
	spec, err := loadDevice()
	if err != nil {
		return nil, err
	}
	room, err := m.FlowsRoom()
	if err != nil {
		return nil, err
	}
	ports := cfg.MasqueradePorts
	if ports == (PortRange{}) {
		ports = DefaultMasqueradePorts
	}
	more := cfg.MorePorts
	if more == (PortRange{}) {
		more = PortRange{Low: 1, High: 0}
	}
	var token time.Duration
	if cfg.ICMPPerSecond > 0 {
		token = time.Second / time.Duration(cfg.ICMPPerSecond)
	}

	return spec, setVariables(spec, map[string]any{
		deviceVarConfigDeviceClass:        cfg.Class,
		deviceVarConfigEthernet:           !cfg.NoEthernet,
		deviceVarConfigBridgePort:         cfg.BridgePort,
		deviceVarConfigScopeBySource:      cfg.ScopeBySource,
		deviceVarConfigMasqueradeLow:      ports.Low,
		deviceVarConfigMasqueradeHigh:     ports.High,
		deviceVarConfigMasqueradeMoreLow:  more.Low,
		deviceVarConfigMasqueradeMoreHigh: more.High,
		deviceVarConfigFlowsRoom:          int64(room),
		deviceVarConfigIcmpTokenNs:        uint64(token),
		deviceVarConfigIcmpTokens:         uint64(cfg.ICMPBurst),
		deviceVarConfigFibSource:          cfg.FIBSource,
		deviceVarConfigCsumIpv6:           cfg.ChecksumIPv6,
		deviceVarConfigMark:               cfg.Mark.Value,
		deviceVarConfigMarkMask:           cfg.Mark.Mask,
		deviceVarConfigConntrack:          cfg.Conntrack,
		deviceVarConfigConntrackHidden:    cfg.ConntrackHidden,
		deviceVarConfigStats:              !cfg.NoStats,
		deviceVarConfigHashSeed:           cfg.HashSeed,
		deviceVarConfigHeal:               cfg.Heal,
		deviceVarConfigResteer:            cfg.Resteer,
		deviceVarConfigUdpIdleNs:          nanoseconds(cfg.UDPIdle, DefaultUDPIdle),
		deviceVarConfigUdpUnansweredNs:    nanoseconds(cfg.UDPUnanswered, DefaultUDPUnanswered),
	})
}

// setVariables sets constants of the programs of spec.
func setVariables(spec *ebpf.CollectionSpec, values map[string]any) error {
	for name, value := range values {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("variable %s: %w", name, err)
		}
	}

	return nil
}

func nanoseconds(d, otherwise time.Duration) uint64 {
	if d == 0 {
		d = otherwise
	}

	return uint64(d.Nanoseconds())
}

// Close closes the programs; attached ones stay attached.
func (p *DevicePrograms) Close() error {
	return errors.Join(p.Ingress.Close(), p.Egress.Close())
}
