package devices

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/test/lab"
)

// openCNI is a CNI plugin without a firewall: nothing of it concerns what goes from outside to
// another node.
const openCNI = podMasquerade + `
	table inet open {
		chain forward {
			type filter hook forward priority filter
			ip saddr 10.244.0.0/16 accept
			ip daddr 10.244.0.0/16 counter accept
		}
	}`

// TestForwarding has a client outside dial backends on another node, past node-1's network stack, and
// through it as soon as that has to be.
//
//	client ── eth0 ┐ ┌ vxlan0 ══ pod-2-0
//	               └─┘ eth0 ──── node-2
func TestForwarding(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, filter: openCNI})
	w.mustBeStrict(t)
	c := casesOf(w)
	bulk := service{number: 20, port: bulkPort, backends: c.remote.backends}
	talks := service{number: 21, backends: c.remote.backends}
	w.start(t, append(c.services(), bulk, talks)...)
	w.mustSwallow(t)
	w.mustForward(t, "")
	for _, test := range c.outside(t) {
		test.run(t, w)
	}
	past := w.forwarded(t)
	for i, offloads := range [][]lab.Offload{nil, {lab.Segmentation, lab.LateSplitting, lab.EarlyCoalescing, lab.Checksums}} {
		for _, offload := range offloads {
			w.mustOffload(t, offload, false)
		}
		for _, f := range families {
			if _, _, err := transfer(w.Client.Namespace, bulk.at(nodePort, f, w.Nodes[0]), 8<<20, 8<<20); err != nil {
				t.Errorf("%s, without offloads: %v: %v", f, i > 0, err)
			}
		}
	}
	if packets := w.forwarded(t) - past; packets > 100 { // some are of other devices' protocols
		t.Errorf("node-1's stack forwarded %d packets", packets)
	}

	caller := w.outside(t)
	old := w.mustTalkToRemote(t, caller, talks)
	w.mustBeTurned(t, talks, true)
	_, elsewhere, err := net.ParseCIDR("198.18.0.1/32")
	lab.Must(t, err)
	policy := &netlink.XfrmPolicy{Src: elsewhere, Dst: elsewhere, Dir: netlink.XFRM_DIR_OUT}
	lab.Must(t, w.Nodes[0].Do(func() error { return netlink.XfrmPolicyAdd(policy) }))
	w.mustForward(t, "1 IPsec policies")
	for _, talk := range old {
		talk.mustGoOn(t)
	}
	w.mustBeTurned(t, talks, false)
	new := w.mustTalkToRemote(t, caller, talks)
	lab.Must(t, w.Nodes[0].Do(func() error { return netlink.XfrmPolicyDel(policy) }))
	w.mustForward(t, "")
	for _, talk := range append(old, new...) {
		talk.mustGoOn(t)
	}
	w.mustBeTurned(t, talks, false) // what once goes through the stack does so to its end

	w.agents[0].SetArgs("--nodeport-addresses", "192.168.0.0/16,fd00:50::/31", "--forwarding", "stack")
	for _, agent := range w.agents {
		lab.Must(t, agent.Stop())
	}
	w.restart(t)
	w.mustForward(t, "--forwarding stack")
	w.mustTalkToRemote(t, caller, talks)
	w.mustBeTurned(t, talks, false)
}

// TestDeadNextHop has a client outside dial backends that are behind a next hop which does not answer for its
// Ethernet address. As from any router, it hears of that after the three seconds that the kernel asks for it.
//
//	client ── eth0 ┐ ┌ eth0 ── 192.168.50.77, which is not there ── 10.244.77.7
//	               └─┘
func TestDeadNextHop(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}})
	first, second := w.Nodes[0], w.Nodes[1]
	dead := backend{node: second.Name, ips: [2]netip.Addr{netip.MustParseAddr("10.244.77.7"), netip.MustParseAddr("fd00:10:244:77::7")}}
	for f, hop := range []string{"192.168.50.77", "fd00:50::77"} {
		bits := dead.ips[f].BitLen()
		lab.Must(t, first.AddRoute(netip.PrefixFrom(dead.ips[f], bits), netip.MustParseAddr(hop)))
	}
	s := service{number: 1, backends: []backend{dead}}
	w.start(t, s)
	w.mustForward(t, "")
	client := w.outside(t)
	for _, f := range families {
		begin := time.Now()
		_, err := client.Exchange(lab.Exchange{Network: "tcp", Address: s.at(nodePort, f, first), Timeout: 10 * time.Second})
		if took := time.Since(begin); lab.Errno(err) != unix.EHOSTUNREACH || took > 8*time.Second {
			t.Errorf("over %s: %v after %v", f, err, took)
		}
	}
}

// TestFilterAtIngress has others filter what comes to node-1: the client is dropped, wherever the backend is. Packets
// go through the stack as long as there is such a filter or program.
//
//	client ── eth0, filter ┐ ┌ vxlan0 ══ pod-2-0
//	                       └─┘
func TestFilterAtIngress(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}})
	c := casesOf(w)
	w.start(t, c.local, c.remote)
	w.mustForward(t, "")
	first, client := w.Nodes[0], w.outside(t)
	eth0, err := first.Netlink().LinkByName("eth0")
	lab.Must(t, err)
	answered := func(s service) bool {
		_, err := client.Exchange(lab.Exchange{Network: "tcp", Address: s.at(nodePort, ipv4, first), Timeout: time.Second})

		return err == nil
	}
	wantAnswers := func(when string, want bool) {
		t.Helper()
		for name, s := range map[string]service{"local": c.local, "remote": c.remote} {
			if got := answered(s); got != want {
				t.Errorf("%s, the %s backend answers: %t", when, name, got)
			}
		}
	}
	wantAnswers("without a filter", true)

	drops := mustDropFrom(t, w.Client.IPv4)
	filter := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: eth0.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Priority: 100, Protocol: unix.ETH_P_ALL},
		Fd:          drops.FD(), Name: "their_filter", DirectAction: true,
	}
	lab.MustDo(t, first.Namespace, func() error {
		clsact := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: eth0.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
		}}
		if err := netlink.QdiscReplace(clsact); err != nil {
			return err
		}

		return netlink.FilterAdd(filter)
	})
	w.mustForward(t, `"their_filter" runs at the ingress of eth0`)
	wantAnswers("with a filter", false)
	lab.MustDo(t, first.Namespace, func() error { return netlink.FilterDel(filter) })
	w.mustForward(t, "")
	wantAnswers("without the filter", true)
}

// mustDropFrom returns a program of tc that drops packets from an address of IPv4.
func mustDropFrom(t *testing.T, from netip.Addr) *ebpf.Program {
	t.Helper()
	const source = 14 + 12 // behind the Ethernet header
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "their_program", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.LoadAbs(source, asm.Word),
			asm.Mov.Imm(asm.R1, int32(binary.BigEndian.Uint32(from.AsSlice()))),
			asm.LSh.Imm(asm.R1, 32), // without its sign
			asm.RSh.Imm(asm.R1, 32),
			asm.JEq.Reg(asm.R0, asm.R1, "drop"),
			asm.Mov.Imm(asm.R0, -1), // TC_ACT_UNSPEC
			asm.Return(),
			asm.Mov.Imm(asm.R0, 2).WithSymbol("drop"), // TC_ACT_SHOT
			asm.Return(),
		},
	})
	lab.Must(t, err)
	t.Cleanup(func() { program.Close() })

	return program
}

// mustForward waits until node-1's agent reports why packets pass the network stack, or that they need not.
func (w *world) mustForward(t *testing.T, throughStack string) {
	t.Helper()
	lab.Eventually(t, fmt.Sprintf("forwarding is %q", throughStack), func() error {
		status, err := w.agents[0].Status()
		if err == nil && status.ThroughStack != throughStack {
			err = fmt.Errorf("forwarding is %q", status.ThroughStack)
		}

		return err
	})
}

// mustForwardAs waits until node-1's agent has found out what a filter means.
func (w *world) mustForwardAs(t *testing.T, filter string) {
	t.Helper()
	lab.Eventually(t, "packets go as the filter wants it", func() error {
		status, err := w.agents[0].Status()
		if past := status.ThroughStack == ""; err == nil && past != (filter == openCNI) {
			err = fmt.Errorf("forwarding is %q", status.ThroughStack)
		}

		return err
	})
}

// forwarded is how many packets node-1's stack has forwarded.
func (w *world) forwarded(t *testing.T) int {
	t.Helper()
	text, err := lab.Output(w.Nodes[0].Namespace, nil, "cat", "/proc/self/net/snmp", "/proc/self/net/snmp6")
	lab.Must(t, err)
	var names []string
	total := 0
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		value := ""
		switch {
		case fields[0] == "Ip:" && names == nil:
			names = fields
		case fields[0] == "Ip:":
			for i, name := range names {
				if name == "ForwDatagrams" {
					value = fields[i]
				}
			}
		case fields[0] == "Ip6OutForwDatagrams":
			value = fields[1]
		}
		if value != "" {
			var n int
			_, err := fmt.Sscan(value, &n)
			lab.Must(t, err)
			total += n
		}
	}

	return total
}

// mustBeTurned checks that every flow of a Service on node-1 is turned around, or none.
func (w *world) mustBeTurned(t *testing.T, s service, want bool) {
	t.Helper()
	text, err := w.agents[0].Run("flows", "-o", "json")
	lab.Must(t, err)
	var flows []flow.Flow
	lab.Must(t, json.Unmarshal([]byte(text), &flows))
	n := 0
	for _, f := range flows {
		if !strings.Contains(f.Service, s.name()+":") || f.State != flow.Established && f.State != flow.Answered {
			continue
		}
		n++
		if f.Turned != want {
			t.Errorf("%+v: turned is %v, want %v", f, f.Turned, want)
		}
	}
	if n == 0 {
		t.Errorf("no flow of %s among %+v", s.name(), flows)
	}
}

// question is a connection or a socket on which a backend is asked.
type question struct {
	socket *lab.Socket
	what   string
}

// mustTalkToRemote opens a connection and a UDP socket in each family, and asks on each.
func (w *world) mustTalkToRemote(t *testing.T, from *lab.Caller, to service) []question {
	t.Helper()
	var all []question
	for _, f := range families {
		for _, network := range networks {
			socket, err := from.Socket(network + map[family]string{ipv4: "4", ipv6: "6"}[f])
			lab.Must(t, err)
			t.Cleanup(func() { socket.Close() })
			lab.Must(t, socket.SetTimeout(dialTimeout), socket.Connect(to.at(nodePort, f, w.Nodes[0])))
			q := question{socket, fmt.Sprintf("%s over %s", network, f)}
			q.mustGoOn(t)
			all = append(all, q)
		}
	}

	return all
}

// mustGoOn asks once more.
func (q question) mustGoOn(t *testing.T) {
	t.Helper()
	lab.Must(t, q.socket.Send("who\n"))
	if text, _, err := q.socket.Recv(); err != nil {
		t.Errorf("%s: %q, %v", q.what, text, err)
	}
}
