package bpf

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// crowd is a world with Services of every kind and flows of every protocol.
type crowd struct {
	*world
	ours map[netip.Addr]bool // what a packet to is concerned by a Service, or by the node
	flow map[netip.Addr]bool // who sends packets that egress hooks may know
}

func newCrowd(t testing.TB, p place, f family) *crowd {
	t.Helper()
	w := newWorldAt(t, p, f)
	w.lenient = true
	for _, proto := range transports {
		w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{tapPod}})
		w.serve(t, service{at: []string{otherIP}, proto: proto, to: []string{remotePod}})
		w.serve(t, service{at: []string{"8.0.96.5:80"}, proto: proto})
		w.serve(t, service{at: []string{balancer}, proto: proto, kind: maps.KindLoadBalancer, to: []string{portPod, tapPod}, ranges: []string{"8.0.100.0/24"}})
		w.serve(t, service{at: []string{nodePort}, proto: proto, kind: maps.KindNodePort, to: []string{portPod}, affinity: 10})
		w.serve(t, service{at: []string{"8.0.30.5:80"}, proto: proto, kind: maps.KindExternalIP, outside: []string{}, to: []string{tapPod}, flags: maps.PoolDropIfEmpty})
		for _, vip := range []string{clusterIP, otherIP, balancer, node} {
			in := first(proto, client, vip)
			if vip == node {
				in = in.toPort(30080)
			}
			verdict := verdictNext
			if p.turns && vip == otherIP {
				verdict = verdictRedirect
			}
			w.ingress(t, uplink, in).ends(verdict, maps.ReasonTranslated)
		}
	}
	lab.Must(t, w.hand.ServiceCIDR(f.prefix("8.0.97.0/24")))
	c := &crowd{world: w, ours: make(map[netip.Addr]bool), flow: make(map[netip.Addr]bool)}
	for e, err := range w.maps.Addrs.All() {
		lab.Must(t, err)
		c.ours[e.Key.IP()] = true
	}
	for _, text := range []string{client, stranger, tapPod, portPod, remotePod} {
		c.flow[f.addr(at(text).Addr())] = true
	}

	return c
}

// eachCrowd runs a test in both families, with and without flows that are turned around.
func eachCrowd(t *testing.T, run func(*testing.T, *crowd)) {
	t.Helper()
	eachFamily(t, func(t *testing.T, f family) {
		for _, p := range ways {
			t.Run("at "+p.String(), func(t *testing.T) { run(t, newCrowd(t, p, f)) })
		}
	})
}

// seeds returns packets of all kinds in the tables, including those of the flows of a crowd.
func seeds() []packet {
	var all []packet
	for _, proto := range transports {
		for _, vip := range []string{clusterIP, otherIP, "8.0.96.5:80", "8.0.96.6:80", "8.0.97.9:80", balancer, "8.0.30.5:80", "8.0.50.1:30080", otherServer} {
			all = append(all, first(proto, client, vip), second(proto, client, vip), first(proto, stranger, vip))
		}
		in := first(proto, client, clusterIP)
		all = append(all, answer(proto, tapPod, client), answer(proto, portPod, client), answer(proto, remotePod, client),
			in.withExtras(3), in.tagged(4), in.tagged(4, 5), in.long(1000), in.padded(20), in.toPort(81),
			in.long(3000).fragment(0, 1024), in.long(3000).fragment(1024, 1024), in.long(3000).rest(2048),
			second(proto, client, tapPod), second(proto, client, remotePod))
		for _, what := range []icmpKind{tooBig, portUnreachable, timeExceeded, redirect} {
			all = append(all, icmpError(what, router, clusterIP, answer(proto, clusterIP, client)),
				icmpError(what, router, clusterIP, answer(proto, clusterIP, client).withExtras(1)).quoting(100),
				icmpError(what, tapPod, client, second(proto, client, tapPod)))
		}
	}

	return append(all, ping(client, clusterIP), ping(client, node), udp(client, clusterIP).withoutSum(),
		tcp(client, clusterIP, "F."), tcp(client, clusterIP, "R"), protocol(47, client, clusterIP), protocol(0, client, clusterIP))
}

// seedFrame returns a seed as it arrives at a hook of a place.
func (c *crowd) seedFrame(p place, in packet) []byte {
	return c.bytes(p, in, ends{src: macOf(in.src.Addr()), dst: c.links[p.device].Attrs().HardwareAddr})
}

// check runs a frame and checks the properties that all frames have.
func (c *crowd) check(t testing.TB, p place, egress bool, frame []byte) {
	t.Helper()
	if p.noEthernet && len(frame) < shortestRun {
		frame = append(slices.Clip(frame), make([]byte, shortestRun-len(frame))...)
	}
	if !isRunnable(frame, !p.noEthernet) {
		return
	}
	programs := c.programs(t, p)
	program := programs.Ingress
	if egress {
		program = programs.Egress
	}
	if problem := c.problem(t, p, egress, program, frame); problem != "" {
		t.Errorf("%s, at %s, egress: %v:\n%s", problem, p, egress, hex.Dump(frame))
	}
}

// isRunnable reports whether the kernel accepts a frame for a test run: not if it is too short for its IP
// header.
func isRunnable(frame []byte, ethernet bool) bool {
	if !ethernet {
		return true // it is filled up
	}
	if len(frame) < 14 {
		return false
	}
	switch binary.BigEndian.Uint16(frame[12:]) {
	case 0x0800:
		return len(frame) >= 14+20
	case 0x86dd:
		return len(frame) >= 14+40
	default:
		return true
	}
}

func (c *crowd) problem(t testing.TB, p place, egress bool, program *ebpf.Program, frame []byte) string {
	t.Helper()
	got, verdict := c.runBytes(t, program, p, frame)
	ethernet := !p.noEthernet
	less := 0 // hops
	if c.turns && !egress && verdict == verdictRedirect && len(got) == len(frame) && bytes.Equal(got[:12], frame[:12]) {
		verdict, less = verdictNext, 1 // it leaves as it is; a refusal goes back to where it came from
	}
	switch {
	case verdict == verdictDrop:
		if !c.concerns(frame, ethernet, egress) {
			return "other traffic was dropped"
		}

		return ""
	case verdict == verdictRedirect && !egress:
		if !c.concerns(frame, ethernet, egress) {
			return "other traffic was refused"
		}
		if names := wrong(got, ethernet); ethernet && slices.ContainsFunc(names, isOwnSum) {
			return fmt.Sprintf("an error has wrong checksums, %v:\n%s", names, hex.Dump(got))
		}

		return ""
	case verdict != verdictNext:
		return fmt.Sprintf("verdict %d", verdict)
	case bytes.Equal(got, frame):
		return ""
	case !c.concerns(frame, ethernet, egress):
		return "other traffic was changed"
	case len(got) != len(frame):
		return fmt.Sprintf("%d bytes became %d", len(frame), len(got))
	case !bytes.Equal(anonymous(frame, ethernet, less), anonymous(got, ethernet, 0)):
		return fmt.Sprintf("more was changed than addresses, ports and checksums:\n%s", hex.Dump(got))
	}

	return sumsDiffer(sums(frame, ethernet), sums(got, ethernet), got)
}

// isOwnSum reports whether a checksum is the error's own, not that of a packet that it quotes.
func isOwnSum(what string) bool { return what == "ip" || what == "protocol 1" || what == "protocol 58" }

// sumsDiffer compares checksums: those that were right must be right, and those that were wrong must stay
// wrong.
func sumsDiffer(before, after []sum, got []byte) string {
	if len(before) != len(after) {
		return "checksums came or went"
	}
	for i, s := range before {
		if s.what == after[i].what && s.none == after[i].none && s.known == after[i].known && s.right == after[i].right {
			continue
		}

		return fmt.Sprintf("checksum was %+v and is %+v:\n%s", s, after[i], hex.Dump(got))
	}

	return ""
}

// concerns reports whether the addresses of a packet allow any change of it.
func (c *crowd) concerns(frame []byte, ethernet, egress bool) bool {
	at, ok := 0, true
	if ethernet {
		at, ok = skipLink(frame)
	}
	if !ok {
		return false
	}
	src, dst, ok := addresses(frame, at)
	if !ok {
		return false
	}
	if !egress {
		// What goes to a backend itself may do so beside a flow: see open_beside.
		return c.ours[dst] || c.family.prefix("8.0.97.0/24").Contains(dst) || c.flow[src] && c.flow[dst]
	}
	// At egress, errors may come from any router on the path.
	d, ok := dissect(frame, at)

	return c.flow[dst] && (c.flow[src] || !ok || d.proto == 1 || d.proto == 58)
}

// addresses reads the source and the destination.
func addresses(frame []byte, at int) (src, dst netip.Addr, ok bool) {
	switch {
	case len(frame) >= at+20 && frame[at]>>4 == 4:
		return netip.AddrFrom4([4]byte(frame[at+12:])), netip.AddrFrom4([4]byte(frame[at+16:])), true
	case len(frame) >= at+40 && frame[at]>>4 == 6:
		return netip.AddrFrom16([16]byte(frame[at+8:])), netip.AddrFrom16([16]byte(frame[at+24:])), true
	default:
		return src, dst, false
	}
}

// anonymous returns the frame without addresses, ports, checksums, hop limit and the Ethernet address of the
// neighbour, also in the packet that it quotes.
func anonymous(frame []byte, ethernet bool, less int) []byte {
	at := 0
	out := slices.Clone(frame)
	if ethernet {
		at, _ = skipLink(frame)
		clear(out[:6])
	}
	switch {
	case less == 0:
	case frame[at]>>4 == 4:
		out[at+8] -= byte(less)
	default:
		out[at+7] -= byte(less)
	}
	clearIdentity(out, frame, at, true)

	return out
}

func clearIdentity(out, frame []byte, at int, outer bool) {
	d, ok := dissect(frame, at)
	if !ok {
		return
	}
	if d.six {
		clear(out[at+8 : at+40])
	} else {
		clear(out[at+10 : at+20])
	}
	if d.later {
		return
	}
	inner := d.transport + 8
	if outer && isErrorAt(d, frame) {
		clear(out[d.transport+2 : d.transport+4])
		clearIdentity(out, frame, inner, false)

		return
	}
	for proto, sum := range map[uint8][2]int{6: {16, 18}, 17: {6, 8}, 132: {8, 12}} {
		if d.proto == proto {
			clear(out[d.transport:min(len(out), d.transport+4)])
			clear(out[min(len(out), d.transport+sum[0]):min(len(out), d.transport+sum[1])])
		}
	}
}

func isErrorAt(d dissected, frame []byte) bool {
	return len(frame) >= d.transport+8 && isError(d, frame)
}
