// Package forward measures the cost to packets of other traffic of passing a
// node: the tax of the device hooks. It has nothing but a benchmark.
package forward

import (
	"crypto/rand"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

const (
	rounds   = 201
	packets  = 3_000 // of a round, sent one after the other
	services = 10_000
)

// A client outside of the cluster sends small datagrams to a pod, by its own
// address:
//
//	client eth0 ┄ uplink ┄ eth0 node br0 ┄ pod0 ┄ eth0 pod
//	                       ingress: uplink  egress: pods
//
// A veth passes a packet on in the sender's own time, so the time of a send is
// that of the whole way, and the tax is what the hooks add to it. They are
// attached and detached in turns. With "flows live", the egress hooks' filter lets packets of
// 1,000 clients and backends pass, none of which are these.
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
	if err := cluster.Client.AddRoute(node.PodCIDRs[0], node.IPv4); err != nil {
		b.Fatal(err)
	}
	dp, devices := mustOpen(b, node)
	mustProgram(b, dp.Maps())
	send := mustSender(b, cluster.Client, pod)

	var without, with []float64
	for range rounds {
		mustAttach(b, node, dp, nil)
		without = append(without, send(b))
		mustAttach(b, node, dp, devices)
		if flows {
			noteFlows(dp.Maps())
		}
		with = append(with, send(b))
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(without), "without-ns")
	b.ReportMetric(median(with), "with-ns")
	var ratios []float64 // of neighbours: what disturbs both is in neither
	for i := range with {
		ratios = append(ratios, with[i]/without[i])
	}
	b.ReportMetric(100*(median(ratios)-1), "tax-%")
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
	var device netlink.Link
	device, err := node.Netlink().LinkByName(name)
	if err != nil {
		b.Fatal(err)
	}

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

// mustProgram writes the addresses and ranges of many Services.
func mustProgram(b *testing.B, m *maps.Pinned) {
	b.Helper()
	ip := netip.MustParseAddr("10.96.0.1")
	for range services {
		if err := m.Addrs.Put(maps.AddrOf(ip), maps.AddrUse{Flags: maps.AddrService}); err != nil {
			b.Fatal(err)
		}
		ip = ip.Next()
	}
	for _, cidr := range []string{"10.96.0.0/12", "fd00:10:96::/112"} {
		if err := mapstest.New(m.Tables).ServiceCIDR(netip.MustParsePrefix(cidr)); err != nil {
			b.Fatal(err)
		}
	}
}

// noteFlows writes to the filter as flows of many clients with many backends do.
func noteFlows(m *maps.Pinned) {
	client, backend := netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("10.200.0.1")
	for range 1000 {
		for role, src := range map[uint8]netip.AddrPort{
			maps.FlowToBackend: netip.AddrPortFrom(client, 40000), maps.FlowToClient: netip.AddrPortFrom(backend, 8080),
		} {
			m.SourceFilter.Note(maps.FlowKeyOf(maps.HookEgress, unix.IPPROTO_TCP, src, netip.AddrPort{}), role, flow.Now())
		}
		client, backend = client.Next(), backend.Next()
	}
}

// mustSender returns a function that sends a round and returns nanoseconds per datagram.
func mustSender(b *testing.B, client *lab.Host, pod *lab.Pod) func(*testing.B) float64 {
	b.Helper()
	var sink, conn net.Conn
	lab.MustDo(b, pod.Namespace, func() (err error) {
		// A full socket drops datagrams at once, so no one needs to read them.
		sink, err = net.ListenUDP("udp4", &net.UDPAddr{IP: pod.IPv4.AsSlice(), Port: 9000})

		return err
	})
	b.Cleanup(func() { sink.Close() })
	lab.MustDo(b, client.Namespace, func() (err error) {
		conn, err = net.Dial("udp4", netip.AddrPortFrom(pod.IPv4, 9000).String())

		return err
	})
	b.Cleanup(func() { conn.Close() })
	payload := make([]byte, 64)

	return func(b *testing.B) float64 {
		begin := time.Now()
		for range packets {
			if _, err := conn.Write(payload); err != nil {
				b.Fatal(err)
			}
		}

		return float64(time.Since(begin).Nanoseconds()) / packets
	}
}
