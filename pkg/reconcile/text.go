package reconcile

import (
	"fmt"
	"strings"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// algorithms maps those of package lb to those of the BPF map.
var algorithms = [...]uint8{
	lb.DefaultAlgorithm:      maps.AlgorithmRandom,
	lb.Random:                maps.AlgorithmRandom,
	lb.RoundRobin:            maps.AlgorithmRR,
	lb.LeastConnections:      maps.AlgorithmLC,
	lb.ShortestExpectedDelay: maps.AlgorithmSED,
	lb.NeverQueue:            maps.AlgorithmNQ,
	lb.SourceHash:            maps.AlgorithmSH,
	lb.DestinationHash:       maps.AlgorithmDH,
	lb.Maglev:                maps.AlgorithmMaglev,
}

// programmable returns the algorithm of the BPF map for a; unknown ones are random.
func programmable(a lb.Algorithm) uint8 {
	if int(a) >= len(algorithms) {
		return maps.AlgorithmRandom
	}

	return algorithms[a]
}

// AlgorithmText returns the name of an algorithm of the BPF map as [lb.ParseAlgorithm] reads it, or
// its number if it has no name.
func AlgorithmText(programmed uint8) string {
	for a := lb.Random; int(a) < len(algorithms); a++ {
		if algorithms[a] == programmed {
			return a.String()
		}
	}

	return fmt.Sprint(programmed)
}

const nothing = "nothing"

// The following functions format a key and a value of a map.

func servicePortText(id uint32, v maps.ServicePort) (string, string) {
	return fmt.Sprintf("id %d", id), fmt.Sprintf("%s/%s %s", v, lb.Protocol(v.Proto), lb.Family(v.Family))
}

func backendText(place uint32, v maps.Backend) (string, string) {
	key := fmt.Sprintf("backend %d", place)
	if v.Id == 0 {
		return key, nothing
	}
	parts := []string{v.AddrPort().String(), fmt.Sprintf("of=%d", v.ServicePortId)}
	if v.Id != place {
		parts = append(parts, fmt.Sprintf("id=%d", v.Id))
	}
	parts = appendFlag(parts, v.Flags, maps.BackendLocal, "local")
	parts = appendFlag(parts, v.Flags, maps.BackendTerminating, "terminating")

	return key, strings.Join(parts, " ")
}

func slotText(slot, id uint32) (string, string) {
	return fmt.Sprintf("slot %d", slot), fmt.Sprintf("backend %d", id)
}

func poolText(id uint32, v maps.Pool) (string, string) {
	key := fmt.Sprintf("pool %d", id)
	if v == (maps.Pool{}) {
		return key, nothing
	}
	parts := []string{fmt.Sprintf("of=%d", v.ServicePortId), "slots=" + span{v.SlotBase, v.SlotCount}.String()}
	if v.TableSize > 0 {
		parts = append(parts, "table="+span{v.TableBase, v.TableSize}.String())
	}
	if v.Algorithm != maps.AlgorithmRandom {
		parts = append(parts, "by="+AlgorithmText(v.Algorithm))
	}
	if v.AffinitySeconds > 0 {
		parts = append(parts, fmt.Sprintf("affinity=%ds", v.AffinitySeconds))
	}
	parts = appendFlag(parts, v.Flags, maps.PoolDropIfEmpty, "drop")
	parts = appendFlag(parts, v.Flags, maps.PoolPassIfEmpty, "pass")
	parts = appendFlag(parts, v.Flags, maps.PoolMasquerade, "masquerade")
	parts = appendFlag(parts, v.Flags, maps.PoolOptedOut, "opted-out")
	parts = appendFlag(parts, v.Flags, maps.PoolNoEject, "no-eject")
	parts = appendFlag(parts, v.Flags, maps.PoolNoResteer, "no-resteer")
	parts = appendFlag(parts, v.Flags, maps.PoolSourceRanges, "ranges")
	parts = appendFlag(parts, v.Flags, maps.PoolNodeInRanges, "node")

	return key, strings.Join(parts, " ")
}

// String returns "7+3" for three slots from 7 on.
func (s span) String() string {
	if s.count == 0 {
		return "0"
	}

	return fmt.Sprintf("%d+%d", s.base, s.count)
}

func frontendText(id uint32, v maps.Frontend) (string, string) {
	key := fmt.Sprintf("frontend %d", id)
	if v == (maps.Frontend{}) {
		return key, nothing
	}

	return key, fmt.Sprintf("%s pool=%d %s", modelKey(v.Key), v.PoolId, lb.Kind(v.Kind))
}

func frontendIDText(k maps.FrontendKey, id uint32) (string, string) {
	return modelKey(k).String(), fmt.Sprintf("frontend %d", id)
}

func sourceRangeText(k maps.SourceRangeKey, v uint32) (string, string) {
	return fmt.Sprintf("%s for id %d", k.Prefix(), k.ServicePortId), fmt.Sprint(v)
}

func addrText(k maps.Addr, v maps.AddrUse) (string, string) {
	var parts []string
	parts = appendFlag(parts, v.Flags, maps.AddrNode, "node")
	parts = appendFlag(parts, v.Flags, maps.AddrNodePort, "node-port")
	parts = appendFlag(parts, v.Flags, maps.AddrService, "service")
	parts = appendFlag(parts, v.Flags, maps.AddrLeft, "left")
	if v.Ifindex != 0 {
		parts = append(parts, fmt.Sprintf("ifindex=%d", v.Ifindex))
	}

	return k.IP().String(), orNothing(parts)
}

func optedOutText(uid maps.PodUID, v uint32) (string, string) {
	return "pod " + uid.String(), fmt.Sprint(v)
}

func deviceText(ifindex uint32, v maps.Device) (string, string) {
	var parts []string
	for _, source := range []maps.Addr{v.SourceV4, v.SourceV6} {
		if !source.IP().IsUnspecified() {
			parts = append(parts, "source="+source.IP().String())
		}
	}
	if v.Bridge != 0 {
		parts = append(parts, fmt.Sprintf("bridge=%d", v.Bridge))
	}
	if v.PeerNetns != 0 {
		parts = append(parts, fmt.Sprintf("netns=%d", v.PeerNetns-1))
	}
	if v.Flags&maps.DeviceTurns != 0 {
		parts = append(parts, "turns")
	}
	if v.Flags&maps.DeviceLeadsOut != 0 {
		parts = append(parts, "out")
	}
	if v.Flags&maps.DeviceUnseen != 0 {
		parts = append(parts, "unseen")
	}
	if v.Flags&maps.DeviceEncrypts != 0 {
		parts = append(parts, "encrypts")
	}
	if v.Flags&maps.DeviceAbove != 0 {
		parts = append(parts, "above")
	}

	return fmt.Sprintf("device %d", ifindex), orNothing(parts)
}

func orNothing(parts []string) string {
	if len(parts) == 0 {
		return nothing
	}

	return strings.Join(parts, " ")
}

func cidrText(k maps.CIDRKey, v uint32) (string, string) {
	return k.Prefix().String(), fmt.Sprint(v)
}

func appendFlag[F uint16 | uint32](parts []string, flags, flag F, word string) []string {
	if flags&flag != 0 {
		return append(parts, word)
	}

	return parts
}

func portText(service lb.ServiceName, name portName) string {
	full := lb.PortName{Service: service, Port: name.name, Protocol: name.protocol}

	return fmt.Sprintf("%s/%s %s", full, name.protocol, name.family)
}

func (p *port) String() string { return portText(p.svc.name, p.portName) }
