package lb

import "strings"

// words are the names of nodes and zones: few, but each repeated in thousands of
// endpoints, and every object that is decoded brings its own copies. It maps a
// name to the list of which it is the only member, which is what hints mostly
// are.
type words map[string][]string

// maxWords bounds the table. It starts afresh then, so that the names of nodes
// that are long gone do not pile up.
const maxWords = 1 << 16

// intern replaces the names in slice by the copies that all slices share.
func (w words) intern(slice *EndpointSlice) {
	for i := range slice.Endpoints {
		e := &slice.Endpoints[i]
		e.NodeName = w.list(e.NodeName)[0]
		e.Zone = w.list(e.Zone)[0]
		if len(e.ForZones) == 1 {
			e.ForZones = w.list(e.ForZones[0])
		}
		if len(e.ForNodes) == 1 {
			e.ForNodes = w.list(e.ForNodes[0])
		}
	}
}

// list returns the list of one word.
func (w words) list(word string) []string {
	list, ok := w[word]
	if !ok {
		if len(w) >= maxWords {
			clear(w)
		}
		word = strings.Clone(word)
		list = []string{word}
		w[word] = list
	}
	return list
}
