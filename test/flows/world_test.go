package flows

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// world is where a scenario plays:
//
//	┌ node ─────────────────────────────┐
//	│ eth0: localIPs       pod0    pod1 │   forwards
//	└──┊────────────────────┊───────┊───┘
//	   ┊ eth0               ┊ eth0  ┊ eth0
//	 outside               pod 0   pod 1      one for each pod that dials
//	   lo: whatever else
//	       may be dialled
//
// An address belongs to the node, to a pod or, all others, to the outside: other
// nodes' pods, pods that only answer, and the virtual addresses themselves, so
// that what was not translated is answered, too, and tells where it went.
type world struct {
	node    *lab.Namespace
	outside *lab.Namespace
	local   map[netip.Addr]bool
	pods    map[netip.Addr]*lab.Namespace

	listeners map[*lab.Namespace][]string // as [lab.Serve] takes them
}

func mustWorld(t *testing.T, s *scenario) *world {
	t.Helper()
	w := &world{
		node:      lab.MustNamespace(t, "node"),
		outside:   lab.MustNamespace(t, "outside"),
		local:     map[netip.Addr]bool{},
		pods:      map[netip.Addr]*lab.Namespace{},
		listeners: map[*lab.Namespace][]string{},
	}
	err := errors.Join(
		w.node.Sysctl("net/ipv4/ip_forward", "1"),
		w.node.Sysctl("net/ipv6/conf/all/forwarding", "1"),
		w.addOutside(s),
	)
	for _, f := range s.driven() {
		if from, _ := s.sourceOf(f); from == fromPod && w.pods[f.SourceIP] == nil {
			w.pods[f.SourceIP] = lab.MustNamespace(t, "pod")
			err = errors.Join(err, w.attachPod(f.SourceIP, len(w.pods)-1))
		}
	}
	for _, f := range s.driven() {
		err = errors.Join(err, w.addServers(s, f))
	}
	if err != nil {
		t.Fatal(err)
	}
	for ns, at := range w.listeners {
		lab.MustServe(t, ns, "server", at...)
	}

	return w
}

// addOutside leads node and outside to each other.
func (w *world) addOutside(s *scenario) error {
	var local []netip.Prefix
	for _, ip := range s.Node.LocalIPs {
		if !w.local[ip] && !ip.IsLoopback() {
			local = append(local, single(ip))
		}
		w.local[ip] = true
	}
	node := lab.End{Namespace: w.node, Device: "eth0", Addresses: local}
	outside := lab.End{Namespace: w.outside, Device: "eth0"}
	if err := lab.Veth(node, outside); err != nil {
		return err
	}
	var routes []error
	for _, all := range everywhere {
		// What a process of the node sends has the node IP, unless it says otherwise.
		var preferred netip.Addr
		if ip := s.Node.PrimaryIP; w.local[ip] && ip.Is4() == all.Addr().Is4() {
			preferred = ip
		}
		routes = append(routes, lead(node, outside, all, preferred), lead(outside, node, all, netip.Addr{}))
	}

	return errors.Join(routes...)
}

// attachPod leads node and pod to each other.
func (w *world) attachPod(ip netip.Addr, number int) error {
	pod := lab.End{Namespace: w.pods[ip], Device: "eth0", Addresses: []netip.Prefix{single(ip)}}
	node := lab.End{Namespace: w.node, Device: fmt.Sprintf("pod%d", number)}
	if err := lab.Veth(pod, node); err != nil {
		return err
	}

	return errors.Join(
		lead(pod, node, everywhere[familyIndex(ip)], netip.Addr{}),
		lead(node, pod, single(ip), netip.Addr{}),
	)
}

// place is the namespace that a flow starts in.
func (w *world) place(f flow) *lab.Namespace {
	if pod := w.pods[f.SourceIP]; pod != nil {
		return pod
	}

	return w.node
}

// owner is the namespace that an address leads to, from a flow's place.
func (w *world) owner(f flow, addr netip.Addr) *lab.Namespace {
	switch {
	case addr.IsLoopback():
		return w.place(f)
	case w.local[addr]:
		return w.node
	case w.pods[addr] != nil:
		return w.pods[addr]
	}

	return w.outside
}

// addServers puts a server wherever a flow may end: where it is dialled, and at
// every target that the scenario has, so that also a wrong one answers.
func (w *world) addServers(s *scenario, f flow) error {
	for _, end := range append(s.targets(), f.dest()) {
		ns := w.owner(f, end.Addr())
		at := strings.ToLower(string(f.Protocol)) + "/" + end.String()
		if slices.Contains(w.listeners[ns], at) || end.Addr().IsUnspecified() {
			continue
		}
		w.listeners[ns] = append(w.listeners[ns], at)
		if ns != w.outside {
			continue
		}
		if err := ns.AddAddress("lo", single(end.Addr())); err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
	}

	return nil
}
