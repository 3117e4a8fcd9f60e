package bpf

import (
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
)

// The connection of a process of this node, and the backend that it has got instead of the one dialled.
const (
	process     = "8.0.50.1:40000"
	processPort = uint16(10001) // that the backend sees
	dialled     = remotePod
	instead     = "8.0.2.8:8080"
)

// putOwn puts entries of the flow of a process to a backend, as when its SYN has left.
func putOwn(t *testing.T, w *world, backend string, port uint16, state uint8, roles ...uint8) {
	t.Helper()
	s := w.serve(t, service{at: []string{clusterIP}, to: []string{backend}})
	f := maps.Flow{
		Client: w.mapAddr(process), ClientPort: maps.Port(at(process).Port()), StackPort: maps.Port(port),
		OriginalDst: w.mapAddr(dialled), OriginalPort: maps.Port(at(dialled).Port()),
		Backend: w.mapAddr(backend), BackendPort: maps.Port(at(backend).Port()),
		Proto: uint8(layers.IPProtocolTCP), Flags: maps.FlowOfNode | maps.FlowResteered | maps.FlowCounted,
		ServicePortId: s.id, BackendId: s.backends[backend], Created: now(t) + uint64(port), LastSeen: now(t), State: state,
	}
	for _, role := range roles {
		e := entry{flow: f, key: f.Key(role), halfOpen: true}
		e.flow.Role, e.flow.End = role, 0
		if role == maps.FlowFromClient {
			e.flow.End = firstNumber + 1
			w.maps.SourceFilter.Note(e.key, role, now(t))
		} else {
			w.maps.PortFilter.Add(port)
		}
		if state == maps.FlowAbandoned {
			e.flow.Ack = firstNumber + 1
		}
		w.put(t, e)
	}
}

// eachOwn runs a test on a half-open flow of a process, which the dialled backend has not answered.
func eachOwn(t *testing.T, run func(*testing.T, *world)) {
	t.Helper()
	each(t, []place{uplink}, func(t *testing.T, w *world, _ place) {
		putOwn(t, w, dialled, at(process).Port(), maps.FlowAbandoned, maps.FlowToClient)
		putOwn(t, w, instead, processPort, maps.FlowNew, maps.FlowFromClient, maps.FlowToClient)
		run(t, w)
	}, resteer)
}

// leavesAgain has the process send a packet, which goes to the other backend by the route to that. There it
// passes egress again, untouched.
func leavesAgain(t *testing.T, w *world, flags string) {
	t.Helper()
	in := tcp(process, dialled, flags)
	want := in.fromPort(processPort).to(instead)
	o := w.egress(t, uplink, in)
	o.ends(verdictRedirect, maps.ReasonFlow)
	o.compare(w.bytes(uplink, want, o.between))
	w.egress(t, uplink, want).passes(maps.ReasonPassOtherTraffic)
}

// answersInstead has the other backend answer, as the one dialled.
func answersInstead(t *testing.T, w *world, flags string) {
	t.Helper()
	in := tcp(instead, process, flags).toPort(processPort)
	w.ingress(t, uplink, in).becomes(in.from(dialled).to(process), maps.ReasonFlow)
}

// answerTo returns the entry of what arrives at a port.
func (w *world) answerTo(t *testing.T, port uint16) entry {
	t.Helper()
	for _, e := range w.entries(t) {
		if e.key.Hook == maps.HookIngress && maps.Port(e.key.DstPort) == port {
			return e
		}
	}
	t.Fatalf("nothing arrives at port %d", port)

	return entry{}
}

// A process is answered by another backend than the one that it has dialled, and sees no difference. What the
// dialled one answers later is dropped.
func TestResteeredProcess(t *testing.T) {
	eachOwn(t, func(t *testing.T, w *world) {
		leavesAgain(t, w, "S")
		answersInstead(t, w, "S.")
		leavesAgain(t, w, ".")
		leavesAgain(t, w, "P.")
		answersInstead(t, w, "P.")
		for _, late := range []string{"S.", "R."} {
			w.ingress(t, uplink, tcp(dialled, process, late)).drops(maps.ReasonDropAbandoned)
		}
		for _, e := range w.entries(t) {
			if e.halfOpen == (e.flow.State != maps.FlowAbandoned) {
				t.Errorf("entry of role %d in state %d: half open is %v", e.flow.Role, e.flow.State, e.halfOpen)
			}
		}
		// An entry that was lost is put back.
		w.delete(t, w.answerTo(t, processPort))
		w.wait(t, 10*time.Second)
		leavesAgain(t, w, "P.")
		answersInstead(t, w, "P.")
	})
}

// What the stack has routed to the backend that a process has dialled has met the policies of IPsec for that one. It
// does not leave for another one.
func TestResteeredProcessBehindIPsec(t *testing.T) {
	eachOwn(t, func(t *testing.T, w *world) {
		leavesAgain(t, w, "S")
		w.encrypt(t, uplink)
		w.egress(t, uplink, tcp(process, dialled, ".")).drops(maps.ReasonFlow)
	})
}

// The backend that the process has dialled was only slow, and keeps the connection. Its packets pass as the
// stack has routed them.
func TestFirstAnswerToAProcess(t *testing.T) {
	eachOwn(t, func(t *testing.T, w *world) {
		w.ingress(t, uplink, tcp(dialled, process, "S.")).becomes(tcp(dialled, process, "S."), maps.ReasonFlow)
		for _, flags := range []string{".", "P."} {
			w.egress(t, uplink, tcp(process, dialled, flags)).becomes(tcp(process, dialled, flags), maps.ReasonFlow)
		}
		w.ingress(t, uplink, tcp(instead, process, "S.").toPort(processPort)).drops(maps.ReasonDropAbandoned)
	})
}

// The next connection of the port goes where the socket has dialled.
func TestPortOfAResteeredProcess(t *testing.T) {
	eachOwn(t, func(t *testing.T, w *world) {
		w.egress(t, uplink, tcp(process, dialled, "S").numbered(1<<20)).passes(maps.ReasonPassOtherTraffic)
		for _, e := range w.entries(t) {
			if e.flow.State != maps.FlowAbandoned {
				t.Errorf("the entry of role %d is left", e.flow.Role)
			}
		}
	})
}

// A client's flow does not get the port of a process' one at the same backend, also when that is open.
func TestMasqueradeAvoidsResteeredProcess(t *testing.T) {
	for _, open := range []bool{false, true} {
		each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
			w.programs(t, p) // the half-open flow is not to wait for them
			putOwn(t, w, instead, processPort, maps.FlowNew, maps.FlowFromClient, maps.FlowToClient)
			if open {
				answersInstead(t, w, "S.")
				leavesAgain(t, w, ".")
			}
			w.serve(t, service{at: []string{clusterIP}, to: []string{instead}})
			w.ingress(t, p, tcp(client, clusterIP, "S"))
			if port := maps.Port(w.flowOf(t, client, clusterIP).MasqueradePort); port != processPort+1 {
				t.Errorf("open: %v: the client has port %d, want the next one", open, port)
			}
			answersInstead(t, w, "S.")
		}, resteer, func(c *DeviceConfig) { c.MasqueradePorts = PortRange{Low: processPort, High: processPort + 1} })
	}
}
