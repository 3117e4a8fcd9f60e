package agent

import (
	"bytes"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
)

var (
	primary   = netip.MustParseAddr("10.1.1.1")
	secondary = netip.MustParseAddr("10.1.2.1")
	loopback  = netip.MustParseAddr("127.0.0.1")
)

func local() []node.Address {
	return []node.Address{
		{Addr: primary, IfIndex: 2}, {Addr: secondary, IfIndex: 3},
		{Addr: loopback, IfIndex: 1, IsLoopback: true},
	}
}

func told(addrs ...netip.Addr) kube.Node {
	return kube.Node{Node: lb.Node{Name: "node-1", PrimaryIPs: addrs}, Exists: true}
}

// Node ports must neither be lost nor answer on too many addresses because
// something is not known yet.
func TestNodeAddrs(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(*model)
		want []netip.Addr // nil: too early to tell
	}{
		{"too early without local addresses", func(m *model) { m.setNode(told(primary)) }, nil},
		{"too early before the Node is told", func(m *model) { m.setLocalAddrs(local()) }, nil},
		{"too early before the Node has addresses", func(m *model) {
			m.setLocalAddrs(local())
			m.setNode(told())
			m.nodeTold()
		}, nil},
		{"the primary address", func(m *model) {
			m.setLocalAddrs(local())
			m.setNode(told(primary))
		}, []netip.Addr{primary}},
		{"the primary address still when the Node is gone", func(m *model) {
			m.setLocalAddrs(local())
			m.setNode(told(primary))
			m.setNode(kube.Node{Node: lb.Node{Name: "node-1"}})
			m.nodeTold()
		}, []netip.Addr{primary}},
		{"every address if there is no Node", func(m *model) {
			m.setLocalAddrs(local())
			m.nodeTold()
		}, []netip.Addr{primary, secondary}},
		{"every address when waiting is over", func(m *model) {
			m.setLocalAddrs(local())
			m.setNode(told())
			m.stopWaiting()
		}, []netip.Addr{primary, secondary}},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := newModel(Config{NodeName: "node-1", Log: slog.New(slog.DiscardHandler)})
			test.do(m)
			addrs, ok := m.newNodeAddrs()
			if ok != (test.want != nil) {
				t.Fatalf("known is %t, want %t", ok, test.want != nil)
			}
			for _, addr := range []netip.Addr{primary, secondary, loopback} {
				have := addrs[addr].Flags&maps.AddrNodePort != 0
				want := false
				for _, a := range test.want {
					want = want || a == addr
				}
				if have != want {
					t.Errorf("node ports answer on %s: %t, want %t", addr, have, want)
				}
			}
			if _, again := m.newNodeAddrs(); again {
				t.Error("unchanged addresses count as new")
			}
		})
	}
}

func TestReportLogsWhatIsNew(t *testing.T) {
	var log bytes.Buffer
	m := newModel(Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	bad := lb.Problem{Object: "Service ns/web", Field: "spec.externalIPs[0]", Message: "not an address"}
	m.report("Service ns/web", []lb.Problem{bad})
	m.report("Service ns/web", []lb.Problem{bad})
	if n := strings.Count(log.String(), "spec.externalIPs[0]"); n != 1 {
		t.Errorf("logged %d times, want once", n)
	}
	if len(m.allProblems()) != 1 {
		t.Errorf("problems are %v, want one", m.allProblems())
	}
	m.report("Service ns/web", nil)
	if len(m.allProblems()) != 0 {
		t.Errorf("problems are %v, want none", m.allProblems())
	}
}

func TestMailboxKeepsOrder(t *testing.T) {
	box := newMailbox()
	var got [4][]int
	var posting sync.WaitGroup
	for who := range got {
		posting.Go(func() {
			for i := range 1000 {
				box.post(func(*model) { got[who] = append(got[who], i) })
			}
		})
	}
	go func() { posting.Wait(); close(box.ready) }()
	for range box.ready {
		for _, change := range box.take() {
			change(nil)
		}
	}
	for _, change := range box.take() {
		change(nil)
	}
	for who, numbers := range got {
		if len(numbers) != 1000 {
			t.Fatalf("poster %d: %d changes arrived, want 1000", who, len(numbers))
		}
		for i, n := range numbers {
			if i != n {
				t.Fatalf("poster %d: change %d arrived as number %d", who, n, i)
			}
		}
	}
}
