package metrics

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	abi "github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// Backends have series of their own up to the limit: first come, first served, while they exist.
func TestBackends(t *testing.T) {
	w := newWorld()
	w.add(4, "ns", "web", "http")
	w.add(5, "sluice.internal", "probe", "", 9)
	w.at(t, 2, 4, "10.0.0.2:80")
	w.at(t, 3, 4, "10.0.0.3:80")
	w.load(2, abi.BackendLoad{Sockets: 2, Flows: 1})
	registry := prometheus.NewRegistry()
	lab.Must(t, registry.Register(NewBackends(w.tables(), 2, func() uint64 { return w.moved })))
	active := func(when string, want map[string]float64) {
		t.Helper()
		w.moved++
		have := make(map[string]float64)
		for name, value := range gather(t, registry) {
			if of, ok := strings.CutPrefix(name, "sluice_backend_active_connections "); ok {
				have[of] = value
			}
		}
		expect(t, when, have, want)
	}
	const web2, web3, web1 = "backend=10.0.0.2:80 namespace=ns port=http service=web",
		"backend=10.0.0.3:80 namespace=ns port=http service=web", "backend=10.0.0.1:80 namespace=ns port=http service=web"
	active("at first", map[string]float64{web2: 3, web3: 0})

	w.at(t, 1, 4, "10.0.0.1:80")
	active("another one comes, in an earlier place", map[string]float64{web2: 3, web3: 0})
	lab.Must(t, w.Backends.Put(2, abi.Backend{}))
	active("one goes", map[string]float64{web1: 0, web3: 0})
	w.at(t, 7, 4, "10.0.0.3:80")
	w.load(7, abi.BackendLoad{Sockets: 5})
	active("it comes again in another place, before its old one is free", map[string]float64{web1: 0, web3: 5})
}

// at puts a backend of a service port at an address.
func (w *world) at(t *testing.T, id, servicePortID uint32, addr string) {
	t.Helper()
	b := abi.BackendOf(id, servicePortID, netip.MustParseAddrPort(addr), 0)
	lab.Must(t, w.Backends.Put(abi.Index(id), b))
}

// Without a limit above zero there are none.
func TestNoBackends(t *testing.T) {
	w := newWorld()
	w.add(1, "ns", "web", "http", 1)
	registry := prometheus.NewRegistry()
	lab.Must(t, registry.Register(NewBackends(w.tables(), 0, func() uint64 { return w.moved })))
	expect(t, "a scrape", gather(t, registry), map[string]float64{})
}
