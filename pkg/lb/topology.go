package lb

// hints is which topology hints of the endpoints of one service port count
// (KEP-2433, KEP-3015).
type hints uint8

const (
	noHints hints = iota
	forZones
	forNodes
)

// hintsOf returns which hints of the ready candidates count. Those of a kind count if all
// ready candidates have one and at least one of them names this node or its zone; hints
// for nodes come first. So at least one candidate is always allowed.
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
			return noHints
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
	return noHints
}

// allow reports whether the hints of e, a ready endpoint, allow this node to use it.
func (h hints) allow(e *Endpoint, node *Node) bool {
	switch h {
	case forNodes:
		return e.place().ForNodes.has(node.Name)
	case forZones:
		return e.place().ForZones.has(node.Zone)
	}
	return true
}
