package reconcile

import (
	"fmt"
	stdmaps "maps"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/maps"
)

// dump returns what all maps hold, a line for each entry, sorted.
func dump(t testing.TB, m maps.Tables) string {
	t.Helper()
	var lines []string
	lines = append(lines, dumpTable(t, "name", m.ServicePorts, servicePortText)...)
	lines = append(lines, dumpTable(t, "", m.Backends, backendText)...)
	lines = append(lines, dumpTable(t, "range", m.SourceRanges, sourceRangeText)...)
	lines = append(lines, dumpTable(t, "frontend", m.Frontends, func(k maps.FrontendKey, v maps.Frontend) (string, string) {
		key, value := frontendText(k, v)

		return key, value + leadsTo(t, m.Slots, v)
	})...)
	lines = append(lines, dumpTable(t, "addr", m.Addrs, addrText)...)
	lines = append(lines, dumpTable(t, "", m.Devices, deviceText)...)
	lines = append(lines, dumpTable(t, "service-cidr", m.ServiceCIDRs, cidrText)...)
	lines = append(lines, dumpTable(t, "local-cidr", m.LocalCIDRs, cidrText)...)

	return strings.Join(lines, "\n")
}

func dumpTable[K comparable, V any](t testing.TB, kind string, table maps.Table[K, V], text func(K, V) (string, string)) []string {
	t.Helper()
	var lines []string
	for e, err := range table.All() {
		if err != nil {
			t.Fatal(err)
		}
		key, value := text(e.Key, e.Value)
		lines = append(lines, strings.TrimSpace(fmt.Sprintf("%s %s: %s", kind, key, value)))
	}
	slices.Sort(lines)

	return lines
}

// leadsTo returns the ids in the slots of v, and how many entries of its table
// each of them has.
func leadsTo(t testing.TB, slots maps.Slots, v maps.Frontend) string {
	t.Helper()
	if v.SlotCount == 0 {
		return ""
	}
	text := " ->"
	for i := v.SlotBase; i < v.SlotBase+v.SlotCount; i++ {
		id, err := slots.Get(i)
		if err != nil {
			return text + " " + err.Error()
		}
		text += fmt.Sprintf(" %d", id)
	}

	return text + tableText(t, slots, v)
}

func tableText(t testing.TB, slots maps.Slots, v maps.Frontend) string {
	t.Helper()
	if v.TableSize == 0 {
		return ""
	}
	entries := make(map[uint32]int)
	for i := range v.TableSize {
		id, err := slots.Get(v.SlotBase + v.SlotCount + i)
		if err != nil {
			t.Fatal(err)
		}
		entries[id]++
	}
	text := " table"
	for _, id := range slices.Sorted(stdmaps.Keys(entries)) {
		text += fmt.Sprintf(" %d:%d", id, entries[id])
	}

	return text
}
