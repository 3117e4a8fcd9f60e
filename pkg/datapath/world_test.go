package datapath

import (
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/test/lab"
)

// world is a node with a client pod and three pods that answer, and a Datapath
// on the cgroup in which the test starts its clients. Only the test writes into the
// maps.
//
//	node 192.168.50.1 ─┬─ client  10.244.1.2
//	                   ├─ red     10.244.1.3:8080
//	                   ├─ green   10.244.1.4:8080
//	                   └─ blue    10.244.1.5:8080
//
// IPv6: fd00:50::1, fd00:10:244:1::2 and so on.
type world struct {
	*Datapath
	cfg     Config
	cgroup  *lab.Cgroup
	node    *lab.Node
	client  *lab.Pod
	answers []*lab.Pod // red, green, blue
	servers []*lab.Server

	writer *mapstest.Writer // see hand

	balanced int // how many services balance has published
}

var colours = []string{"red", "green", "blue"}

const serverPort = 8080

// smallMaps are sizes that make a world cheap.
func smallMaps() map[string]uint32 {
	return map[string]uint32{
		maps.NameFrontendIDs: 4096,
		maps.NameAffinity:    4096, maps.NameUDPPins: 32768,
		maps.NameFlows: 8192, maps.NameHalfOpen: 1024, maps.NameFragments: 1024, maps.NameICMPBudgets: 1024,
	}
}

// newWorld makes a world with the programs attached. The options change its
// configuration.
func newWorld(t testing.TB, options ...func(*Config)) *world {
	t.Helper()

	return newWorldBy(t, lab.Bridged, options...)
}

// newWorldBy is newWorld with pods that are attached to their node in a way.
func newWorldBy(t testing.TB, attachment lab.Attachment, options ...func(*Config)) *world {
	t.Helper()
	w := buildWorldBy(t, attachment, options...)
	w.Datapath = w.mustOpen(t, w.cfg)
	lab.Must(t, w.Maps().Devices.Put(maps.DeviceOfNode, maps.Device{SourceV4: maps.AddrOf(w.node.IPv4), SourceV6: maps.AddrOf(w.node.IPv6)}))
	w.mustAttach(t)

	return w
}

// newOldWorld is a world on a kernel on which hooks cannot choose their error.
func newOldWorld(t testing.TB) *world {
	t.Helper()
	w := buildWorld(t)
	lab.MustDo(t, w.node.Namespace, func() error {
		features, err := ProbeFeatures()
		if err != nil {
			return err
		}
		features.SetRetval = false
		w.Datapath, err = open(w.cfg, features)

		return err
	})
	t.Cleanup(func() { w.Datapath.Close() })
	w.mustAttach(t)

	return w
}

// buildWorld makes everything but the Datapath.
func buildWorld(t testing.TB, options ...func(*Config)) *world {
	t.Helper()

	return buildWorldBy(t, lab.Bridged, options...)
}

// buildWorldBy is buildWorld with pods that are attached to their node in a way.
func buildWorldBy(t testing.TB, attachment lab.Attachment, options ...func(*Config)) *world {
	t.Helper()
	w := &world{cgroup: lab.MustCgroup(t, "datapath")}
	w.cfg = Config{
		Handshakes: true,
		CgroupRoot: w.cgroup.Path(),
		BPFRoot:    lab.MustBPFRoot(t),
		UDP:        bpf.UDPAll,
		Capacities: smallMaps(),
	}
	for _, option := range options {
		option(&w.cfg)
	}
	t.Cleanup(func() { lab.Must(t, Remove(w.cfg.BPFRoot)) })
	w.node = lab.MustNew(t, lab.Config{Nodes: 1, PodsPerNode: 1 + len(colours), Attachment: attachment}).Nodes[0]
	w.client, w.answers = w.node.Pods[0], w.node.Pods[1:]
	for i, colour := range colours {
		pod := w.answers[i]
		w.servers = append(w.servers, lab.MustServe(t, pod.Namespace, colour, pod.At(serverPort)...))
	}

	return w
}

// mustOpen opens a Datapath as the agent of the node does.
func (w *world) mustOpen(t testing.TB, cfg Config) *Datapath {
	t.Helper()
	var d *Datapath
	lab.MustDo(t, w.node.Namespace, func() (err error) {
		d, err = Open(cfg)

		return err
	})
	t.Cleanup(func() { d.Close() })

	return d
}

func (w *world) mustAttach(t testing.TB) {
	t.Helper()
	if err := w.Attach(); err != nil {
		t.Fatalf("attach: %v", err)
	}
}

// mustCookie returns the cookie of a namespace. Without cookies no namespace of
// the lab can be the node's: the test is skipped.
func mustCookie(t testing.TB, ns *lab.Namespace) uint64 {
	t.Helper()
	cookie, err := ns.Cookie()
	if errors.Is(err, unix.ENOPROTOOPT) {
		t.Skip("this kernel has no cookies of network namespaces (Linux 5.14)")
	}
	lab.Must(t, err)

	return cookie
}

// v4 and v6 are the addresses at which a colour answers.
func (w *world) v4(colour int) string {
	return netip.AddrPortFrom(w.answers[colour].IPv4, serverPort).String()
}

func (w *world) v6(colour int) string {
	return netip.AddrPortFrom(w.answers[colour].IPv6, serverPort).String()
}

// all4 and all6 are the addresses of all colours.
func (w *world) all4() []string { return []string{w.v4(0), w.v4(1), w.v4(2)} }
func (w *world) all6() []string { return []string{w.v6(0), w.v6(1), w.v6(2)} }

// pod starts a client in the client pod, host one on the node.
func (w *world) pod(t testing.TB) *lab.Caller {
	t.Helper()

	return lab.MustCaller(t, w.client.Namespace, w.cgroup)
}

func (w *world) host(t testing.TB) *lab.Caller {
	t.Helper()

	return lab.MustCaller(t, w.node.Namespace, w.cgroup)
}

// needsNode skips a test that is about the node's own namespace where that can
// only be the kernel's first one.
func (w *world) needsNode(t testing.TB) {
	t.Helper()
	mustCookie(t, w.node.Namespace)
}

// needsErrors skips a test where hooks cannot choose the error of a call.
func (w *world) needsErrors(t testing.TB) {
	t.Helper()
	if !w.Features().SetRetval {
		t.Skip("this kernel lets no hook choose its error (Linux 6.1): see TestRefusalsOfOldKernels")
	}
}

// counted returns how often each reason was given while f ran.
func (w *world) counted(t testing.TB, f func()) map[maps.Reason]uint64 {
	t.Helper()
	before, err := w.Maps().ReasonCounts()
	lab.Must(t, err)
	f()
	after, err := w.Maps().ReasonCounts()
	lab.Must(t, err)
	delta := make(map[maps.Reason]uint64)
	for reason, n := range after {
		if n != before[reason] {
			delta[reason] = n - before[reason]
		}
	}

	return delta
}
