package reconcile

import (
	"fmt"
	"net/netip"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/maglev"
)

// checkTable says what is wrong with the table of f, as a program finds it: it is
// there if the algorithm hashes, and says what any node's would say.
func (g *guard) checkTable(f maps.Frontend) error {
	hashing := f.Algorithm == maps.AlgorithmSH || f.Algorithm == maps.AlgorithmDH || f.Algorithm == maps.AlgorithmMaglev
	size := 0
	if hashing {
		size = maglev.Size(int(f.SlotCount))
	}
	if int(f.TableSize) != size {
		return fmt.Errorf("algorithm %d has a table of %d for %d backends, not %d", f.Algorithm, f.TableSize, f.SlotCount, size)
	}
	if size == 0 {
		return nil
	}
	addrs := make([]netip.AddrPort, f.SlotCount)
	for i := range addrs {
		addrs[i] = g.backendIn(f.SlotBase + uint32(i))
	}
	for i, backend := range maglev.Table(addrs) {
		slot := f.SlotBase + f.SlotCount + uint32(i)
		if is := g.backendIn(slot); is != addrs[backend] {
			return fmt.Errorf("entry %d of the table, slot %d, leads to %s, not to %s", i, slot, is, addrs[backend])
		}
	}

	return nil
}

// backendIn returns the address of the backend in a slot.
func (g *guard) backendIn(slot uint32) netip.AddrPort {
	return g.Backends.Entries[g.Slots.IDs[slot]].AddrPort()
}
