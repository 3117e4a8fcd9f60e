// Package scene puts real objects into a real API server, before a real agent
// and real clients. A test that has a [Scene] does the work of users,
// controllers, kubelets and the cloud.
//
//	                       client outside 192.168.50.100 and, for each test, another
//	                        │ sends Service addresses to node-1
//	API server ┄ tunnel ┄ node-1 192.168.50.1 ─┬─ pod-1-0 …: backends, :8080
//	                      agent, clients       └─ pod-1-n: a client of a test
//	                      node-2 192.168.50.2 ─── pod-2-0 …: backends, :8080
//
// IPv6: fd00:50::1, fd00:10:244:1::2 and so on, see package lab.
//
// All tests of a binary share one API server, and most of them one lab with its
// agent ([MustShare]); a test that changes the node has a lab of its own ([MustSet]).
package scene

const (
	// PodPort is where backends answer, over TCP and UDP.
	PodPort = 8080
	// ServicePort is that of Services, unless a test chooses another one.
	ServicePort = 80
)
