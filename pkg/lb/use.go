package lb

// Use is whether new flows may choose an endpoint, and if not, why.
type Use uint8

// The uses of an endpoint. One that only some frontends use, because of their traffic
// policy, is Used.
const (
	Used       Use = 1
	NotReady   Use = 2 // not ready and not terminating: never chosen
	NotServing Use = 3 // terminating and no longer serving
	Superseded Use = 4 // terminating and serving: only chosen if none is ready
	OtherZone  Use = 5 // hinted for other zones
	OtherNode  Use = 6 // hinted for other nodes
	NotLocal   Use = 7 // on another node, and all frontends use local endpoints only
	NoFrontend Use = 8 // the Service has no address of its family, or an earlier port has the same number
)
