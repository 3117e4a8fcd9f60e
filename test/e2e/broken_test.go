package e2e

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// brokenWorld is a node on which connections fail, and what sluice explain says of one in its first lines.
type brokenWorld struct {
	name     string
	breakIt  func(t *testing.T, c *lab.Cluster)
	mend     func(t *testing.T, c *lab.Cluster) // nil: nothing is to be mended
	question string
	says     string
}

const (
	tableBegins = "<!-- the table that TestBrokenWorlds compares -->\n"
	tableEnds   = "<!-- its end -->\n"
)

// brokenWorlds are those of a node with the Services of testdata/broken: here has its endpoint in a pod of the node, there
// has it on node-2.
var brokenWorlds = []brokenWorld{
	{
		"no route to the endpoint",
		func(t *testing.T, c *lab.Cluster) { mustRoute(t, c, netlink.RouteAdd, "10.244.2.2/32") },
		func(t *testing.T, c *lab.Cluster) { mustRoute(t, c, netlink.RouteDel, "10.244.2.2/32") },
		"--to shop/there", "10.244.2.2:8080 cannot be reached: route to 10.244.2.2: no route to host",
	},
	{
		"the device of the pod is down",
		func(t *testing.T, c *lab.Cluster) { lab.Must(t, c.Nodes[0].SetDown("pod0")) },
		func(t *testing.T, c *lab.Cluster) { lab.Must(t, c.Nodes[0].SetUp("pod0")) },
		"--to here.shop.svc", "10.244.1.2:8080 cannot be reached: pod0, which leads to its pod, is down",
	},
	{
		"forwarding is off",
		func(t *testing.T, c *lab.Cluster) { lab.Must(t, c.Nodes[0].Sysctl("net/ipv4/ip_forward", "0")) },
		func(t *testing.T, c *lab.Cluster) { lab.Must(t, c.Nodes[0].Sysctl("net/ipv4/ip_forward", "1")) },
		"--from 192.168.50.2 --to 192.168.50.1:30081/TCP", "net.ipv4.ip_forward is 0: what arrives by eth0 is not forwarded",
	},
	{
		"forwarding is off for a device",
		func(t *testing.T, c *lab.Cluster) {
			lab.Must(t, c.Nodes[0].Sysctl("net/ipv4/conf/eth0/forwarding", "0"))
		},
		func(t *testing.T, c *lab.Cluster) {
			lab.Must(t, c.Nodes[0].Sysctl("net/ipv4/conf/eth0/forwarding", "1"))
		},
		"--from 192.168.50.2:40000 --to 192.168.50.1:30081", "net.ipv4.conf.eth0.forwarding is 0: what arrives by eth0 is not forwarded",
	},
	{
		"a firewall drops what is forwarded",
		mustFilter(`chain FORWARD { type filter hook forward priority filter; policy drop; }`), mustFilter(""),
		"--from 192.168.50.2 --to 192.168.50.1:30081", "a firewall drops it: nftables ip firewall FORWARD by its policy drops packets",
	},
	{
		"a firewall accepts only other connections",
		mustFilter(`chain FORWARD { type filter hook forward priority filter; policy drop; ct state established,related accept; tcp dport 443 accept; ip daddr 10.96.0.0/12 accept; }`), mustFilter(""),
		"--from 192.168.50.2 --to 192.168.50.1:30081", "a firewall drops it: nftables ip firewall FORWARD by its policy drops packets",
	},
	{
		"a firewall may accept it, by a condition that is not read",
		mustFilter(`chain FORWARD { type filter hook forward priority filter; policy drop; meta mark and 0x4000 == 0x4000 accept; }`), mustFilter(""),
		"--from 192.168.50.2 --to 192.168.50.1:30081", "a firewall may drop it: nftables ip firewall FORWARD by its policy drops packets, unless a rule before accepts it, whose conditions were not read in full: nftables ip firewall FORWARD accepts packets",
	},
	{
		"a firewall drops what comes to the node",
		mustFilter(`chain INPUT { type filter hook input priority filter; tcp dport 8080 drop; }`), mustFilter(""),
		"--from 192.168.50.2 --to 192.168.50.1:30086", "a firewall drops it: nftables ip firewall INPUT drops packets to ports 8080",
	},
	{
		"a firewall drops what the node sends",
		mustFilter(`chain OUTPUT { type filter hook output priority filter; ip daddr 10.244.2.0/24 reject; }`), mustFilter(""),
		"--to svc/there:http", "a firewall drops it: nftables ip firewall OUTPUT rejects packets to 10.244.2.0/24",
	},
	{
		"the endpoints' port has another name", nil, nil,
		"--to 10.96.1.3:80/tcp", "no usable endpoint: 1 of an EndpointSlice without the port http/TCP: it has web/TCP 8080",
	},
	{
		"the endpoints are not ready", nil, nil,
		"--to unready.shop.svc.cluster.local:80", "Service shop/unready:http has no usable endpoint: 1 not ready",
	},
	{
		"the endpoints are on other nodes, and the policy is Local", nil, nil,
		"--from 192.168.50.2 --to 192.168.50.1:30085", "traffic policy Local, and no usable endpoint on this node: 1 other node (traffic policy Local)",
	},
	{
		"a node port is dialled at another address of the node", nil, nil,
		"--to 10.244.1.1:30081", "30081/TCP is a node port of Service shop/here:http, and node ports do not answer at 10.244.1.1 but at 192.168.50.1 (nodePortAddresses)",
	},
	{
		"a health check node port is dialled at another address of the node", nil, nil,
		"--to 10.244.1.1:30999", "30999 is the health check node port of Service shop/local, and the agent does not answer at 10.244.1.1 but at 192.168.50.1 (nodePortAddresses)",
	},
	{
		"a health check node port is dialled, which is no Service's", nil, nil,
		"--from 192.168.50.2 --to 192.168.50.1:30999", "192.168.50.1:30999/TCP is the health check node port of Service shop/local, where the agent itself answers load balancers",
	},
	{
		"the next hop does not answer",
		func(t *testing.T, c *lab.Cluster) {
			mustHere(t, c, func() error {
				link, err := netlink.LinkByName("eth0")
				if err != nil {
					return err
				}

				return netlink.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, IP: net.IPv4(192, 168, 50, 99), State: netlink.NUD_FAILED})
			})
		}, nil,
		"--to shop/silent:80/TCP", "192.168.50.99:8080 cannot be reached: the next hop does not answer (neighbour failed on eth0)",
	},
	{
		"a pod opts out, and no program is at its device", nil, nil,
		"--from 10.244.1.3 --to shop/apart", "no program of Sluice is attached to pod1, and sockets are left alone: its Service has opted out of translation at sockets",
	},
	{
		"a mesh redirects what the pod sends",
		func(t *testing.T, c *lab.Cluster) {
			lab.Must(t, c.Nodes[0].Pods[0].Netfilter("table ip nat { chain ISTIO_OUTPUT { tcp dport 1-65535 counter redirect to :15001; }; chain OUTPUT { type nat hook output priority -100; jump ISTIO_OUTPUT; }; }"))
		}, nil,
		"--from 10.244.1.2 --to shop/there", "a mesh redirects what the pod sends (nftables ip nat ISTIO_OUTPUT), and its proxy gets the endpoint's address instead of the Service's",
	},
}

func mustHere(t *testing.T, c *lab.Cluster, do func() error) {
	t.Helper()
	lab.Must(t, c.Nodes[0].Do(do))
}

// mustRoute adds or removes a route by which a destination is unreachable.
func mustRoute(t *testing.T, c *lab.Cluster, change func(*netlink.Route) error, to string) {
	t.Helper()
	prefix := netip.MustParsePrefix(to)
	mustHere(t, c, func() error {
		return change(&netlink.Route{Dst: &net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), 32)}, Type: 7}) // RTN_UNREACHABLE
	})
}

// mustFilter returns what gives the node a firewall of one chain, or none.
func mustFilter(chain string) func(t *testing.T, c *lab.Cluster) {
	return func(t *testing.T, c *lab.Cluster) {
		t.Helper()
		rules := "table ip firewall; delete table ip firewall;"
		if chain != "" {
			rules += "table ip firewall { " + chain + "; }"
		}
		lab.Must(t, c.Nodes[0].Netfilter(rules))
	}
}

// On each broken node, sluice explain leads to the cause in its first three lines, and docs/troubleshoot.md shows it.
func TestBrokenWorlds(t *testing.T) {
	c := lab.MustNew(t, lab.Config{Nodes: 2, PodsPerNode: 2})
	node, err := sluice.NewNode(sluice.Config{
		Binary: sluice.MustBinary(t), Namespace: c.Nodes[0].Namespace,
		Cgroup: lab.MustCgroup(t, "e2e"), NodeName: "node-1", Manifests: "testdata/broken",
		Args: []string{"--exclude-devices=pod1", "--nodeport-addresses=primary"},
	})
	lab.Must(t, err)
	t.Cleanup(func() { node.Close() })
	lab.Must(t, node.Start())
	lab.Must(t, node.WaitSynced(t.Context()))
	lab.Eventually(t, "the devices are attached", func() bool {
		s, err := node.Status()

		return err == nil && s.Well()
	})

	rows := "| on the node | `sluice explain` | says |\n|---|---|---|\n"
	for _, world := range brokenWorlds {
		t.Run("it is told that "+world.name, func(t *testing.T) {
			if world.breakIt != nil {
				if clean := firstLines(t, node, world.question); strings.Contains(clean, world.says) {
					t.Errorf("before it is broken, it says\n%s", clean)
				}
				world.breakIt(t, c)
			}
			if world.mend != nil {
				defer world.mend(t, c)
			}
			if got := firstLines(t, node, world.question); !strings.Contains(got, world.says) {
				t.Errorf("sluice explain %s says\n%s, want %q", world.question, got, world.says)
			}
		})
		rows += fmt.Sprintf("| %s | `%s` | %s |\n", world.name, world.question, world.says)
	}
	page, err := os.ReadFile(troubleshootPage)
	lab.Must(t, err)
	before, rest, found := strings.Cut(string(page), tableBegins)
	shown, after, ended := strings.Cut(rest, tableEnds)
	if !found || !ended {
		t.Fatalf("%s has no table of broken nodes", troubleshootPage)
	}
	if *update {
		lab.Must(t, os.WriteFile(troubleshootPage, []byte(before+tableBegins+rows+tableEnds+after), 0o600))
	} else if shown != rows {
		t.Errorf("%s shows\n%swant\n%s", troubleshootPage, shown, rows)
	}
}

// firstLines returns the first three lines of an explanation.
func firstLines(t *testing.T, node *sluice.Node, question string) string {
	t.Helper()
	var out bytes.Buffer
	if err := node.Exec(&out, &out, append([]string{"explain"}, strings.Fields(question)...)...); err != nil {
		t.Fatalf("sluice explain %s: %v\n%s", question, err, &out)
	}
	lines := strings.SplitN(out.String(), "\n", 4)

	return strings.Join(lines[:min(3, len(lines))], "\n")
}
