package kubeproxy

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// Who has a port is known by what it answers, wherever it listens.
func TestListens(t *testing.T) {
	pages := func(pages map[string]string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			page, has := pages[r.URL.Path]
			if !has {
				http.NotFound(w, r)

				return
			}
			if r.URL.Path == "/healthz" && len(page) > 2 {
				w.WriteHeader(http.StatusServiceUnavailable) // while it does not program
			}
			fmt.Fprint(w, page)
		})
	}
	metrics := pages(map[string]string{"/proxyMode": "iptables", "/healthz": "ok"})
	health := pages(map[string]string{"/healthz": `{"lastUpdated": "2026-01-01 00:00:00 +0000 UTC","currentTime": "2026-01-01 00:10:00 +0000 UTC", "nodeEligible": true}`})
	for _, test := range []struct {
		name string
		at   []string // where the program listens
		with http.Handler
		want bool
	}{
		{"kube-proxy's metrics", []string{"127.0.0.1:10249"}, metrics, true},
		{"kube-proxy's metrics at all addresses", []string{"0.0.0.0:10249"}, metrics, true},
		{"kube-proxy's metrics at another address", []string{"10.9.8.7:10249"}, metrics, true},
		{"kube-proxy's health checks at IPv6", []string{"[::]:10249"}, health, true},
		{"another server", []string{"127.0.0.1:10249"}, pages(map[string]string{"/healthz": "ok"}), false},
		{"another server with pages of both names", []string{"127.0.0.1:10249"}, pages(map[string]string{"/healthz": `{"status": "ok"}`, "/proxyMode": "socks"}), false},
		{"a program that answers nothing", []string{"127.0.0.1:10249"}, nil, false},
		{"no program", nil, nil, false},
		{"a program at another port", []string{"127.0.0.1:10250"}, metrics, false},
	} {
		t.Run("it is "+test.name, func(t *testing.T) {
			ns := lab.MustNamespace(t, "listens")
			lab.Must(t, ns.AddAddress("lo", netip.MustParsePrefix("10.9.8.7/32")))
			for _, at := range test.at {
				listener, err := ns.Listen("tcp", at)
				lab.Must(t, err)
				t.Cleanup(func() { listener.Close() })
				if test.with != nil {
					go func() { _ = http.Serve(listener, test.with) }() //nolint:gosec // of the test
				}
			}
			lab.MustDo(t, ns, func() error {
				got, err := Listens(netip.MustParseAddrPort("0.0.0.0:10249"))
				if got != test.want {
					t.Errorf("got %v, want %v", got, test.want)
				}

				return err
			})
		})
	}
}

// Who listens is asked every few seconds while a port is taken, on nodes with many connections: the kernel hands out those
// that listen at the port, and no connection.
func TestListensReadsNoConnections(t *testing.T) {
	ns := lab.MustNamespace(t, "listens")
	listener, err := ns.Listen("tcp", "127.0.0.1:10249")
	lab.Must(t, err)
	t.Cleanup(func() { listener.Close() })
	const connections = 300
	lab.MustDo(t, ns, func() error {
		for range connections {
			conn, err := net.Dial("tcp", "127.0.0.1:10249")
			if err != nil {
				return err
			}
			t.Cleanup(func() { conn.Close() })
			accepted, err := listener.Accept()
			if err != nil {
				return err
			}
			t.Cleanup(func() { accepted.Close() })
		}
		for _, address := range []string{"127.0.0.1", "0.0.0.0", "127.0.0.2", "::1"} {
			at := netip.AddrPortFrom(netip.MustParseAddr(address), 10249)
			holders, err := listenersAt(at)
			if err != nil {
				return err
			}
			if want := address == "127.0.0.1" || address == "0.0.0.0"; len(holders) > 0 != want {
				t.Errorf("what has %s: %v", at, holders)
			}
		}
		if allocated := testing.AllocsPerRun(5, func() { _, err = listenersAt(netip.MustParseAddrPort("0.0.0.0:10249")) }); allocated > connections/3 {
			t.Errorf("with %d connections it allocates %.0f times", connections, allocated)
		}

		return err
	})
}
