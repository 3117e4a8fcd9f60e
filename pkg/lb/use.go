package lb

// Use says whether new flows may choose an endpoint, and if not, why.
type Use uint8

// What can become of an endpoint. One that some frontends use and others, by
// their traffic policy, do not is used.
const (
	Used       Use = 1
	NotReady   Use = 2 // not ready and not terminating: never chosen
	NotServing Use = 3 // terminating, and it has stopped to serve
	Superseded Use = 4 // terminating and serving: only chosen while none is ready
	OtherZone  Use = 5 // hinted for other zones
	OtherNode  Use = 6 // hinted for other nodes
	NotLocal   Use = 7 // on another node, and no frontend uses those
	NoFrontend Use = 8 // the Service has no address of its family, or another of its ports has the number
)
