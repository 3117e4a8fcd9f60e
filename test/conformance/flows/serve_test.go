package flows

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/test/lab"
)

// listener is where a server answers, at every address of its namespace.
type listener struct {
	protocol corev1.Protocol
	port     uint16
}

// addServers puts a server wherever a flow may end: at the address that clients dial, and at
// every target that the scenario has, so that also a wrong one answers.
func (w *world) addServers(s *scenario) error {
	protocols := map[corev1.Protocol]bool{}
	for _, f := range s.Flows {
		protocols[f.Protocol] = true
		if err := w.addServer(s, f.dest(), f.Protocol); err != nil {
			return err
		}
	}
	for _, target := range s.targets() {
		for protocol := range protocols {
			if err := w.addServer(s, target, protocol); err != nil {
				return err
			}
		}
	}

	return nil
}

// addServer puts a server at an end of flows of a protocol. Where no one has its
// address, elsewhere gets it.
func (w *world) addServer(s *scenario, end netip.AddrPort, protocol corev1.Protocol) error {
	owners := w.owners(s, end.Addr())
	if len(owners) == 0 && !end.Addr().IsUnspecified() && !end.Addr().IsLoopback() {
		owners = append(owners, w.elsewhere)
		if !w.others[end.Addr()] {
			w.others[end.Addr()] = true
			if err := w.elsewhere.AddAddress("lo", single(end.Addr())); err != nil {
				return err
			}
		}
	}
	for _, ns := range owners {
		if w.listeners[ns] == nil {
			w.listeners[ns] = map[listener]bool{}
		}
		if end.Port() != 0 {
			w.listeners[ns][listener{protocol, end.Port()}] = true
		}
	}

	return nil
}

// owners are the namespaces that have an address. A pod that dials is in two
// places, and a loopback address wherever a flow starts.
func (w *world) owners(s *scenario, addr netip.Addr) []*lab.Namespace {
	var owners []*lab.Namespace
	switch {
	case addr.IsLoopback():
		for _, f := range s.Flows {
			for _, p := range s.paths(f) {
				owners = append(owners, w.start(f, p.from))
			}
		}
		return owners
	case slices.Contains(w.addresses, addr):
		return append(owners, w.node)
	case w.answering[addr]:
		return append(owners, w.local)
	}
	if pod, dials := w.pods[addr]; dials {
		owners = append(owners, pod.to.Namespace)
	}
	if w.dialling[addr] {
		owners = append(owners, w.clients)
	}

	return owners
}

// mustServe starts servers in a namespace. An echo request needs none: the kernel
// answers it.
func mustServe(t *testing.T, ns *lab.Namespace, listeners map[listener]bool) {
	t.Helper()
	var sockets []string
	sctp := map[uint16]bool{}
	for l := range listeners {
		switch l.protocol {
		case corev1.ProtocolTCP, corev1.ProtocolUDP:
			sockets = append(sockets, fmt.Sprintf("%s/[::]:%d", strings.ToLower(string(l.protocol)), l.port))
		case corev1.ProtocolSCTP:
			sctp[l.port] = true
		}
	}
	lab.MustServe(t, ns, "server", sockets...)
	if len(sctp) > 0 {
		mustServeSCTP(t, ns, sctp)
	}
}
