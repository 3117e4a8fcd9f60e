package lab

import (
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestClusterReaches(t *testing.T) {
	for _, test := range []struct {
		name   string
		config Config
	}{
		{"bridged", Config{}},
		{"routed", Config{Attachment: Routed}},
		{"point to point", Config{Attachment: PointToPoint}},
		{"bridged, with an overlay", Config{OverlayMTU: 1450, SecondUplink: true}},
		{"routed, with an overlay", Config{Attachment: Routed, OverlayMTU: 1300, PodMTU: 1400}},
	} {
		t.Run(test.name, func(t *testing.T) {
			config := test.config
			config.Nodes, config.PodsPerNode, config.Client = 2, 2, true
			cluster := MustNew(t, config)
			for _, node := range cluster.Nodes {
				Must(t, node.Sysctl("net/ipv4/conf/all/rp_filter", "1"))
			}
			testReach(t, cluster)
		})
	}
}

// The worlds themselves work, so that a test that fails in one of them has found something.
func TestProfilesReach(t *testing.T) {
	for _, profile := range Profiles {
		t.Run(profile.Name, func(t *testing.T) {
			testReach(t, MustNew(t, Config{Nodes: 2, PodsPerNode: 2, Client: true, Profile: profile.Name}))
		})
	}
}

// Some package's tests play each profile, or a test of its own.
func TestEachProfileIsPlayed(t *testing.T) {
	played := make(map[string]bool)
	named := regexp.MustCompile(`(?:UseProfile\(|\bProfile: )"([a-z-]+)"`)
	Must(t, filepath.WalkDir("..", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, match := range named.FindAllSubmatch(text, -1) {
			played[string(match[1])] = true
		}

		return err
	}))
	for _, profile := range Profiles {
		if !played[profile.Name] {
			t.Errorf("no tests play %s", profile.Name)
		}
	}
}

func TestUnknownProfile(t *testing.T) {
	if _, err := New(Config{Profile: "no-such"}); err == nil || !strings.Contains(err.Error(), "no-such") {
		t.Errorf("%v, want an error that names it", err)
	}
}

// testReach checks that every host and pod can talk to every other.
func testReach(t *testing.T, cluster *Cluster) {
	first, second := cluster.Nodes[0], cluster.Nodes[1]
	for _, pod := range cluster.Pods() {
		MustServe(t, pod.Namespace, pod.Name, pod.At(8080)...)
	}
	for _, node := range cluster.Nodes {
		MustServe(t, node.Namespace, node.Name, node.At(8080)...)
	}
	sources := []netip.Addr{first.IPv4, first.IPv6}
	if cluster.config.OverlayMTU != 0 {
		sources = first.OverlayIPs()
	}
	seconds := []netip.Addr{first.SecondIPv4, first.SecondIPv6}

	for _, test := range []struct {
		name   string
		from   *Namespace
		to     []string
		server string
		client []netip.Addr
	}{
		{"a pod on the same node", first.Pods[0].Namespace, first.Pods[1].At(8080), "pod-1-1", []netip.Addr{first.Pods[0].IPv4, first.Pods[0].IPv6}},
		{"a pod on another node", first.Pods[0].Namespace, second.Pods[1].At(8080), "pod-2-1", []netip.Addr{first.Pods[0].IPv4, first.Pods[0].IPv6}},
		{"itself", first.Pods[0].Namespace, first.Pods[0].At(8080), "pod-1-0", []netip.Addr{first.Pods[0].IPv4, first.Pods[0].IPv6}},
		{"its node", first.Pods[0].Namespace, first.At(8080), "node-1", []netip.Addr{first.Pods[0].IPv4, first.Pods[0].IPv6}},
		{"another node", first.Namespace, second.At(8080), "node-2", []netip.Addr{first.IPv4, first.IPv6}},
		{"a pod from another node", first.Namespace, second.Pods[1].At(8080), "pod-2-1", sources},
		{"a node from outside", cluster.Client.Namespace, second.At(8080), "node-2", []netip.Addr{cluster.Client.IPv4, cluster.Client.IPv6}},
	} {
		t.Run(test.name, func(t *testing.T) {
			caller := MustCaller(t, test.from, nil)
			for i, address := range test.to {
				for _, network := range []string{"tcp", "udp"} {
					reply, err := caller.Request(network, address)
					if err != nil {
						t.Fatalf("%s %s: %v", network, address, err)
					}
					answer, err := ParseAnswer(reply.Text)
					Must(t, err)
					if cluster.Profile.SecondUplink && answer.Client.Addr() == seconds[i] {
						continue // the node's, by its other uplink
					}
					if answer.Name != test.server || answer.Client.Addr() != test.client[i] {
						t.Errorf("%s %s: %s, want %s and %s", network, address, answer, test.server, test.client[i])
					}
				}
			}
		})
	}
}

func TestClusterDropsWithoutRoute(t *testing.T) {
	cluster := MustNew(t, Config{Nodes: 1, PodsPerNode: 1})
	caller := MustCaller(t, cluster.Nodes[0].Pods[0].Namespace, nil)

	for _, address := range []string{"10.96.0.1:80", "[fd00:96::1]:80"} {
		_, err := caller.Exchange(Exchange{Network: "tcp", Address: address, Timeout: 50 * time.Millisecond})
		if Errno(err) != unix.ETIMEDOUT {
			t.Errorf("%s: %v, want ETIMEDOUT", address, err)
		}
	}
}

func TestPodIsRemoved(t *testing.T) {
	cluster := MustNew(t, Config{Nodes: 1, PodsPerNode: 1})
	node := cluster.Nodes[0]
	pod, err := node.AddPod()
	Must(t, err)
	if pod.IPv4 != netip.MustParseAddr("10.244.1.3") || len(node.Pods) != 2 {
		t.Errorf("second of %d pods has %s", len(node.Pods), pod.IPv4)
	}
	Must(t, pod.Close())
	if _, err := node.Netlink().LinkByName(pod.Device); err == nil {
		t.Errorf("device %s is still there", pod.Device)
	}
	if len(node.Pods) != 1 {
		t.Errorf("%d pods left, want 1", len(node.Pods))
	}
}

// Addresses are used again, but those of a pod that has just gone come last.
func TestPodNumbersWrapAround(t *testing.T) {
	cluster := MustNew(t, Config{Nodes: 1, PodsPerNode: 2})
	node := cluster.Nodes[0]
	node.nextNumber = maxPods - 1
	Must(t, node.Pods[0].Close())
	for _, want := range []string{"pod-1-199", "pod-1-0", "pod-1-2"} { // pod-1-1 is there
		pod, err := node.AddPod()
		Must(t, err)
		if pod.Name != want {
			t.Errorf("the next pod is %s, want %s", pod.Name, want)
		}
	}
}

func BenchmarkCluster(b *testing.B) {
	for b.Loop() {
		Must(b, MustNew(b, Config{Nodes: 2, PodsPerNode: 3, Client: true}).Close())
	}
}

func TestMain(m *testing.M) {
	Main()
	os.Exit(m.Run())
}
