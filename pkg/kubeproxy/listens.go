package kubeproxy

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// askTimeout limits how long a program may take to answer one request.
const askTimeout = time.Second

// Listens reports whether all programs that listen at this address, or at one that excludes it, answer as kube-proxy's
// health checks or metrics do. Processes of other containers may not be seen; what they answer is.
func Listens(at netip.AddrPort) (bool, error) {
	holders, err := listenersAt(at)
	if err != nil {
		return false, err
	}
	for _, holder := range holders {
		if !answersAsKubeProxy(holder) {
			return false, nil
		}
	}

	return len(holders) > 0, nil
}

// listenersAt returns the addresses of TCP sockets that keep another one from listening at this address, as clients on
// this node reach them.
func listenersAt(at netip.AddrPort) ([]netip.AddrPort, error) {
	var found []netip.AddrPort
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		addrs, err := listeningAddrs(family, at.Port())
		if err != nil {
			return nil, fmt.Errorf("listening sockets: %w", err)
		}
		for _, addr := range addrs {
			if addr != at.Addr() && !addr.IsUnspecified() && !at.Addr().IsUnspecified() {
				continue
			}
			if addr.IsUnspecified() {
				addr = map[bool]netip.Addr{true: netip.AddrFrom4([4]byte{127, 0, 0, 1}), false: netip.IPv6Loopback()}[addr.Is4()]
			}
			if holder := netip.AddrPortFrom(addr, at.Port()); !slices.Contains(found, holder) {
				found = append(found, holder)
			}
		}
	}

	return found, nil
}

// listeningAddrs returns the addresses of the TCP sockets that listen at a port. The kernel looks for these alone: a node may
// have a hundred thousand connections.
func listeningAddrs(family uint8, port uint16) ([]netip.Addr, error) {
	request := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
	request.AddData(listenRequest{family, port})
	answers, err := request.Execute(unix.NETLINK_INET_DIAG, 0)
	if err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	for _, answer := range answers {
		const source = 8 // offset of inet_diag_sockid.idiag_src in inet_diag_msg
		length := map[uint8]int{unix.AF_INET: 4, unix.AF_INET6: 16}[family]
		if len(answer) < source+length {
			return nil, fmt.Errorf("the kernel's answer has %d bytes", len(answer))
		}
		addr, _ := netip.AddrFromSlice(answer[source : source+length]) // of one of these lengths
		addrs = append(addrs, addr.Unmap())
	}

	return addrs, nil
}

// listenRequest is the kernel's inet_diag_req_v2 that asks for TCP sockets which listen at a port.
type listenRequest struct {
	family uint8
	port   uint16
}

// Len is part of [nl.NetlinkRequestData].
func (listenRequest) Len() int { return 56 }

// Serialize is part of [nl.NetlinkRequestData].
func (r listenRequest) Serialize() []byte {
	const listens = 10 // TCP_LISTEN
	b := make([]byte, r.Len())
	b[0], b[1] = r.family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(b[4:], 1<<listens) // idiag_states
	binary.BigEndian.PutUint16(b[8:], r.port)        // id.idiag_sport

	return b
}

// answersAsKubeProxy reports whether a server has the page /proxyMode of kube-proxy's metrics, or its health check.
func answersAsKubeProxy(at netip.AddrPort) bool {
	if mode, err := get(at, "/proxyMode"); err == nil {
		return slices.Contains([]string{"iptables", "ipvs", "nftables"}, strings.TrimSpace(string(mode)))
	}
	answer, err := get(at, "/healthz")
	var health struct {
		LastUpdated string `json:"lastUpdated"`
		CurrentTime string `json:"currentTime"`
	}

	return err == nil && json.Unmarshal(answer, &health) == nil && health.LastUpdated != "" && health.CurrentTime != ""
}

// get returns a page that is small, if there is one. A health check may say with its status that it fails.
func get(at netip.AddrPort, path string) ([]byte, error) {
	conn, err := net.DialTimeout("tcp", at.String(), askTimeout)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(askTimeout)); err != nil {
		return nil, err
	}
	if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", path, at); err != nil {
		return nil, err
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK && response.StatusCode != http.StatusServiceUnavailable {
		return nil, fmt.Errorf("%s%s: %s", at, path, response.Status)
	}
	const most = 1 << 10

	return io.ReadAll(io.LimitReader(response.Body, most))
}
