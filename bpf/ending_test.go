package bpf

import (
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// said is a packet of one side of a masqueraded connection.
type said struct {
	client    bool
	packet    packet
	elsewhere bool // the backend sends it on another connection
}

func byClient(p packet) said  { return said{client: true, packet: p} }
func byBackend(p packet) said { return said{packet: p} }

func segment(flags string) packet { return tcp(client, client, flags) }

// says sends a packet of a side of a masqueraded connection through both hooks that it passes.
func (s said) on(t *testing.T, c *conversation) {
	t.Helper()
	if s.client {
		c.says(t, s.packet)
		c.leaves(t, s.packet)
	} else {
		if !c.isTurned() {
			c.returns(t, s.packet)
		}
		c.hears(t, s.packet)
	}
}

// How a flow holds the only masquerade port against the SYN of another client.
type held int

const (
	free       held = iota // it does not
	lastResort             // until there is no other
	live                   // at all costs
)

// mustHold checks the hold of a connection on its port by the SYN of another client.
func (c *conversation) mustHold(t *testing.T, want held, syn packet) {
	t.Helper()
	w, p := c.w, c.place
	syn = syn.from(stranger).to(clusterIP)
	if want == live {
		w.ingress(t, p, syn).drops(maps.ReasonDropMasqueradePort)

		return
	}
	old := w.role(t, maps.FlowFromBackend).flow
	other := *c
	other.place.client = stranger
	counts := w.counted(t, func() { other.goesOn(w.ingress(t, p, syn), maps.ReasonTranslated) })
	if forced := counts.MasqueradeRetries != 0; forced != (want == lastResort) {
		t.Errorf("the port was given away after %d tries", counts.MasqueradeRetries)
	}
	for _, e := range w.entries(t) {
		if e.flow.Created == old.Created {
			t.Errorf("an entry of the flow is left that had the port: %+v", e)
		}
	}
	other.leaves(t, syn)
	other.returns(t, segment("S."))
}

func onePort(c *DeviceConfig) { c.MasqueradePorts = PortRange{Low: 20000, High: 20000} }

// beginOnOnePort establishes a connection that has the only port of the window.
func beginOnOnePort(t *testing.T, w *world, p place) *conversation {
	t.Helper()
	w.serve(t, service{at: []string{clusterIP}, to: []string{remotePod}})
	c := &conversation{w: w, place: p, proto: layers.IPProtocolTCP, vip: clusterIP, backend: remotePod, masqueradedPort: 20000}
	c.first(t, maps.ReasonTranslated)

	return c
}

var (
	closedByClient = []said{
		byClient(segment("F.")), byBackend(segment("F.").acks(2)), byClient(segment(".").numbered(2).acks(2)),
	}
	closedByBackend = []said{
		byBackend(segment("F.")), byClient(segment(".").acks(2)),
		byClient(segment("F.").acks(2)), byBackend(segment(".").numbered(2).acks(2)),
	}
)

// A port is free as soon as both sides have certainly ended the connection, and not before.
func TestEndingOfConnections(t *testing.T) {
	for _, test := range []struct {
		name string
		said []said
		held held // the port, right then
		then held // and after 11 s
	}{
		{"nothing", nil, live, live},
		{"closed by the client", closedByClient, free, free},
		{"closed by the client, with data before", []said{
			byClient(segment("P.").with("hello")), byBackend(segment("P.").acks(6).with("world")),
			byClient(segment("F.").numbered(6).acks(6)), byBackend(segment("F.").numbered(6).acks(7)),
			byClient(segment(".").numbered(7).acks(7)),
		}, free, free},
		{"closed by the client, data and FIN in one", []said{
			byClient(segment("PF.").with("hello")), byBackend(segment("PF.").acks(7).with("world")),
			byClient(segment(".").numbered(7).acks(7)),
		}, free, free},
		{"closed by the client, but for the last acknowledgement", closedByClient[:2], live, live},
		{"closed by the client alone, and acknowledged", []said{
			byClient(segment("F.")), byBackend(segment(".").acks(2)),
		}, live, live},
		{"closed by the backend", closedByBackend, free, free},
		{"closed by the backend alone", closedByBackend[:2], live, lastResort},
		{"closed by both at once", []said{
			byClient(segment("F.")), byBackend(segment("F.")),
			byClient(segment(".").numbered(2).acks(2)), byBackend(segment(".").numbered(2).acks(2)),
		}, free, free},
		{"closed, and the last FIN came again", append(closedByClient,
			byBackend(segment("F.").acks(2)), byClient(segment(".").numbered(2).acks(2))), free, free},
		{"closed, and yet the backend goes on", append(closedByClient,
			byBackend(segment("P.").numbered(2).acks(2).with("more"))), live, live},
		{"closed, and yet the client goes on", append(closedByClient,
			byClient(segment("P.").numbered(2).acks(2).with("more"))), live, lastResort},
		{"forged FINs, of what was acknowledged long ago", []said{
			byClient(segment("P.").with("hello")), byBackend(segment("P.").acks(6).with("world")),
			byClient(segment(".").numbered(6).acks(6)),
			byClient(segment("F.").acks(6)), byBackend(segment("F.").acks(6)),
		}, live, live},
		{"forged FINs, of what was not acknowledged", []said{
			byClient(segment("F.").numbered(500)), byBackend(segment("F.").numbered(600)),
		}, live, live},
		{"closed by the client after a forged SYN", append([]said{byClient(segment("S").numbered(500))}, closedByClient...), free, free},
		{"a FIN with data after it, all acknowledged", []said{
			byClient(segment("F.")), byBackend(segment("F.")),
			byClient(segment("P.").numbered(2).acks(2).with("hello")), byBackend(segment("P.").numbered(2).acks(7).with("world")),
			byClient(segment(".").numbered(7).acks(7)),
		}, live, live},
		{"reset by the client", []said{byClient(segment("R"))}, free, free},
		{"reset by the backend", []said{byBackend(segment("R."))}, free, free},
		// Whether the backend accepts it is unknown: the agent ends the flow when it is idle.
		{"reset by the client, that had sent more", []said{
			byClient(segment("P.").with("hello")), byClient(segment("R.").numbered(6)),
		}, live, live},
		{"reset by the backend, that had sent more", []said{
			byBackend(segment("P.").with("hello")), byBackend(segment("R.").numbered(6)),
		}, live, lastResort},
		{"reset by the client, after data of the backend that it had not read", []said{
			byClient(segment("P.").with("hello")), byBackend(segment("P.").acks(6).with("world")), byClient(segment("R").numbered(6)),
		}, free, free},
		{"reset by the client, that had sent more, which is acknowledged", []said{
			byClient(segment("P.").with("hello")), byClient(segment("R.").numbered(6)), byBackend(segment(".").acks(6)),
		}, free, free},
		{"reset by the backend, that had sent more, which is acknowledged", []said{
			byBackend(segment("P.").with("hello")), byBackend(segment("R.").numbered(6)), byClient(segment(".").acks(6)),
		}, free, free},
		{"reset by the backend, that had sent more, and yet it goes on", []said{
			byBackend(segment("P.").with("hello")), byBackend(segment("R.").numbered(6)), byBackend(segment("P.").with("hello")), byClient(segment(".").acks(6)),
		}, live, live},
		{"reset by the backend after the client's FIN", []said{
			byClient(segment("F.")), byBackend(segment("R.").acks(2)),
		}, free, free},
		{"a forged RST of the client", []said{byClient(segment("R").numbered(700))}, live, live},
		{"a forged RST of the backend", []said{byBackend(segment("R.").numbered(700))}, live, live},
		{"a forged RST of what is behind us", []said{
			byBackend(segment("P.").with("hello")), byClient(segment(".").acks(6)), byBackend(segment("R.")),
		}, live, live},
		{"reset, and yet the client goes on", []said{
			byClient(segment("R")), byClient(segment("P.").with("hello")),
		}, live, live},
		{"reset, and yet the backend goes on", []said{
			byBackend(segment("R.")), byBackend(segment("P.").with("hello")),
		}, live, live},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, ways, func(t *testing.T, w *world, p place) {
				for _, later := range []bool{false, true} {
					w := newWorldAt(t, p, w.family, onePort)
					c := beginOnOnePort(t, w, p)
					c.establish(t)
					for _, said := range test.said {
						said.on(t, c)
					}
					if later {
						w.wait(t, 11*time.Second)
						c.mustHold(t, test.then, segment("S").numbered(9))
					} else {
						c.mustHold(t, test.held, segment("S").numbered(9))
					}
				}
			})
		})
	}
}

// A sender that knows only addresses and ports finds a plausible number of a connection by 2,048 segments, and then has 64
// for a reset at the end of what the side has sent. The connection goes on after that, also if the table is full.
func TestConnectionIsNotEndedBlindly(t *testing.T) {
	const seqs, acks, between = 64, 32, 1 << 25
	each(t, ways, func(t *testing.T, w *world, p place) {
		c := beginOnOnePort(t, w, p)
		c.establish(t)
		forge := func(in packet) { w.ingress(t, p, in.from(p.client).to(clusterIP)) }
		for i := range uint32(seqs) {
			for j := range uint32(acks) {
				forge(segment(".").numbered(between + i<<26).acks(between + j<<27))
			}
		}
		if w.role(t, maps.FlowFromClient).flow.End-firstNumber == 1 {
			t.Fatal("no forged segment was near the connection's numbers: this test forges too few")
		}
		for i := range uint32(seqs) {
			forge(segment("R").numbered(between + i<<26))
		}
		w.use(t, w.room(t)-w.room(t)/4+c.entryCount()-4, 0) // there is room for another one in its place
		w.ingress(t, p, tcp(stranger, clusterIP, "S")).drops(maps.ReasonDropFlowTable)
		w.wait(t, 12*time.Second)
		w.sweep(t, 0)
		w.use(t, 0, 0)
		w.ingress(t, p, tcp(stranger, clusterIP, "S")).drops(maps.ReasonDropMasqueradePort)
		forge(segment("S").numbered(7))
		c.says(t, segment("P.").with("go on"))
		c.returns(t, segment("P.").acks(6).with("go on"))
	}, onePort)
}

// A reset that may be forged ends no connection of which the other side has closed: not in a full table, nor when the
// connection is idle.
func TestHalfClosedConnectionIsNotEndedBlindly(t *testing.T) {
	each(t, ways, func(t *testing.T, w *world, p place) {
		c := beginOnOnePort(t, w, p)
		c.establish(t)
		byBackend(segment("F.")).on(t, c)
		byClient(segment(".").acks(2)).on(t, c)
		w.ingress(t, p, segment(".").numbered(5000).acks(2).from(p.client).to(clusterIP))
		w.ingress(t, p, segment("R").numbered(5000).from(p.client).to(clusterIP))
		w.use(t, w.room(t)-w.room(t)/4+c.entryCount()-4, 0) // there is room for another one in its place
		w.ingress(t, p, tcp(stranger, clusterIP, "S")).drops(maps.ReasonDropFlowTable)
		w.wait(t, 12*time.Second)
		w.sweep(t, 0)
		c.says(t, segment("P.").acks(2).with("go on"))
		c.returns(t, segment(".").numbered(2).acks(6))
	}, onePort)
}

// Only a refusal by the backend frees the port at once.
func TestEndingOfRefusedConnections(t *testing.T) {
	for _, test := range []struct {
		name string
		rst  packet
		held held
	}{
		{"it acknowledges the SYN", segment("R."), free},
		{"it acknowledges something else", segment("R.").acks(77), live},
		{"it acknowledges nothing", segment("R"), live},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, ways, func(t *testing.T, w *world, p place) {
				c := beginOnOnePort(t, w, p)
				c.leaves(t, segment("S"))
				c.returns(t, test.rst)
				c.mustHold(t, test.held, segment("S"))
			}, onePort)
		})
	}
}

// A side whose entry was evicted is only known by its later packets.
func TestEndingOfLostSides(t *testing.T) {
	for _, lost := range []uint8{maps.FlowToBackend, maps.FlowFromBackend} {
		for name, closed := range map[string][]said{"before it ends": closedByClient, "while it ends": closedByClient[1:]} {
			t.Run(name, func(t *testing.T) {
				each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
					c := beginOnOnePort(t, w, p)
					c.establish(t)
					if len(closed) < len(closedByClient) {
						closedByClient[0].on(t, c)
					}
					w.delete(t, w.role(t, lost))
					w.wait(t, 1100*time.Millisecond)
					c.says(t, segment("."))
					for _, said := range closed {
						said.on(t, c)
					}
					want := free
					if len(closed) < len(closedByClient) && lost == maps.FlowToBackend {
						want = live
					}
					c.mustHold(t, want, segment("S"))
				}, onePort)
			})
		}
	}
}

// A CPU that finds a port taken by a half-open flow, which another CPU confirms before the first one sees
// whose it is, gets no port, and does not harm that flow.
func TestPortTakenMeanwhile(t *testing.T) {
	each(t, ways, func(t *testing.T, w *world, p place) {
		c := beginOnOnePort(t, w, p)
		spec, err := deviceSpec(w.maps, w.config(t, p))
		lab.Must(t, err)
		own := newLoader(w.maps).single(spec, deviceProgSluiceIngress)
		missSecond(t, own.Programs[deviceProgSluiceIngress], "reserve", "sl_opening")
		late, err := newLoader(w.maps).loadOne(own, deviceProgSluiceIngress)
		lab.Must(t, err)
		defer late.Close()
		usual := w.programs(t, p)
		w.rig.programs[w.config(t, p)] = &DevicePrograms{Ingress: late, Egress: usual.Egress}
		defer func() { w.rig.programs[w.config(t, p)] = usual }()

		w.wait(t, 4*time.Second) // a half-open flow that is seen would lose its port
		w.ingress(t, p, segment("S").from(stranger).to(clusterIP)).drops(maps.ReasonDropMasqueradePort)
		w.holds(t, c.entryCount(), true)
		c.establish(t)
		c.hears(t, segment("P.").with("hello"))
	}, onePort)
}

// missSecond makes the second lookup of a function in a map fail.
func missSecond(t *testing.T, program *ebpf.ProgramSpec, function, name string) {
	t.Helper()
	ins := program.Instructions
	at := slices.IndexFunc(ins, func(in asm.Instruction) bool { return in.Symbol() == function })
	for range 2 {
		for at++; at > 0 && at < len(ins) && ins[at].Reference() != name; at++ {
		}
		for ; at > 0 && at < len(ins) && !(ins[at].IsBuiltinCall() && ins[at].Constant == int64(asm.FnMapLookupElem)); at++ {
		}
	}
	if at <= 0 || at >= len(ins) {
		t.Fatalf("function %s of program %s does not look twice into %s", function, program.Name, name)
	}
	ins[at] = asm.Mov.Imm(asm.R0, 0).WithMetadata(ins[at].Metadata)
}

// A backend that has closed first stays in TIME_WAIT for a minute. It accepts a SYN that is newer: see
// is_in_time_wait.
func TestPortInTimeWait(t *testing.T) {
	const then, before, after = 0x7fffffff, 0x70000000, 0x90000000
	for _, test := range []struct {
		name  string
		stamp uint32 // of the connection's last packets
		syn   packet
		wait  time.Duration
		held  held
	}{
		{"an older number", 0, segment("S").numbered(1), 0, lastResort},
		{"the number where it ended", 0, segment("S").numbered(2), 0, lastResort},
		{"a newer number", 0, segment("S").numbered(3), 0, free},
		{"an older number, after a minute", 0, segment("S").numbered(1), 62 * time.Second, free},
		{"a newer number and an older timestamp", then, segment("S").numbered(3).stamped(before), 0, lastResort},
		{"an older number and a newer timestamp", then, segment("S").numbered(1).stamped(after), 0, free},
		{"a newer number and no timestamp", then, segment("S").numbered(3), 0, free},
		{"an older number and no timestamp", then, segment("S").numbered(1), 0, lastResort},
		{"a timestamp where there was none, and an older number", 0, segment("S").numbered(1).stamped(after), 0, lastResort},
		{"a timestamp that may be of the same moment", then, segment("S").numbered(3).stamped(then), 0, lastResort},
		{"an older timestamp, after a minute", then, segment("S").numbered(1).stamped(before), 62 * time.Second, free},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, ways, func(t *testing.T, w *world, p place) {
				c := beginOnOnePort(t, w, p)
				c.establish(t)
				for _, said := range closedByBackend {
					said.packet = said.packet.stamped(test.stamp)
					said.on(t, c)
				}
				w.wait(t, test.wait)
				c.mustHold(t, test.held, test.syn)
			}, onePort)
		})
	}
}

// The same client's timestamps grow.
func TestPortInTimeWaitOfTheSameClient(t *testing.T) {
	const stamp = 0x12345678
	each(t, ways, func(t *testing.T, w *world, p place) {
		c := beginOnOnePort(t, w, p)
		c.establish(t)
		for _, said := range closedByBackend {
			said.packet = said.packet.stamped(stamp)
			said.on(t, c)
		}
		again := segment("S").stamped(stamp + 1).from(client).fromPort(40001).to(clusterIP)
		other := *c
		other.place.client = again.src.String()
		counts := w.counted(t, func() { other.goesOn(w.ingress(t, p, again), maps.ReasonTranslated) })
		if counts.MasqueradeRetries != 0 {
			t.Errorf("%d retries", counts.MasqueradeRetries)
		}
	}, onePort)
}

// Late packets of a connection do not harm a later connection with the same port.
func TestLateSegmentsAfterTheEnd(t *testing.T) {
	each(t, ways, func(t *testing.T, w *world, p place) {
		c := beginOnOnePort(t, w, p)
		c.establish(t)
		for _, said := range closedByClient {
			said.on(t, c)
		}
		c.mustHold(t, free, segment("S").numbered(5000))
		w.ingress(t, p, segment(".").numbered(2).acks(2).from(client).to(clusterIP)).ends(verdictRedirect, maps.ReasonRejectNoFlow)

		now := *c
		now.place.client = stranger
		const old = 1 << 28 // where the numbers of the old connection are
		late := []said{
			byBackend(segment("F.").numbered(old).acks(2)), // again, for its acknowledgement got lost
			byBackend(segment("R.").numbered(old).acks(2)),
			byBackend(segment("F.").numbered(-old & 0xffffffff).acks(2)),
		}
		late[0].on(t, &now) // before the answer to the SYN
		byBackend(segment("S.").acks(5001)).on(t, &now)
		byClient(segment(".").numbered(5001)).on(t, &now)
		for range 2 {
			for _, said := range late {
				said.on(t, &now)
			}
			w.wait(t, 11*time.Second)
		}
		other := tcp("8.0.100.77:40000", clusterIP, "S")
		w.ingress(t, p, other).drops(maps.ReasonDropMasqueradePort)
		now.says(t, segment("P.").numbered(5001).with("go on"))
		now.returns(t, segment("P.").acks(5006).with("go on"))
	}, onePort)
}

// Ports are used in turn, so that each has been unused for as long as possible.
func TestPortsAreTakenInTurn(t *testing.T) {
	const ports = 5
	each(t, ways, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, to: []string{remotePod}})
		var taken []uint16
		var entries int
		for i := range 3 * ports {
			c := &conversation{w: w, place: p, proto: layers.IPProtocolTCP, vip: clusterIP, backend: remotePod}
			c.place.client = clientAt(i)
			c.first(t, maps.ReasonTranslated)
			c.masqueradedPort = maps.Port(w.flowOf(t, clientAt(i), clusterIP).MasqueradePort)
			c.establish(t)
			for _, said := range closedByClient {
				said.on(t, c)
			}
			taken, entries = append(taken, c.masqueradedPort), ports*c.entryCount()
		}
		for i, port := range taken[ports:] {
			if port != taken[i] {
				t.Fatalf("ports were %v, want %d of them in turn", taken, ports)
			}
		}
		slices.Sort(taken)
		if all := slices.Compact(taken); !slices.Equal(all, []uint16{20000, 20001, 20002, 65534, 65535}) {
			t.Errorf("these ports were taken: %v", all)
		}
		w.holds(t, entries, false) // flows that are over go with their ports
	}, func(c *DeviceConfig) {
		c.MasqueradePorts, c.MorePorts = PortRange{Low: 20000, High: 20002}, PortRange{Low: 65534, High: 65535}
	})
}
