package flows

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// addServers puts a server wherever a flow may end: where it is dialled, and at
// every target that the scenario has, so that also a wrong one answers.
func (w *world) addServers(s *scenario, f flow) error {
	protocol := strings.ToLower(string(f.Protocol))
	var errs []error
	for _, end := range append(s.targets(), f.dest()) {
		for _, ns := range w.owners(s, f, end.Addr()) {
			if ns == w.elsewhere {
				if err := ns.AddAddress("lo", single(end.Addr())); !errors.Is(err, unix.EEXIST) {
					errs = append(errs, err)
				}
			}
			at := protocol + "/" + end.String()
			if end.Port() != 0 && !slices.Contains(w.listeners[ns], at) {
				w.listeners[ns] = append(w.listeners[ns], at)
			}
		}
	}

	return errors.Join(errs...)
}

// owners are the namespaces that have an address, as a flow sees it. A pod that
// dials is in two places.
func (w *world) owners(s *scenario, f flow, addr netip.Addr) []*lab.Namespace {
	var owners []*lab.Namespace
	switch {
	case addr.IsUnspecified():
		return nil
	case addr.IsLoopback():
		for _, p := range s.paths(f) {
			owners = append(owners, w.start(f, p.from))
		}
		return owners
	case slices.Contains(w.addresses, addr):
		return append(owners, w.node)
	case slices.Contains(w.answering, addr):
		return append(owners, w.local)
	}
	if pod, dials := w.pods[addr]; dials {
		owners = append(owners, pod.to.Namespace)
	}
	if slices.Contains(w.dialling, addr) {
		owners = append(owners, w.clients)
	}
	if owners == nil {
		owners = append(owners, w.elsewhere)
	}

	return owners
}

// mustServe starts servers in a namespace, at places like "tcp/10.0.0.1:80". An
// echo request needs none: the kernel answers it.
func mustServe(t *testing.T, ns *lab.Namespace, at []string) {
	t.Helper()
	sockets := slices.DeleteFunc(slices.Clone(at), func(at string) bool { return !isOf(at, "tcp") && !isOf(at, "udp") })
	lab.MustServe(t, ns, "server", sockets...)
	for _, at := range at {
		if isOf(at, "sctp") {
			_, address, _ := strings.Cut(at, "/")
			mustServeSCTP(t, ns, netip.MustParseAddrPort(address))
		}
	}
}

func isOf(at, protocol string) bool { return strings.HasPrefix(at, protocol+"/") }
