package reconcile

import (
	"fmt"
	"strings"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// These return a key and a value of a map as people read them.

func servicePortText(id uint32, v maps.ServicePort) (string, string) {
	return fmt.Sprintf("id %d", id), fmt.Sprintf("%s/%s %s", v, lb.Protocol(v.Proto), lb.Family(v.Family))
}

func backendText(id uint32, v maps.Backend) (string, string) {
	words := []string{v.AddrPort().String(), fmt.Sprintf("of=%d", v.FrontendId)}
	words = appendFlag(words, v.Flags, maps.BackendLocal, "local")
	words = appendFlag(words, v.Flags, maps.BackendTerminating, "terminating")

	return fmt.Sprintf("backend %d", id), strings.Join(words, " ")
}

func frontendText(k maps.FrontendKey, v maps.Frontend) (string, string) {
	words := []string{fmt.Sprintf("id=%d", v.Id), "slots=0", lb.Kind(v.Kind).String()}
	if v.SlotCount > 0 {
		words[1] = "slots=" + slotsText(v)
	}
	if v.Algorithm != maps.AlgorithmRandom {
		words = append(words, "by="+AlgorithmText(v.Algorithm))
	}
	if v.AffinitySeconds > 0 {
		words = append(words, fmt.Sprintf("affinity=%ds", v.AffinitySeconds))
	}
	words = appendFlag(words, v.Flags, maps.FrontendDropIfEmpty, "drop")
	words = appendFlag(words, v.Flags, maps.FrontendMasquerade, "masquerade")
	words = appendFlag(words, v.Flags, maps.FrontendSourceRanges, "ranges")
	words = appendFlag(words, v.Flags, maps.FrontendNodeInRanges, "node")

	return modelKey(k).String(), strings.Join(words, " ")
}

// slotsText is "7+3" for three slots from 7 on, and "7+3+67" if a table of 67
// follows.
func slotsText(v maps.Frontend) string {
	text := fmt.Sprintf("%d+%d", v.SlotBase, v.SlotCount)
	if v.TableSize > 0 {
		text += fmt.Sprintf("+%d", v.TableSize)
	}

	return text
}

func sourceRangeText(k maps.SourceRangeKey, v uint32) (string, string) {
	return fmt.Sprintf("%s for id %d", k.Prefix(), k.FrontendId), fmt.Sprint(v)
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

	return fmt.Sprintf("device %d", ifindex), orNothing(words)
}

func orNothing(words []string) string {
	if len(words) == 0 {
		return "nothing"
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
