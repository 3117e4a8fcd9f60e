package devices

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// roleVariable names the program in a pod that this executable is: a sidecar or a resolver.
const roleVariable = "SLUICE_ROLE"

// playRole is the program that the environment names, and exits. It returns if there is none.
func playRole() {
	var err error
	switch os.Getenv(roleVariable) {
	case "":
		return
	case "sidecar":
		err = beSidecar()
	case "resolver":
		err = beResolver(os.Args[1], os.Args[2])
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Where a sidecar listens, and the user that it runs as, whose connections are not redirected.
const (
	sidecarPort = "15001"
	sidecarUser = 1337
)

// sidecar is a proxy in a pod, as a service mesh has it. All TCP connections of other users in the
// pod are redirected to it by iptables.
type sidecar struct{ redirected chan string }

// mustSidecar starts a sidecar in a pod, in a cgroup.
func mustSidecar(t *testing.T, pod *lab.Pod, cgroup *lab.Cgroup) *sidecar {
	t.Helper()
	for _, iptables := range []string{"iptables", "ip6tables"} {
		_, err := lab.Output(pod.Namespace, nil, iptables, "-w", "-t", "nat", "-A", "OUTPUT", "-p", "tcp",
			"-m", "owner", "!", "--uid-owner", fmt.Sprint(sidecarUser), "-j", "REDIRECT", "--to-ports", sidecarPort)
		lab.Must(t, err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env, cmd.Stderr = append(os.Environ(), roleVariable+"=sidecar"), os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: sidecarUser, Gid: sidecarUser}}
	out, err := cmd.StdoutPipe()
	lab.Must(t, err, lab.Start(pod.Namespace, cgroup, cmd))
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // the cgroup may have ended it
		_ = cmd.Wait()
	})
	s := &sidecar{redirected: make(chan string, 100)}
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "listening" {
		t.Fatalf("sidecar: %q, %v", lines.Text(), lines.Err())
	}
	go func() {
		for lines.Scan() {
			s.redirected <- lines.Text()
		}
	}()

	return s
}

// next returns the original destination of the next connection that is redirected.
func (s *sidecar) next(t *testing.T) string {
	t.Helper()
	select {
	case to := <-s.redirected:
		return to
	case <-time.After(dialTimeout):
		t.Fatal("no connection was redirected")
		return ""
	}
}

// beSidecar prints the original destination of each connection, and connects on to it.
func beSidecar() error {
	listener, err := net.Listen("tcp", ":"+sidecarPort)
	if err != nil {
		return err
	}
	fmt.Println("listening")
	for {
		from, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer from.Close()
			dst, err := originalDst(from.(*net.TCPConn))
			if err != nil {
				fmt.Println(err)
				return
			}
			fmt.Println(dst)
			to, err := net.Dial("tcp", dst.String())
			if err != nil {
				fmt.Println(err)
				return
			}
			defer to.Close()
			go func() { _, _ = to.(*net.TCPConn).ReadFrom(from) }()
			_, _ = from.(*net.TCPConn).ReadFrom(to)
		}()
	}
}

// originalDst returns where a redirected connection was to (SO_ORIGINAL_DST, which has the same
// number for IPv6).
func originalDst(conn *net.TCPConn) (netip.AddrPort, error) {
	const soOriginalDst = 80
	raw, err := conn.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, err
	}
	var dst netip.AddrPort
	controlErr := raw.Control(func(fd uintptr) {
		if netip.MustParseAddrPort(conn.LocalAddr().String()).Addr().Unmap().Is4() {
			var mreq *unix.IPv6Mreq // has room for a sockaddr_in
			if mreq, err = unix.GetsockoptIPv6Mreq(int(fd), unix.IPPROTO_IP, soOriginalDst); err == nil {
				b := mreq.Multiaddr
				dst = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), uint16(b[2])<<8|uint16(b[3]))
			}
			return
		}
		var info *unix.IPv6MTUInfo // begins with a sockaddr_in6
		if info, err = unix.GetsockoptIPv6MTUInfo(int(fd), unix.IPPROTO_IPV6, soOriginalDst); err == nil {
			dst = netip.AddrPortFrom(netip.AddrFrom16(info.Addr.Addr), info.Addr.Port<<8|info.Addr.Port>>8)
		}
	})
	if controlErr != nil {
		return dst, controlErr
	}

	return dst, err
}

// optOuts are the Pods of node-1, of which two opt out: one by itself, and one by its Namespace.
const optOuts = `
apiVersion: v1
kind: Namespace
metadata: {name: mesh, labels: {sluice-lb.io/socket: "off"}}
---
apiVersion: v1
kind: Pod
metadata: {name: annotated, uid: 00000000-7d0e-4a3e-9d51-6a1f0c2b9e8f, annotations: {sluice-lb.io/socket: "off"}}
spec: {nodeName: node-1}
---
apiVersion: v1
kind: Pod
metadata: {name: labelled, namespace: mesh, uid: 11111111-7d0e-4a3e-9d51-6a1f0c2b9e8f}
spec: {nodeName: node-1}
---
apiVersion: v1
kind: Pod
metadata: {name: plain, uid: 22222222-7d0e-4a3e-9d51-6a1f0c2b9e8f}
spec: {nodeName: node-1}
`

// TestRedirectingSidecar has programs in pods dial Services, by way of a sidecar to which iptables
// redirects them. The sidecar of a pod that has opted out sees the Service, and the pod's device
// translates what it sends on; that of another sees the backend.
//
//	pod-1-0, opted out by its annotation: program ─▶ sidecar ─▶ 10.96.0.1 ═ device ─▶ pod-2-0
//	pod-1-1, by its Namespace                         the same
//	pod-1-2, not opted out:               program ─▶ sidecar ─▶ pod-2-0
//	         to a Service that has:       program ─▶ sidecar ─▶ 10.96.0.2 ═ device ─▶ pod-2-0
func TestRedirectingSidecar(t *testing.T) {
	w := mustWorld(t, setting{
		Config: lab.Config{Attachment: lab.PointToPoint, PodsPerNode: 3},
		agent:  []string{"--pod-opt-out"},
	})
	lab.Must(t, os.WriteFile(filepath.Join(w.manifests, "pods.yaml"), []byte(optOuts), 0o644))
	node, behind := w.Nodes[0], w.Nodes[1].Pods[0]
	web := service{number: 1, backends: []backend{onPod(behind)}}
	out := service{number: 2, backends: web.backends, annotations: map[string]string{"sluice-lb.io/socket": "off"}}
	w.start(t, web, out)
	lab.Eventually(t, "two Pods have opted out", func() error {
		s, err := w.agents[0].Status()
		if err == nil && (len(s.OptedOut) != 2 || s.OptedOut[0].Pod != "default/annotated" || s.OptedOut[1].Pod != "mesh/labelled") {
			err = fmt.Errorf("opted out: %v", s.OptedOut)
		}
		return err
	})
	var programs []*lab.Caller
	var sidecars []*sidecar
	for i, uid := range []string{"00000000", "11111111", "22222222"} {
		cgroup := mustChild(t, w.cgroups[0], "pod"+uid+"-7d0e-4a3e-9d51-6a1f0c2b9e8f", "app")
		programs = append(programs, lab.MustCaller(t, node.Pods[i].Namespace, cgroup))
		sidecars = append(sidecars, mustSidecar(t, node.Pods[i], cgroup))
	}

	for _, test := range []struct {
		name string
		pod  int
		to   service
		left bool // alone at the socket
	}{
		{"the Service in a Pod with the annotation", 0, web, true},
		{"the Service in a Namespace with the label", 1, web, true},
		{"the backend in another Pod", 2, web, false},
		{"the Service there, if that has opted out", 2, out, true},
	} {
		t.Run("it sees "+test.name, func(t *testing.T) {
			for _, f := range families {
				at := test.to.at(clusterIP, f, node)
				want := at
				if !test.left {
					want = behind.At(podPort)[f]
				}
				reply, err := programs[test.pod].Exchange(lab.Exchange{Network: "tcp", Address: at, Timeout: dialTimeout})
				lab.Must(t, err)
				if err := expect(reply, behind.Name, podIPs(node.Pods[test.pod])[f]); err != nil {
					t.Error(err)
				}
				if to := sidecars[test.pod].next(t); to != want {
					t.Errorf("%s: the sidecar sees %s, want %s", f, to, want)
				}
				if reply.Peer.String() != at {
					t.Errorf("%s: the program sees %s, want %s", f, reply.Peer, at)
				}
			}
		})
	}
	s, err := w.agents[0].Status()
	if lab.Must(t, err); s.OptedOut[0].NoCgroup || s.OptedOut[1].NoCgroup {
		t.Errorf("Pods have no cgroup according to sluice status: %v", s.OptedOut)
	}
	services, err := w.agents[0].Run("services")
	lab.Must(t, err)
	if notes := strings.Count(services, "(not at sockets of pods)"); notes == 0 || strings.Contains(strings.Split(services, "service-2")[0], "not at sockets") {
		t.Errorf("sluice services:\n%s", services)
	}
}

// mustChild makes a cgroup inside another one, and one inside that.
func mustChild(t *testing.T, cgroup *lab.Cgroup, names ...string) *lab.Cgroup {
	t.Helper()
	for _, name := range names {
		child, err := cgroup.Child(name)
		lab.Must(t, err)
		cgroup = child
	}

	return cgroup
}

// The name that resolvers look up, and the address that it has according to each server.
const (
	dnsName    = "which.test."
	byCache    = "192.0.2.1"
	byUpstream = "192.0.2.2"
)

// TestNodeLocalDNSCache has a cache on node-1 answer at the ClusterIP of the cluster's DNS, which is an
// address of the node, as NodeLocal DNSCache does. While the cache does not run, the Service answers.
//
//	pod-1-0, pod-1-1 without socket hooks, node-1 ─▶ 10.96.0.10:53 on dns0 of node-1: the cache
//	                                              ─▶ 10.96.0.10:53 ─▶ pod-1-2, without the cache
func TestNodeLocalDNSCache(t *testing.T) {
	w := mustWorld(t, setting{Config: lab.Config{Attachment: lab.Bridged, PodsPerNode: 3}})
	node := w.Nodes[0]
	upstream := node.Pods[2]
	vips := []netip.Addr{netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("fd00:96::10")}
	lab.Must(t, os.WriteFile(filepath.Join(w.manifests, "dns.yaml"), fmt.Appendf(nil, clusterDNS, upstream.IPv4, upstream.IPv6), 0o644))
	lab.Must(t, node.AddBridge("dns0", netip.PrefixFrom(vips[0], 32), netip.PrefixFrom(vips[1], 128)))
	for _, ip := range []netip.Addr{upstream.IPv4, upstream.IPv6} {
		mustServeDNS(t, upstream.Namespace, netip.AddrPortFrom(ip, 53), byUpstream)
	}
	w.start(t)

	resolve := func(t *testing.T, want string) { w.wantAnswers(t, vips, 53, want) }
	t.Run("the Service answers without a cache", func(t *testing.T) { resolve(t, byUpstream) })
	var stops []func()
	for _, vip := range vips {
		stops = append(stops, mustServeDNS(t, node.Namespace, netip.AddrPortFrom(vip, 53), byCache))
	}
	t.Run("the cache answers", func(t *testing.T) { resolve(t, byCache) })
	for _, stop := range stops {
		stop()
	}
	t.Run("the Service answers again", func(t *testing.T) { resolve(t, byUpstream) })
}

// TestUserAtClusterIP has users of node-1 bind sockets to a ClusterIP that is an address of the node, as it is
// with NodeLocal DNSCache. One that has no right to bind a privileged port does not get the Service's clients.
//
//	pod-1-0, pod-1-1 without socket hooks, node-1 ─▶ 10.96.0.10 on dns0 of node-1: a user's socket
//	                                              ─▶ 10.96.0.10 ─▶ pod-1-2
func TestUserAtClusterIP(t *testing.T) {
	const root, nobody = 0, 65534
	w := mustWorld(t, setting{Config: lab.Config{Attachment: lab.Bridged, PodsPerNode: 3}})
	node := w.Nodes[0]
	upstream := node.Pods[2]
	vips := []netip.Addr{netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("fd00:96::10")}
	const more = "{name: more, protocol: UDP, port: 5353}, {name: more-tcp, protocol: TCP, port: 5353}, {name: dns,"
	manifests := fmt.Sprintf(strings.ReplaceAll(clusterDNS, "{name: dns,", more), upstream.IPv4, upstream.IPv6)
	lab.Must(t, os.WriteFile(filepath.Join(w.manifests, "dns.yaml"), []byte(manifests), 0o644))
	lab.Must(t, node.AddBridge("dns0", netip.PrefixFrom(vips[0], 32), netip.PrefixFrom(vips[1], 128)))
	for _, ip := range []netip.Addr{upstream.IPv4, upstream.IPv6} {
		for _, port := range []uint16{53, 5353} {
			mustServeDNS(t, upstream.Namespace, netip.AddrPortFrom(ip, port), byUpstream)
		}
	}
	w.start(t)
	for _, test := range []struct {
		name         string
		user         int
		port         uint16
		unprivileged int // the first port that all users may bind
		want         string
	}{
		{"root's at a privileged port", root, 53, 1024, byCache},
		{"root's at another port", root, 5353, 1024, byCache},
		{"a user's at a privileged port", nobody, 53, 1024, byCache},
		{"a user's at another port", nobody, 5353, 1024, byUpstream},
		{"a user's where no port is privileged", nobody, 53, 0, byUpstream},
		{"root's where no port is privileged", root, 53, 0, byCache},
	} {
		t.Run(test.name, func(t *testing.T) {
			lab.Must(t, node.Sysctl("net/ipv4/ip_unprivileged_port_start", strconv.Itoa(test.unprivileged)))
			for _, vip := range vips {
				defer mustServeDNSAs(t, test.user, node.Namespace, netip.AddrPortFrom(vip, test.port), byCache)()
			}
			w.wantAnswers(t, vips, test.port, test.want)
		})
	}
}

// wantAnswers checks that at a port of ClusterIPs of node-1 each kind of its clients gets the address that a server gives
// to the name.
func (w *world) wantAnswers(t *testing.T, vips []netip.Addr, port uint16, want string) {
	t.Helper()
	node := w.Nodes[0]
	for _, client := range []struct {
		name   string
		ns     *lab.Namespace
		cgroup *lab.Cgroup
	}{
		{"a pod", node.Pods[0].Namespace, w.cgroups[0]},
		{"a pod without socket hooks", node.Pods[1].Namespace, nil},
		{"the node", node.Namespace, w.cgroups[0]},
	} {
		for _, vip := range vips {
			for _, network := range networks {
				at := netip.AddrPortFrom(vip, port)
				if got := resolved(t, client.ns, client.cgroup, network, at); got != want {
					t.Errorf("%s, by %s to %s: %s, want %s", client.name, network, at, got, want)
				}
			}
		}
	}
}

// clusterDNS is the Service of the cluster's DNS, with an endpoint of each family.
const clusterDNS = `
apiVersion: v1
kind: Service
metadata: {namespace: kube-system, name: kube-dns}
spec:
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10, "fd00:96::10"]
  ports: [{name: dns, protocol: UDP, port: 53}, {name: dns-tcp, protocol: TCP, port: 53}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: kube-system, name: kube-dns-4, labels: {kubernetes.io/service-name: kube-dns}}
addressType: IPv4
ports: [{name: dns, protocol: UDP, port: 53}, {name: dns-tcp, protocol: TCP, port: 53}]
endpoints: [{addresses: ["%s"], nodeName: node-1}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: kube-system, name: kube-dns-6, labels: {kubernetes.io/service-name: kube-dns}}
addressType: IPv6
ports: [{name: dns, protocol: UDP, port: 53}, {name: dns-tcp, protocol: TCP, port: 53}]
endpoints: [{addresses: ["%s"], nodeName: node-1}]
`

// resolved is the address of dnsName according to the server at an address.
func resolved(t *testing.T, ns *lab.Namespace, cgroup *lab.Cgroup, network string, server netip.AddrPort) string {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", network, server.String())
	var printed strings.Builder
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), roleVariable+"=resolver"), &printed, os.Stderr
	lab.Must(t, lab.Start(ns, cgroup, cmd))
	_ = cmd.Wait() // what is wrong is printed

	return strings.TrimSpace(printed.String())
}

// beResolver prints the address of dnsName.
func beResolver(network, server string) error {
	resolver := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, server)
	}}
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	ips, err := resolver.LookupNetIP(ctx, "ip4", dnsName)
	if err == nil {
		fmt.Println(ips[0])
	}

	return err
}

// mustServeDNS answers all questions with an address, over UDP and TCP, until the returned function is
// called.
func mustServeDNS(t *testing.T, ns *lab.Namespace, at netip.AddrPort, address string) (stop func()) {
	t.Helper()

	return mustServeDNSAs(t, 0, ns, at, address)
}

// mustServeDNSAs is mustServeDNS with sockets of a user, who has the right to bind to any port.
func mustServeDNSAs(t *testing.T, user int, ns *lab.Namespace, at netip.AddrPort, address string) (stop func()) {
	t.Helper()
	answer := func(question []byte) []byte {
		var m dnsmessage.Message
		if err := m.Unpack(question); err != nil || len(m.Questions) == 0 {
			return nil
		}
		m.Response, m.Additionals = true, nil
		m.Answers = []dnsmessage.Resource{{
			Header: dnsmessage.ResourceHeader{Name: m.Questions[0].Name, Class: dnsmessage.ClassINET},
			Body:   &dnsmessage.AResource{A: netip.MustParseAddr(address).As4()},
		}}
		packed, _ := m.Pack() // an empty answer fails the test

		return packed
	}
	var packets net.PacketConn
	var listener net.Listener
	lab.Must(t, ns.Do(func() (err error) {
		lab.Must(t, unix.Setfsuid(user)) // of this thread: its sockets are this user's
		defer unix.Setfsuid(0)
		if packets, err = net.ListenPacket("udp", at.String()); err == nil {
			listener, err = net.Listen("tcp", at.String())
		}

		return err
	}))
	go func() {
		for b := make([]byte, 4096); ; {
			n, from, err := packets.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = packets.WriteTo(answer(b[:n]), from)
		}
	}()
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				var length [2]byte
				if _, err := io.ReadFull(conn, length[:]); err != nil {
					return
				}
				question := make([]byte, binary.BigEndian.Uint16(length[:]))
				if _, err := io.ReadFull(conn, question); err != nil {
					return
				}
				text := answer(question)
				_, _ = conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(text))), text...))
			}()
		}
	}()
	stop = func() { packets.Close(); listener.Close() }
	t.Cleanup(stop)

	return stop
}
