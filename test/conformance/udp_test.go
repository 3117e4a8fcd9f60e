package conformance

import (
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// hammer sends on one socket without a pause until a pod answers, as a program
// does that is unaware of Services. If the socket is ended under it, it
// connects anew.
func hammer(t *testing.T, conn *scene.Connection, want string) {
	t.Helper()
	lab.Must(t, conn.Socket.SetTimeout(time.Second))
	lab.Eventually(t, conn.Dial.String()+" moves to "+want, func() bool {
		answer, err := conn.Ask()
		if lab.Errno(err) == unix.ECONNABORTED || lab.Errno(err) == unix.EDESTADDRREQ {
			_ = conn.Socket.Connect(conn.Address) // refused, while there are no endpoints
		}

		return err == nil && answer.Name == want
	})
	conn.Pod = want
}

// A backend is removed. Clients that keep sending from one UDP socket move on to the
// next one; clients of other backends, and TCP connections, are not affected.
//
//	clients ──── web, at all its addresses ─┬─ pod-1-0, goes
//	                                        └─ pod-2-0
func TestUDPMoves(t *testing.T) {
	t.Parallel()
	b := mustBalance(t)
	var goes, stays []*scene.Connection
	for _, address := range []string{scene.At(b.service.Spec.ClusterIPs[0], 80), scene.At(b.vips[1], 80)} {
		b.mustReachBoth(t, address)
		for _, c := range b.Clients() {
			goes = append(goes, b.mustOpenTo(t, c.To("udp", address), b.here))
			stays = append(stays, b.mustOpenTo(t, c.To("udp", address), b.there), b.mustOpenTo(t, c.To("tcp", address), b.here))
		}
	}
	b.SetEndpoints(t, "web", scene.ReadyAll(b.there)...)
	for _, conn := range goes {
		hammer(t, conn, b.there.Name)
	}
	scene.MustGoOn(t, stays...)
	scene.MustGoOn(t, goes...)
}

// mustOpenTo connects until a certain pod answers.
func (b *balanced) mustOpenTo(t *testing.T, d scene.Dial, pod *lab.Pod) *scene.Connection {
	t.Helper()
	for {
		conn := d.MustOpen(t)
		if conn.Pod == pod.Name {
			return conn
		}
		scene.MustClose(t, conn)
	}
}

// Endpoints that still serve keep their flows, also terminating ones, and those
// that are published although they are not ready. So do all flows that have nothing to
// do with the Service, though one goes to its node port's number.
//
//	clients ──── web:80 ── pod-1-0, which is ready, leaving, …
//	node-1 ── node-2:n, a process of that one
func TestUDPStays(t *testing.T) {
	t.Parallel()
	b := mustBalance(t)
	cluster := scene.At(b.service.Spec.ClusterIPs[0], 80)
	b.mustReachBoth(t, cluster)
	var open []*scene.Connection
	for _, c := range b.Clients() {
		open = append(open, b.mustOpenTo(t, c.To("udp", cluster), b.here))
	}
	number := b.service.Spec.Ports[1].NodePort
	other := b.Lab.Nodes[1]
	elsewhere := lab.MustServe(t, other.Namespace, "elsewhere", scene.At(other.IPv4.String(), number))
	for _, c := range []*scene.Client{b.Pod, b.Guest, b.Node} {
		open = append(open, c.To("udp", elsewhere.Addr().String()).MustOpen(t))
	}
	for _, is := range []scene.Condition{scene.Draining, scene.Ready} {
		b.SetEndpoints(t, "web", scene.Endpoint{Pod: b.here, Is: is}, scene.Endpoint{Pod: b.there, Is: scene.Ready})
		if is == scene.Ready {
			b.mustReachBoth(t, cluster)
		} else {
			scene.MustReach(t, b.Pod.To("udp", cluster), b.there.Name)
		}
		scene.MustGoOn(t, open...)
	}
	// Published, and not serving: kube-proxy cuts these off with every change.
	b.putUnserving(t)
	mustHaveSeenAll(t, b.Scene)
	scene.MustGoOn(t, open...)
}

// A Service without endpoints, or that has gone, has no flows over UDP either
// (listed difference 4); when it is back, the same sockets work.
func TestUDPServiceGoes(t *testing.T) {
	t.Parallel()
	b := mustBalance(t)
	cluster := scene.At(b.service.Spec.ClusterIPs[0], 80)
	b.mustReachBoth(t, cluster)
	b.SetEndpoints(t, "web", scene.ReadyAll(b.here)...)
	for _, c := range b.Clients() {
		scene.MustReach(t, c.To("udp", cluster), b.here.Name)
	}
	open := scene.MustOpenAll(t, b.Clients(), cluster, "udp")
	silent := func(conn *scene.Connection) bool {
		lab.Must(t, conn.Socket.SetTimeout(300*time.Millisecond))
		_, err := conn.Ask()

		return err != nil
	}
	b.SetEndpoints(t, "web")
	for _, conn := range open {
		lab.Eventually(t, conn.Dial.String()+" is cut off", func() bool { return silent(conn) })
	}
	b.SetEndpoints(t, "web", scene.ReadyAll(b.there)...)
	for _, conn := range open {
		hammer(t, conn, b.there.Name)
	}
	b.DeleteService(t, "web")
	for _, conn := range open {
		lab.Eventually(t, conn.Dial.String()+" is cut off", func() bool { return silent(conn) })
	}
}

// A client that sends before there are endpoints is answered later, on the same
// socket: before an endpoint is ready, and before there is a Service.
//
//	clients ──── web:80 ── pod-1-0, starts
func TestUDPBeforeReady(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	pod := s.Local()[0]
	s.SetEndpoints(t, "web", scene.Endpoint{Pod: pod, Is: scene.Starting})
	cluster := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	vip, _ := scene.VirtualIPs()
	var early []*scene.Connection
	for _, c := range s.Clients() {
		d := c.To("udp", cluster)
		scene.MustFail(t, d, scene.Rejected)
		early = append(early, mustSendEarly(t, d))
		if c != s.Node { // the node's own packets to no Service take the default route
			early = append(early, mustSendEarly(t, c.To("udp", scene.At(vip, 80))))
		}
	}
	s.ChangeService(t, "web", scene.LoadBalancer)
	for range 3 { // and while it gets ready
		for _, conn := range early {
			_ = conn.Socket.Send("who\n") // refused or lost
		}
		s.SetLoadBalancer(t, "web", ingress(vip)...)
		s.SetEndpoints(t, "web", scene.ReadyAll(pod)...)
	}
	for _, conn := range early {
		hammerFrom(t, conn, pod.Name)
	}
}

// putUnserving makes the first backend of IPv4 ready, and not serving, as
// publishNotReadyAddresses does.
func (b *balanced) putUnserving(t *testing.T) {
	t.Helper()
	slice := b.Slice("web", discoveryv1.AddressTypeIPv4, scene.ReadyAll(b.here, b.there)...)
	slice.Endpoints[0].Conditions.Serving = new(false)
	b.PutSlice(t, slice)
}

// mustSendEarly returns a UDP socket on which something was sent before there were endpoints.
func mustSendEarly(t *testing.T, d scene.Dial) *scene.Connection {
	t.Helper()
	socket, err := d.From.Socket("udp4")
	lab.Must(t, err)
	if ip := d.From.IPv4; !d.From.AtSocket {
		lab.Must(t, socket.Bind(netip.AddrPortFrom(ip, 0).String()))
	}
	conn := &scene.Connection{Dial: d, Socket: socket}
	if socket.Connect(d.Address) == nil { // it may be refused
		_ = socket.Send("who\n")
	}

	return conn
}

// hammerFrom is [hammer] for a socket that was never answered, nor perhaps
// connected.
func hammerFrom(t *testing.T, conn *scene.Connection, want string) {
	t.Helper()
	if _, err := conn.Socket.Peer(); err != nil {
		lab.Eventually(t, conn.Dial.String()+" connects", func() bool { return conn.Socket.Connect(conn.Address) == nil })
	}
	hammer(t, conn, want)
}
