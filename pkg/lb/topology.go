package lb

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
		place := e.place()
		nodes = nodes && place.ForNodes != ""
		zones = zones && place.ForZones != ""
		if !nodes && !zones {
			return forEverybody
		}
		anyNode = anyNode || place.ForNodes.has(node.Name)
		anyZone = anyZone || place.ForZones.has(node.Zone)
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
		return e.place().ForNodes.has(node.Name)
	case forZones:
		return e.place().ForZones.has(node.Zone)
	}
	return true
}
