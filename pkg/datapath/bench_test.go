package datapath

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/test/lab"
)

// These benchmarks measure what a hook costs a UDP socket of a pod: ns of CPU time per connect()
// and per sendto(). No test asserts a time. Run them alone:
//
//	go test ./pkg/datapath -run xxx -bench . -benchtime 200000x
func BenchmarkConnect(b *testing.B) { benchmarkScene(b, "time connect") }
func BenchmarkSend(b *testing.B)    { benchmarkScene(b, "time send") }

// BenchmarkSocket is the whole life of a socket that sends one datagram.
func BenchmarkSocket(b *testing.B) { benchmarkScene(b, "time socket") }

func benchmarkScene(b *testing.B, scene string) {
	const vip, sticky = "10.96.0.1:53", "10.96.0.2:53"
	for _, bench := range []struct {
		name     string
		at       string
		attached bool
	}{
		{"no hooks", "10.250.0.2:9", false},
		{"not a Service", "10.250.0.2:9", true},
		{"ClusterIP with 10 backends", vip, true},
		{"ClusterIP with session affinity", sticky, true},
	} {
		b.Run(bench.name, func(b *testing.B) {
			w := buildWorld(b)
			w.Datapath = w.mustOpen(b, w.cfg)
			var to []string
			for port := range 10 {
				to = append(to, fmt.Sprintf("10.250.0.2:%d", 100+port))
			}
			w.add(b, service{proto: "udp", at: []string{vip}, to: to})
			w.add(b, service{proto: "udp", at: []string{sticky}, to: to, affinity: 10800})
			w.serviceCIDRs(b, "10.96.0.0/16")
			w.nodePortsAt(b, w.node.IPv4)
			w.addDump(b)
			if bench.attached {
				w.mustAttach(b)
			}
			printed := w.play(b, w.client.Namespace, scene, bench.at, strconv.Itoa(b.N))
			ns, err := strconv.ParseFloat(printed, 64)
			if err != nil {
				b.Fatal(printed)
			}
			b.ReportMetric(ns, "ns/op")
		})
	}
}

// addDump gives the client pod a device that drops what is sent, so that the work of
// receivers is not measured.
func (w *world) addDump(b *testing.B) {
	b.Helper()
	dump := &netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: "dump", Flags: net.FlagUp}}
	lab.Must(b, w.client.Netlink().LinkAdd(dump), w.client.AddAddress("dump", netip.MustParsePrefix("10.250.0.1/24")))
}

// timed prints how many nanoseconds one of n calls of f takes.
func timed(n string, f func() error) (string, error) {
	calls, err := strconv.Atoi(n)
	if err != nil {
		return "", err
	}
	start := cpuTime()
	for range calls {
		if err := f(); err != nil {
			return "", err
		}
	}

	return strconv.FormatFloat(float64(cpuTime()-start)/float64(calls), 'f', 1, 64), nil
}

// cpuTime returns the CPU time of this process in nanoseconds. Unlike elapsed time, it does
// not depend on how busy the machine is.
func cpuTime() int64 {
	var used unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &used)

	return used.Nano()
}

func sceneTimeConnect(args []string) (string, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return "", err
	}
	to := sockaddr(args[0])

	return timed(args[1], func() error { return unix.Connect(fd, to) })
}

func sceneTimeSend(args []string) (string, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return "", err
	}
	to, question := sockaddr(args[0]), []byte("who\n")

	return timed(args[1], func() error { return unix.Sendto(fd, question, 0, to) })
}

func sceneTimeSocket(args []string) (string, error) {
	to, question := sockaddr(args[0]), []byte("who\n")

	return timed(args[1], func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		if err != nil {
			return err
		}
		if err := unix.Sendto(fd, question, 0, to); err != nil {
			return err
		}

		return unix.Close(fd)
	})
}

// BenchmarkTCP is the whole life of a TCP connection to a server on loopback, in ns of CPU
// time of both sides: without hooks, with them, with handshakes measured, and with the timeouts of SYNs.
func BenchmarkTCP(b *testing.B) {
	for _, bench := range []struct {
		name     string
		at       string
		attached bool
		measured bool
		resteer  bool
	}{
		{"no hooks", "127.0.0.1:8089", false, false, false},
		{"not a Service", "127.0.0.1:8089", true, false, false},
		{"not a Service, handshakes measured", "127.0.0.1:8089", true, true, false},
		{"not a Service, re-steered", "127.0.0.1:8089", true, false, true},
		{"ClusterIP", "10.96.0.1:80", true, false, false},
		{"ClusterIP, handshakes measured", "10.96.0.1:80", true, true, false},
		{"ClusterIP, re-steered", "10.96.0.1:80", true, false, true},
	} {
		b.Run(bench.name, func(b *testing.B) {
			w := buildWorld(b)
			w.cfg.Handshakes, w.cfg.Resteer = bench.measured, bench.resteer
			w.Datapath = w.mustOpen(b, w.cfg)
			w.add(b, service{proto: "tcp", at: []string{"10.96.0.1:80"}, to: []string{"127.0.0.1:8089"}})
			w.serviceCIDRs(b, "10.96.0.0/16")
			if bench.attached {
				w.mustAttach(b)
			}
			printed := w.play(b, w.client.Namespace, "time tcp", bench.at, strconv.Itoa(b.N))
			ns, err := strconv.ParseFloat(printed, 64)
			if err != nil {
				b.Fatal(printed)
			}
			b.ReportMetric(ns, "ns/op")
		})
	}
}

// BenchmarkHealing is what healing costs healthy connections, with each --heal: ns of CPU time of a
// TCP connection as in BenchmarkTCP, and in brackets of it those of socket programs and tracepoints. The
// modes take turns in short rounds, of which there are b.N, and the figures are medians and minima.
func BenchmarkHealing(b *testing.B) {
	const connections = 2000
	type mode struct {
		name string
		*world
		programs          []bpf.Hook
		total, ofPrograms []float64
	}
	modes := []*mode{{name: "off"}, {name: "eject"}, {name: "resteer"}}
	for i, m := range modes {
		w := buildWorld(b, func(c *Config) { c.Heal, c.Resteer = i > 0, i > 1 })
		w.Datapath = w.mustOpen(b, w.cfg)
		w.add(b, service{proto: "tcp", at: []string{"10.96.0.1:80"}, to: []string{"127.0.0.1:8089"}})
		w.mustAttach(b)
		programs, err := w.Datapath.programs()
		lab.Must(b, err)
		m.world, m.programs = w, slices.Concat(programs.Sock, programs.Trace)
	}
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	lab.Must(b, err)
	defer stats.Close()
	for b.Loop() {
		for _, m := range modes {
			before := runtimeOf(b, m.programs)
			printed := m.play(b, m.client.Namespace, "time tcp", "10.96.0.1:80", strconv.Itoa(connections))
			ns, err := strconv.ParseFloat(printed, 64)
			lab.Must(b, err)
			m.total = append(m.total, ns)
			m.ofPrograms = append(m.ofPrograms, float64(runtimeOf(b, m.programs)-before)/connections)
		}
	}
	for _, m := range modes {
		for unit, values := range map[string][]float64{"ns": m.total, "program-ns": m.ofPrograms} {
			slices.Sort(values)
			b.ReportMetric(values[len(values)/2], m.name+"-"+unit)
			b.ReportMetric(values[0], m.name+"-"+unit+"-min")
		}
	}
}

// runtimeOf returns how long programs have run.
func runtimeOf(b *testing.B, programs []bpf.Hook) time.Duration {
	b.Helper()
	sum := time.Duration(0)
	for _, p := range programs {
		stats, err := p.Program.Stats()
		lab.Must(b, err)
		sum += stats.Runtime
	}

	return sum
}

// sceneTimeTCP serves at 127.0.0.1:8089 and connects to args[0].
func sceneTimeTCP(args []string) (string, error) {
	listener, err := net.Listen("tcp4", "127.0.0.1:8089")
	if err != nil {
		return "", err
	}
	file, err := listener.(*net.TCPListener).File()
	if err != nil {
		return "", err
	}
	at := int(file.Fd())
	if err := unix.SetNonblock(at, false); err != nil {
		return "", err
	}
	to := sockaddr(args[0])
	text, err := timed(args[1], func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		if err != nil {
			return err
		}
		if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
			return err
		}
		if err := unix.Connect(fd, to); err != nil {
			return fmt.Errorf("connect: %w", err)
		}
		accepted, _, err := unix.Accept(at)
		if err != nil {
			return err
		}
		if err := unix.Close(fd); err != nil {
			return err
		}

		return unix.Close(accepted)
	})

	return text, errors.Join(err, file.Close(), listener.Close())
}
