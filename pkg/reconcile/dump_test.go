package reconcile

import (
	"fmt"
	stdmaps "maps"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/maps"
)

// dump returns the content of all maps, one line for each entry, sorted. Of arrays it includes the
// places in use: pools that a frontend leads to, and backends that have an id.
func dump(t testing.TB, m maps.Tables) string {
	t.Helper()
	var lines []string
	lines = append(lines, dumpTable(t, "name", m.ServicePorts, servicePortText)...)
	for place, v := range m.Backends.All() {
		if v.Id != 0 {
			key, value := backendText(place, v)
			lines = append(lines, key+": "+value)
		}
	}
	lines = append(lines, dumpTable(t, "range", m.SourceRanges, sourceRangeText)...)
	pools := make(map[uint32]bool)
	lines = append(lines, dumpTable(t, "frontend", m.FrontendIDs, func(k maps.FrontendKey, id uint32) (string, string) {
		f := m.Frontends.Get(id)
		pools[f.PoolId] = true
		_, value := frontendText(id, f)
		value, _ = strings.CutPrefix(value, modelKey(k).String()+" ")

		return modelKey(k).String(), fmt.Sprintf("id=%d %s", id, value)
	})...)
	for _, id := range slices.Sorted(stdmaps.Keys(pools)) {
		v := m.Pools.Get(id)
		key, value := poolText(id, v)
		lines = append(lines, key+": "+value+leadsToText(m.Slots, v))
	}
	lines = append(lines, dumpTable(t, "addr", m.Addrs, addrText)...)
	lines = append(lines, dumpTable(t, "", m.Devices, deviceText)...)
	lines = append(lines, dumpTable(t, "service-cidr", m.ServiceCIDRs, cidrText)...)
	lines = append(lines, dumpTable(t, "local-cidr", m.LocalCIDRs, cidrText)...)
	lines = append(lines, dumpTable(t, "opted-out", m.OptedOut, optedOutText)...)

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

// leadsToText returns the ids in the slots of v, and how many entries of its table each of
// them has.
func leadsToText(slots *maps.Array[uint32], v maps.Pool) string {
	if v.SlotCount == 0 {
		return ""
	}
	text := " ->"
	for i := range min(v.SlotCount, 100) {
		text += fmt.Sprintf(" %d", slots.Get(v.SlotBase+i))
	}
	if v.TableSize == 0 {
		return text
	}
	entries := make(map[uint32]int)
	for i := range v.TableSize {
		entries[slots.Get(v.TableBase+i)]++
	}
	text += " table"
	for _, id := range slices.Sorted(stdmaps.Keys(entries)) {
		text += fmt.Sprintf(" %d:%d", id, entries[id])
	}

	return text
}
