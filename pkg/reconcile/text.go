package reconcile

import (
	"fmt"
	"strings"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// algorithms are those of package lb as the map has them.
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

// programmable returns a as the map has it; what the map does not know is random.
func programmable(a lb.Algorithm) uint8 {
	if int(a) >= len(algorithms) {
		return maps.AlgorithmRandom
	}

	return algorithms[a]
}

// AlgorithmText returns the name of an algorithm that the map has, as [lb.ParseAlgorithm]
// reads it, its number if it has none.
func AlgorithmText(programmed uint8) string {
	for a := lb.Random; int(a) < len(algorithms); a++ {
		if algorithms[a] == programmed {
			return a.String()
		}
	}

	return fmt.Sprint(programmed)
}

// Hashes reports whether an algorithm, as the map has it, needs a table.
func Hashes(programmed uint8) bool {
	return programmed == maps.AlgorithmSH || programmed == maps.AlgorithmDH || programmed == maps.AlgorithmMaglev
}

const nothing = "nothing"

// These return a key and a value of a map as people read them.

func servicePortText(id uint32, v maps.ServicePort) (string, string) {
	return fmt.Sprintf("id %d", id), fmt.Sprintf("%s/%s %s", v, lb.Protocol(v.Proto), lb.Family(v.Family))
}

func backendText(place uint32, v maps.Backend) (string, string) {
	key := fmt.Sprintf("backend %d", place)
	if v.Id == 0 {
		return key, nothing
	}
	words := []string{v.AddrPort().String(), fmt.Sprintf("of=%d", v.ServicePortId)}
	if v.Id != place {
		words = append(words, fmt.Sprintf("id=%d", v.Id))
	}
	words = appendFlag(words, v.Flags, maps.BackendLocal, "local")
	words = appendFlag(words, v.Flags, maps.BackendTerminating, "terminating")

	return key, strings.Join(words, " ")
}

func slotText(slot, id uint32) (string, string) {
	return fmt.Sprintf("slot %d", slot), fmt.Sprintf("backend %d", id)
}

func poolText(id uint32, v maps.Pool) (string, string) {
	key := fmt.Sprintf("pool %d", id)
	if v == (maps.Pool{}) {
		return key, nothing
	}
	words := []string{fmt.Sprintf("of=%d", v.ServicePortId), "slots=" + span{v.SlotBase, v.SlotCount}.String()}
	if v.TableSize > 0 {
		words = append(words, "table="+span{v.TableBase, v.TableSize}.String())
	}
	if v.Algorithm != maps.AlgorithmRandom {
		words = append(words, "by="+AlgorithmText(v.Algorithm))
	}
	if v.AffinitySeconds > 0 {
		words = append(words, fmt.Sprintf("affinity=%ds", v.AffinitySeconds))
	}
	words = appendFlag(words, v.Flags, maps.PoolDropIfEmpty, "drop")
	words = appendFlag(words, v.Flags, maps.PoolMasquerade, "masquerade")
	words = appendFlag(words, v.Flags, maps.PoolSourceRanges, "ranges")
	words = appendFlag(words, v.Flags, maps.PoolNodeInRanges, "node")

	return key, strings.Join(words, " ")
}

// String is "7+3" for three slots from 7 on.
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
	var words []string
	words = appendFlag(words, v.Flags, maps.AddrNode, "node")
	words = appendFlag(words, v.Flags, maps.AddrNodePort, "node-port")
	words = appendFlag(words, v.Flags, maps.AddrService, "service")
	if v.Ifindex != 0 {
		words = append(words, fmt.Sprintf("ifindex=%d", v.Ifindex))
	}

	return k.IP().String(), orNothing(words)
}

func deviceText(ifindex uint32, v maps.Device) (string, string) {
	var words []string
	for _, source := range []maps.Addr{v.SourceV4, v.SourceV6} {
		if !source.IP().IsUnspecified() {
			words = append(words, "source="+source.IP().String())
		}
	}
	if v.Bridge != 0 {
		words = append(words, fmt.Sprintf("bridge=%d", v.Bridge))
	}
	if v.Flags&maps.DeviceTurns != 0 {
		words = append(words, "turns")
	}

	return fmt.Sprintf("device %d", ifindex), orNothing(words)
}

func orNothing(words []string) string {
	if len(words) == 0 {
		return nothing
	}

	return strings.Join(words, " ")
}

func cidrText(k maps.CIDRKey, v uint32) (string, string) {
	return k.Prefix().String(), fmt.Sprint(v)
}

func appendFlag[F uint16 | uint32](words []string, flags, flag F, word string) []string {
	if flags&flag != 0 {
		return append(words, word)
	}

	return words
}

func portText(service lb.ServiceName, name portName) string {
	full := lb.PortName{Service: service, Port: name.name, Protocol: name.protocol}

	return fmt.Sprintf("%s/%s %s", full, name.protocol, name.family)
}

func (p *port) String() string { return portText(p.svc.name, p.portName) }
