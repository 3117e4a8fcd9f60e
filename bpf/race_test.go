package bpf

import (
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// The first two datagrams of a socket, as a resolver sends for both families, that two CPUs get at one moment
// belong to one flow, in each way that a flow can begin.
func TestFirstDatagramsAtOnce(t *testing.T) {
	if runtime.NumCPU() < 2 {
		t.Skip("this machine has one CPU")
	}
	for _, test := range []struct {
		name    string
		places  []place
		to      []string
		flags   uint16
		entries int
	}{
		{"turned", []place{turning}, []string{remotePod, "8.0.2.9:8080"}, 0, 2},
		{"masqueraded by way of the stack", []place{uplink}, []string{remotePod, "8.0.2.9:8080"}, 0, 4},
		{"masqueraded, one backend", []place{uplink}, []string{remotePod}, 0, 4},
		{"all are masqueraded", []place{podVeth}, []string{tapPod, "8.0.4.9:8080"}, maps.PoolMasquerade, 4},
		{"plain", []place{uplink, podVeth}, []string{tapPod, "8.0.4.9:8080"}, 0, 2},
		{"a bridge", []place{podPort, bridgedNIC}, []string{portPod, portPodToo}, 0, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, test.places, func(t *testing.T, w *world, p place) {
				w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: test.to, flags: test.flags})
				w.race(t, p, test.entries)
			})
		})
	}
}

// race runs pairs of first datagrams on two CPUs, and checks that each pair has one flow.
func (w *world) race(t *testing.T, p place, entries int) {
	t.Helper()
	const pairs, batch = 400, 100
	program := w.programs(t, p).Ingress
	mixed := 0
	for begin := 0; begin < pairs; begin += batch {
		first := uint16(20000 + begin)
		var goes [2][batch]string
		var arrived atomic.Int64
		var running errgroup.Group
		for cpu := range goes {
			running.Go(func() error {
				return w.node.Do(func() error {
					runtime.LockOSThread() // the thread ends with the goroutine
					var set unix.CPUSet
					set.Set(cpu)
					if err := unix.SchedSetaffinity(0, &set); err != nil {
						return fmt.Errorf("affinity: %w", err)
					}
					for i := range batch {
						in := udp(p.client, clusterIP).fromPort(first + uint16(i)).with(fmt.Sprint("cpu ", cpu))
						to, err := w.raceOne(program, p, in, &arrived, int64(2*(i+1)))
						if err != nil {
							return err
						}
						goes[cpu][i] = to
					}

					return nil
				})
			})
		}
		lab.Must(t, running.Wait())
		created := make(map[uint16][]uint64)
		for _, e := range w.entries(t) {
			port := maps.Port(e.flow.ClientPort)
			created[port] = append(created[port], e.flow.Created)
		}
		for i := range batch {
			had := created[first+uint16(i)]
			if goes[0][i] != goes[1][i] || len(had) != entries || len(slices.Compact(had)) != 1 {
				mixed++
			}
		}
		w.forgetDatagrams(t)
	}
	if mixed > 0 {
		t.Errorf("%d of %d pairs have not one flow", mixed, pairs)
	}
}

// raceOne runs a packet as soon as the other CPU is there, and returns the addresses that it leaves with.
func (w *world) raceOne(program *ebpf.Program, p place, in packet, arrived *atomic.Int64, both int64) (string, error) {
	between := ends{src: macOf(in.src.Addr()), dst: w.links[p.device].Attrs().HardwareAddr}
	if p.bridgePort {
		between.dst = w.links["br0"].Attrs().HardwareAddr
	}
	frame := w.bytes(p, in, between)
	context := skBuff{Ifindex: w.index(p.device)}
	out := make([]byte, len(frame)+256)
	options := &ebpf.RunOptions{Data: frame, DataOut: out, Context: &context}
	arrived.Add(1)
	for arrived.Load() < both {
	}
	if _, err := program.Run(options); err != nil {
		return "", fmt.Errorf("run: %w", err)
	}
	l3, _ := skipLink(options.DataOut)
	d, ok := dissect(options.DataOut, l3)
	if !ok {
		return "", fmt.Errorf("the program has left no packet: %x", options.DataOut)
	}

	return fmt.Sprintf("%x %x", d.addrs, options.DataOut[d.transport:d.transport+4]), nil
}

// forgetDatagrams deletes all flows that are unanswered.
func (w *world) forgetDatagrams(t *testing.T) {
	t.Helper()
	for _, e := range w.entries(t) {
		lab.Must(t, w.maps.Unanswered.Delete(e.key))
	}
}
