package datapath

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// MapSize is how large a map is.
type MapSize struct {
	Name    string // of its pin
	Entries uint32 // that it has room for
	Bytes   uint64 // that it takes now, by the kernel's word: some only take what is in use
}

// MapSizes returns the sizes of all maps, sorted by name.
func (d *Datapath) MapSizes() ([]MapSize, error) {
	var sizes []MapSize
	for name, m := range d.maps.Replacements() {
		info, err := m.Info()
		if err != nil {
			return nil, fmt.Errorf("map %s: %w", name, err)
		}
		bytes, _ := info.Memlock()
		sizes = append(sizes, MapSize{strings.TrimPrefix(name, "sl_"), m.MaxEntries(), bytes})
	}
	slices.SortFunc(sizes, func(a, b MapSize) int { return cmp.Compare(a.Name, b.Name) })

	return sizes, nil
}
