// Package forward measures the cost to packets of other traffic of passing a
// node: the tax of the device hooks. It has nothing but a benchmark.
package forward

import (
	"crypto/rand"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

const (
	rounds   = 61
	batches  = 10  // of a round, of which the fastest counts: other work of the machine only adds to it
	packets  = 300 // of a batch, sent one after the other
	services = 10_000
)

// A client outside of the cluster sends small datagrams to a pod, by its own
// address:
//
//	client eth0 ┄ uplink ┄ eth0 node br0 ┄ pod0 ┄ eth0 pod
//	                       ingress: uplink  egress: pods
//
// A veth passes a packet on in the sender's own time, so the time of a send is
// that of the whole way, and the tax is what the hooks add to it: those of this package, and empty
// programs in their places. They are attached and detached in turns. With "flows live", the egress hooks' filter
// lets packets of 1,000 clients and backends pass, none of which are these.
//
//	go test -run '^$' -bench Forward ./forward
func BenchmarkForward(b *testing.B) {
	for _, flows := range []bool{false, true} {
		name := "no flow lives"
		if flows {
			name = "flows live"
		}
		b.Run(name, func(b *testing.B) { measure(b, flows) })
	}
}

func measure(b *testing.B, flows bool) {
	cluster := lab.MustNew(b, lab.Config{Nodes: 1, PodsPerNode: 1, Client: true})
	node, pod := cluster.Nodes[0], cluster.Nodes[0].Pods[0]
	lab.Must(b, cluster.Client.AddRoute(node.PodCIDRs[0], node.IPv4))
	dp, devices := mustOpen(b, node)
	mustProgram(b, dp.Maps())
	send := mustSender(b, cluster.Client, pod)

	var without, empty, with []float64
	for range rounds {
		mustAttach(b, node, dp, nil)
		without = append(without, fastest(b, cluster.Client.Namespace, send))
		detach := mustAttachEmpty(b, node, devices)
		empty = append(empty, fastest(b, cluster.Client.Namespace, send))
		detach()
		mustAttach(b, node, dp, devices)
		if flows {
			noteFlows(dp.Maps())
		}
		with = append(with, fastest(b, cluster.Client.Namespace, send))
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(without), "without-ns")
	b.ReportMetric(median(with), "with-ns")
	b.ReportMetric(100*(medianRatio(empty, without)-1), "empty-%")
	b.ReportMetric(100*(medianRatio(with, without)-1), "tax-%")
}

// fastest returns the least result of a round's batches, which are sent from a namespace.
func fastest(b *testing.B, from *lab.Namespace, batch func() (float64, error)) float64 {
	b.Helper()
	least := math.Inf(1)
	lab.MustDo(b, from, func() error {
		for range batches {
			took, err := batch()
			if err != nil {
				return err
			}
			least = min(least, took)
		}

		return nil
	})

	return least
}

// medianRatio compares what was measured in the same round: what disturbs both is in neither.
func medianRatio(of, to []float64) float64 {
	var ratios []float64
	for i := range of {
		ratios = append(ratios, of[i]/to[i])
	}

	return median(ratios)
}

func median(of []float64) float64 {
	sorted := slices.Sorted(slices.Values(of))

	return sorted[len(sorted)/2]
}

func mustOpen(b *testing.B, node *lab.Node) (*datapath.Datapath, []datapath.Device) {
	b.Helper()
	cfg := datapath.Config{
		CgroupRoot: lab.MustCgroup(b, "forward").Path(),
		BPFRoot:    "/sys/fs/bpf/sluice-forward-" + rand.Text()[:8],
	}
	b.Cleanup(func() {
		lab.MustDo(b, node.Namespace, func() error { return datapath.Remove(cfg.BPFRoot) })
	})
	var dp *datapath.Datapath
	lab.MustDo(b, node.Namespace, func() (err error) {
		dp, err = datapath.Open(cfg)

		return err
	})
	b.Cleanup(func() { dp.Close() })

	return dp, []datapath.Device{
		{Index: mustIndex(b, node, "eth0"), Class: maps.DeviceUplink},
		{Index: mustIndex(b, node, "pod0"), Class: maps.DevicePods, BridgePort: true},
	}
}

func mustIndex(b *testing.B, node *lab.Node, name string) int {
	b.Helper()
	device, err := node.Netlink().LinkByName(name)
	lab.Must(b, err)

	return device.Attrs().Index
}

func mustAttach(b *testing.B, node *lab.Node, dp *datapath.Datapath, devices []datapath.Device) {
	b.Helper()
	lab.MustDo(b, node.Namespace, func() error {
		failed, err := dp.AttachDevices(devices)
		for index, err := range failed {
			return fmt.Errorf("device %d: %w", index, err)
		}

		return err
	})
}

// mustAttachEmpty attaches programs that do nothing to both hooks of the devices, until the function
// that it returns is called.
func mustAttachEmpty(b *testing.B, node *lab.Node, devices []datapath.Device) (detach func()) {
	b.Helper()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:         ebpf.SchedCLS,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
		License:      "GPL",
	})
	lab.Must(b, err)
	var links []link.Link
	lab.MustDo(b, node.Namespace, func() error {
		for _, device := range devices {
			for _, hook := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				l, err := link.AttachTCX(link.TCXOptions{Interface: device.Index, Program: program, Attach: hook})
				if err != nil {
					return err
				}
				links = append(links, l)
			}
		}

		return program.Close()
	})

	return func() {
		for _, l := range links {
			lab.Must(b, l.Close())
		}
	}
}

// mustProgram writes the addresses and ranges of many Services.
func mustProgram(b *testing.B, m *maps.Pinned) {
	b.Helper()
	ip := netip.MustParseAddr("10.96.0.1")
	for range services {
		lab.Must(b, m.Addrs.Put(maps.AddrOf(ip), maps.AddrUse{Flags: maps.AddrService}))
		ip = ip.Next()
	}
	for _, cidr := range []string{"10.96.0.0/12", "fd00:10:96::/112"} {
		lab.Must(b, mapstest.New(m.Tables).ServiceCIDR(netip.MustParsePrefix(cidr)))
	}
}

// noteFlows writes to the filter as flows of many clients with many backends do.
func noteFlows(m *maps.Pinned) {
	client, backend := netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("10.200.0.1")
	for range 1000 {
		for role, src := range map[uint8]netip.AddrPort{
			maps.FlowToBackend: netip.AddrPortFrom(client, 40000), maps.FlowToClient: netip.AddrPortFrom(backend, 8080),
		} {
			m.SourceFilter.Note(maps.FlowKeyOf(maps.HookEgress, unix.IPPROTO_TCP, src, netip.AddrPort{}), role, maps.Now())
		}
		client, backend = client.Next(), backend.Next()
	}
}

// mustSender returns a function that sends a batch and returns nanoseconds per datagram.
func mustSender(b *testing.B, client *lab.Host, pod *lab.Pod) func() (float64, error) {
	b.Helper()
	var sink net.Conn
	lab.MustDo(b, pod.Namespace, func() (err error) {
		// A full socket drops datagrams at once, so no one needs to read them.
		sink, err = net.ListenUDP("udp4", &net.UDPAddr{IP: pod.IPv4.AsSlice(), Port: 9000})

		return err
	})
	b.Cleanup(func() { sink.Close() })
	conn, err := client.Dial("udp4", netip.AddrPortFrom(pod.IPv4, 9000).String(), time.Second)
	lab.Must(b, err)
	b.Cleanup(func() { conn.Close() })
	payload := make([]byte, 64)

	return func() (float64, error) {
		begin := time.Now()
		for range packets {
			if _, err := conn.Write(payload); err != nil {
				return 0, err
			}
		}

		return float64(time.Since(begin).Nanoseconds()) / packets, nil
	}
}
