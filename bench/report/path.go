package report

// Path is a way from a client to a backend.
type Path struct {
	Name  string `json:"name"`
	Title string `json:"title"` // what it is called in tables
	// Control is the path to the same backends that is no Service. It is
	// measured at every side, and at [Ref] it is the only one. A path without
	// is a control itself.
	Control string `json:"control,omitempty"`
}

// Names of paths. The client is the pod on the node under test, unless it is
// said to be outside.
const (
	ServiceFirst  = "service-first"  // ClusterIP of the first of N Services
	ServiceLast   = "service-last"   // ClusterIP of the last one
	Direct        = "direct"         // endpoints of a Service in turn, by their own addresses
	ServiceRemote = "service-remote" // ClusterIP of a Service whose only endpoint is on the other node
	DirectRemote  = "direct-remote"  // that endpoint, by its own address

	NodePortNear = "nodeport-near" // from outside, NodePort of the node under test: endpoint on that node
	OutsideNear  = "outside-near"  // from outside, that endpoint by its own address
	NodePortFar  = "nodeport-far"  // from outside, NodePort of the node under test: endpoint on the other node
	OutsideFar   = "outside-far"   // from outside, that endpoint by its own address: one hop less
	Forwarded    = "forwarded"     // from outside, that endpoint by its own address, through the node under test
)

// Paths are all paths, in the order of the tables: controls go first.
var Paths = []Path{
	{Direct, "direct: pod → endpoints", ""},
	{ServiceFirst, "pod → first ClusterIP", Direct},
	{ServiceLast, "pod → last ClusterIP", Direct},
	{DirectRemote, "direct: pod → remote endpoint", ""},
	{ServiceRemote, "pod → ClusterIP, remote", DirectRemote},
	{OutsideNear, "direct: outside → pod here", ""},
	{NodePortNear, "outside → NodePort, local", OutsideNear},
	{OutsideFar, "direct: outside → pod there", ""},
	{Forwarded, "direct: outside → node → pod there", ""},
	{NodePortFar, "outside → NodePort, remote", OutsideFar},
}

// pathOf returns a path by its name. One that is not in the table is a control.
func pathOf(name string) Path {
	for _, path := range Paths {
		if path.Name == name {
			return path
		}
	}

	return Path{Name: name, Title: name}
}

// controlOf returns the name of the path that a path is compared with: its
// control, or itself.
func controlOf(name string) string {
	if path := pathOf(name); path.Control != "" {
		return path.Control
	}

	return name
}
