package lab

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func currentNetns(t testing.TB) string {
	t.Helper()
	name, err := os.Readlink("/proc/thread-self/ns/net")
	Must(t, err)

	return name
}

func TestNamespaceDo(t *testing.T) {
	outer, inner := MustNamespace(t, "outer"), MustNamespace(t, "inner")
	home := currentNetns(t)

	t.Run("inside, and back after it", func(t *testing.T) {
		var inside string
		MustDo(t, outer, func() error {
			inside = currentNetns(t)
			return nil
		})
		if inside == home || currentNetns(t) != home {
			t.Errorf("inside it was %s, then %s; home is %s", inside, currentNetns(t), home)
		}
	})
	t.Run("nested", func(t *testing.T) {
		var before, within, after string
		MustDo(t, outer, func() error {
			before = currentNetns(t)
			err := inner.Do(func() error {
				within = currentNetns(t)
				return nil
			})
			after = currentNetns(t)
			return err
		})
		if before != after || within == before || within == home {
			t.Errorf("it was %s, %s, %s; home is %s", before, within, after, home)
		}
	})
	t.Run("back after a panic", func(t *testing.T) {
		func() {
			defer func() { _ = recover() }()
			MustDo(t, outer, func() error { panic("in the namespace") })
		}()
		if currentNetns(t) != home {
			t.Errorf("it is in %s, home is %s", currentNetns(t), home)
		}
	})
	t.Run("handing the error on", func(t *testing.T) {
		if err := outer.Do(func() error { return fs.ErrInvalid }); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("error is %v, want ErrInvalid", err)
		}
	})
}

func TestNamespaceCookie(t *testing.T) {
	one, other := MustNamespace(t, "one"), MustNamespace(t, "other")
	first, err := one.Cookie()
	if Errno(err) == unix.ENOPROTOOPT {
		t.Skip("the kernel does not report it: Linux 5.14 does")
	}
	Must(t, err)
	second, err := other.Cookie()
	Must(t, err)
	if first == 0 || first == second {
		t.Errorf("cookies are %d and %d", first, second)
	}
}

func TestNamespaceListensAndDials(t *testing.T) {
	ns := MustNamespace(t, "dial")
	listener, err := ns.Listen("tcp", "127.0.0.1:8080")
	Must(t, err)
	defer listener.Close()

	conn, err := ns.Dial("tcp", "127.0.0.1:8080", time.Second)
	Must(t, err)
	defer conn.Close()
	if elsewhere, err := MustNamespace(t, "elsewhere").Dial("tcp", "127.0.0.1:8080", time.Second); err == nil {
		elsewhere.Close()
		t.Error("the listener is reached from another namespace")
	}
}

func TestNamespaceHasUsableAddressesAtOnce(t *testing.T) {
	a, b := MustNamespace(t, "a"), MustNamespace(t, "b")
	MustVeth(t,
		End{Namespace: a, Device: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("fd00::1/64")}},
		End{Namespace: b, Device: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("fd00::2/64")}},
	)
	MustServe(t, b, "b", "[fd00::2]:80")
	caller := MustCaller(t, a, nil)

	if _, err := caller.Request("tcp", "[fd00::2]:80"); err != nil {
		t.Error(err)
	}
	if err := b.RemoveAddress("eth0", netip.MustParsePrefix("fd00::2/64")); err != nil {
		t.Error(err)
	}
}

// Behind a bridge, too, whose port has the number that its peer has in the other namespace. What
// is asked first gets an answer: hosts do not ask again as long as the test waits.
func TestPortOfABridgeForwardsAtOnce(t *testing.T) {
	for range 10 {
		if !t.Failed() {
			testPortForwards(t)
		}
	}
}

func testPortForwards(t *testing.T) {
	segment, host, server := MustNamespace(t, "segment"), MustNamespace(t, "host"), MustNamespace(t, "server")
	Must(t, segment.AddBridge("br0"), host.AddBridge("other"))
	MustVeth(t,
		End{Namespace: host, Device: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("198.18.0.1/24"), netip.MustParsePrefix("fd00::1/64")}},
		End{Namespace: segment, Device: "host", Bridge: "br0"},
	)
	MustVeth(t,
		End{Namespace: server, Device: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("198.18.0.2/24"), netip.MustParsePrefix("fd00::2/64")}},
		End{Namespace: segment, Device: "server", Bridge: "br0"},
	)
	for _, ns := range []*Namespace{host, server} {
		Must(t, ns.Sysctl("net/ipv4/neigh/eth0/retrans_time_ms", "60000"), ns.Sysctl("net/ipv6/neigh/eth0/retrans_time_ms", "60000"))
	}
	port, err := segment.Netlink().LinkByName("host")
	Must(t, err)
	if attrs := port.Attrs(); attrs.Index != attrs.ParentIndex {
		t.Errorf("the numbers are %d and %d, and this test is about equal ones", attrs.Index, attrs.ParentIndex)
	}
	MustServe(t, server, "server", "198.18.0.2:80", "[fd00::2]:80")
	caller := MustCaller(t, host, nil)

	for _, address := range []string{"198.18.0.2:80", "[fd00::2]:80"} {
		if _, err := caller.Exchange(Exchange{Network: "udp", Address: address, Timeout: 10 * time.Second}); err != nil {
			t.Errorf("%s: %v", address, err)
		}
	}
}

func TestNamespaceIsGoneAfterClose(t *testing.T) {
	ns := MustNamespace(t, "short")
	Must(t, ns.Close())
	if _, err := os.Stat(ns.Path()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s: %v, want no such file", ns.Path(), err)
	}
	if err := ns.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
}

func TestNetfilterCounts(t *testing.T) {
	p := mustPair(t)
	err := p.ns.Netfilter(`
		table inet test {
			counter asked {}
			counter other {}
			chain input {
				type filter hook input priority filter
				udp dport 8080 counter name asked
				udp dport 9 counter name other drop
			}
		}`)
	Must(t, err)
	for range 3 {
		if _, err := p.caller.Request("udp", "127.0.0.1:8080"); err != nil {
			t.Fatal(err)
		}
	}
	counters, err := p.ns.NetfilterCounters()
	if err != nil || len(counters) != 2 || counters["asked"] != 3 || counters["other"] != 0 {
		t.Errorf("counters are %v, %v, want 3 asked, 0 other", counters, err)
	}
}

func TestNetfilterRefusesNonsense(t *testing.T) {
	if err := MustNamespace(t, "nonsense").Netfilter("table"); err == nil {
		t.Error("no error from half a word")
	}
}
