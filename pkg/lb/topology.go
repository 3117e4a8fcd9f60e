package lb

import "slices"

// hints says which hints of the endpoints of one service port count
// (KEP-2433, KEP-3015).
type hints uint8

const (
	forEverybody hints = iota // none
	forZones
	forNodes
)

// hintsOf decides on the ready candidates. Hints of a kind count if all of them
// have one and at least one of them is meant for this node or its zone; those
// for nodes come first. So hints never leave nothing.
func hintsOf(candidates []candidate, node *Node) hints {
	nodes, zones := node.Name != "", node.Zone != ""
	anyNode, anyZone := false, false
	for i := range candidates {
		e := &candidates[i]
		if !e.Ready {
			continue
		}
		nodes = nodes && len(e.ForNodes) > 0
		zones = zones && len(e.ForZones) > 0
		if !nodes && !zones {
			return forEverybody
		}
		anyNode = anyNode || slices.Contains(e.ForNodes, node.Name)
		anyZone = anyZone || slices.Contains(e.ForZones, node.Zone)
	}
	switch {
	case nodes && anyNode:
		return forNodes
	case zones && anyZone:
		return forZones
	}
	return forEverybody
}

// allow says whether e, a ready endpoint, is meant for this node.
func (h hints) allow(e *Endpoint, node *Node) bool {
	switch h {
	case forNodes:
		return slices.Contains(e.ForNodes, node.Name)
	case forZones:
		return slices.Contains(e.ForZones, node.Zone)
	}
	return true
}
