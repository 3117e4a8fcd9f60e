package conformance

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
	"github.com/sluice-lb/sluice/test/scene"
)

// TCP, UDP and SCTP are independent, also with one port number, and with node
// ports. SCTP packets are built by the test: not every kernel has SCTP, and creating a
// Service does not load it.
//
//	clients ──── web:80, web:n ── pod-1-0
func TestProtocols(t *testing.T) {
	t.Parallel()
	knew := knowsSCTP(t)
	s := scene.MustShare(t)
	pod := s.Local()[0]
	slice := s.Slice("web", discoveryv1.AddressTypeIPv4, scene.ReadyAll(pod)...)
	slice.Ports = append(slice.Ports, object.EndpointPort("sctp", corev1.ProtocolSCTP, scene.PodPort))
	s.PutSlice(t, slice)
	web := s.CreateService(t, "web", scene.NodePort, func(svc *corev1.Service) {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: "sctp", Port: 80, Protocol: corev1.ProtocolSCTP})
	})
	cluster, node := web.Spec.ClusterIP, s.Lab.Nodes[0].IPv4.String()
	for _, c := range s.Clients() {
		for i, network := range []string{"tcp", "udp"} {
			scene.MustReach(t, c.To(network, scene.At(cluster, 80)), pod.Name)
			scene.MustReach(t, c.To(network, scene.At(node, web.Spec.Ports[i].NodePort)), pod.Name)
		}
	}
	for _, c := range []*scene.Client{s.Guest, s.Outside} {
		mustPassSCTP(t, c, scene.At(cluster, 80), pod)
		mustPassSCTP(t, c, scene.At(node, web.Spec.Ports[2].NodePort), pod)
	}
	if knew != knowsSCTP(t) {
		t.Error("the kernel has loaded SCTP")
	}

	s.ChangeService(t, "web", func(svc *corev1.Service) { svc.Spec.Ports = svc.Spec.Ports[1:] })
	scene.MustAllFail(t, scene.Rejected, scene.Dials(s.Clients(), "tcp", scene.At(cluster, 80))...)
	for _, c := range s.Clients() {
		scene.MustReach(t, c.To("udp", scene.At(cluster, 80)), pod.Name)
	}
	mustPassSCTP(t, s.Guest, scene.At(cluster, 80), pod)
}

func knowsSCTP(t *testing.T) bool {
	t.Helper()
	_, err := os.Stat("/proc/net/sctp")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}

	return err == nil
}

const (
	protocolSCTP = "ip4:132"
	sctpPort     = 4000 // the client's
)

// mustPassSCTP sends an INIT until a pod has it: at its own port, from the client,
// and with a checksum that is true.
func mustPassSCTP(t *testing.T, c *scene.Client, address string, pod *lab.Pod) {
	t.Helper()
	server, err := pod.ListenPacket(protocolSCTP, pod.IPv4.String())
	lab.Must(t, err)
	defer server.Close()
	client, err := c.Namespace.ListenPacket(protocolSCTP, c.IPv4.String())
	lab.Must(t, err)
	defer client.Close()
	to := netip.MustParseAddrPort(address)
	got := make([]byte, 1500)
	lab.Eventually(t, c.Name+" sends SCTP to "+address, func() bool {
		_, err := client.WriteTo(sctpInit(sctpPort, to.Port()), &net.IPAddr{IP: to.Addr().AsSlice()})
		lab.Must(t, err, server.SetReadDeadline(time.Now().Add(time.Second)))
		n, _, err := server.ReadFrom(got)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return false
		}
		lab.Must(t, err)
		got = got[:n]

		return true
	})
	sum := binary.LittleEndian.Uint32(got[8:])
	binary.LittleEndian.PutUint32(got[8:], 0)
	if port := binary.BigEndian.Uint16(got[2:]); port != scene.PodPort || sum != crc32.Checksum(got, castagnoli) {
		t.Errorf("%s to %s: port %d, checksum %#x, want %d and %#x", c.Name, address,
			port, sum, scene.PodPort, crc32.Checksum(got, castagnoli))
	}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sctpInit is a packet with an INIT chunk.
func sctpInit(from, to uint16) []byte {
	b := binary.BigEndian.AppendUint16(nil, from)
	b = binary.BigEndian.AppendUint16(b, to)
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 0)                               // verification tag, checksum
	b = append(b, 1, 0, 0, 20)                                          // INIT of 20 bytes
	b = append(b, 0, 0, 0, 7, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1)       // tag, window, streams, TSN
	binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, castagnoli)) // RFC 9260, appendix A

	return b
}
