package differential

import (
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// frontend is an address that clients dial, whether it is a Service's or not.
type frontend struct {
	service  string // whose it would be; "" if no Service's
	kind     kind
	protocol string // tcp or udp
	address  netip.AddrPort

	// like is what kube-proxy is asked instead, where Sluice deliberately
	// answers by this address, too, and kube-proxy does not.
	like netip.AddrPort

	// twin is the frontend of a Service without affinity that
	// is otherwise the same.
	twin *frontend
}

// kind is what an address is to the Service.
type kind string

const (
	clusterIP   kind = "ClusterIP"
	vip         kind = "VIP"
	externalIP  kind = "external IP"
	nodePort    kind = "node port"
	loopback    kind = "node port on loopback"
	lateAddress kind = "node port at a later address"
	unusedPort  kind = "unused port"
	unallocated kind = "unallocated"
)

// key is what makes two frontends the same.
type key struct {
	protocol string
	address  netip.AddrPort
}

func (f frontend) key() key { return key{f.protocol, f.address} }

// number differs between frontends, so that clients dial them from different
// addresses.
func (f frontend) number() int {
	hash := fnv.New32a()
	hash.Write([]byte(f.protocol + f.address.String())) // never fails

	return int(hash.Sum32() >> 1)
}

func (f frontend) String() string {
	return strings.TrimSpace(f.service + " " + string(f.kind) + " " + f.protocol + "/" + f.address.String())
}

// Addresses of node-1 that node ports may answer by. The later ones come when both
// proxies are at work.
var (
	nodePortAddresses = addresses("192.168.50.1", "192.168.51.1", "192.168.60.6", "10.244.1.1",
		"fd00:50::1", "fd00:51::1", "fd00:60::6", "fd00:10:244:1::1")
	loopbacks     = addresses("127.0.0.1", "::1")
	lateAddresses = addresses("192.168.50.77", "fd00:50::77")
	freeIPs       = addresses("10.96.77.77", "fd00:10:96::7777")
	freePort      = uint16(9999)
	freeAddress   = func(ip netip.Addr) netip.AddrPort { return netip.AddrPortFrom(ip, freePort) }
)

// frontends are all that these objects have, and those of the objects before
// that are gone; and some that never were.
func (s settings) frontends(now, before objects) []frontend {
	all := map[key]frontend{}
	for _, o := range []objects{before, now} {
		for _, name := range slices.Sorted(maps.Keys(o.services)) {
			mine := s.frontendsOf(o.services[name])
			var twins []frontend
			if twin := o.services[name+twinSuffix]; twin != nil {
				twins = s.frontendsOf(twin)
			}
			for i, f := range mine {
				if twins != nil {
					f.twin = &twins[i]
				}
				if now.services[name] == nil {
					f.service, f.twin = "", nil
				}
				all[f.key()] = f
			}
		}
	}
	var list []frontend
	for _, k := range slices.SortedFunc(maps.Keys(all), compareKeys) {
		list = append(list, all[k])
	}
	for _, ip := range freeIPs {
		for _, protocol := range []string{"tcp", "udp"} {
			list = append(list, frontend{kind: unallocated, protocol: protocol, address: freeAddress(ip)})
		}
	}

	return list
}

func compareKeys(a, b key) int {
	if c := a.address.Compare(b.address); c != 0 {
		return c
	}

	return strings.Compare(a.protocol, b.protocol)
}

// frontendsOf are those of a Service, and some by which it does not answer. Equal
// Services have as many.
func (s settings) frontendsOf(svc *corev1.Service) []frontend {
	var all []frontend
	add := func(k kind, ip netip.Addr, port corev1.ServicePort, number int32) {
		all = append(all, frontend{
			service: svc.Name, kind: k, protocol: strings.ToLower(string(port.Protocol)),
			address: netip.AddrPortFrom(ip, uint16(number)),
		})
	}
	for _, port := range svc.Spec.Ports {
		for _, ip := range addresses(svc.Spec.ClusterIPs...) {
			add(clusterIP, ip, port, port.Port)
			add(unusedPort, ip, port, int32(freePort))
		}
		for _, ip := range addresses(svc.Spec.ExternalIPs...) {
			add(externalIP, ip, port, port.Port)
		}
		for _, ingress := range svc.Status.LoadBalancer.Ingress {
			if ingress.IP != "" {
				add(vip, netip.MustParseAddr(ingress.IP), port, port.Port)
			}
		}
		if port.NodePort == 0 {
			continue
		}
		add(unusedPort, netip.MustParseAddr(svc.Spec.ClusterIP), port, port.NodePort)
		all = append(all, s.nodePortsOf(svc, port)...)
	}

	return all
}

func (s settings) nodePortsOf(svc *corev1.Service, port corev1.ServicePort) []frontend {
	var all []frontend
	for k, ips := range map[kind][]netip.Addr{nodePort: nodePortAddresses, loopback: loopbacks, lateAddress: lateAddresses} {
		for _, ip := range ips {
			f := frontend{
				service: svc.Name, kind: k, protocol: strings.ToLower(string(port.Protocol)),
				address: netip.AddrPortFrom(ip, uint16(port.NodePort)),
			}
			// Of all addresses, kube-proxy has the later ones too; with primary,
			// neither proxy has.
			if k == loopback || k == lateAddress && slices.Equal(s.nodePortAddresses, firstSegment) {
				f.like = netip.AddrPortFrom(hostAddresses(1)[familyOf(ip)], uint16(port.NodePort))
			}
			all = append(all, f)
		}
	}
	slices.SortFunc(all, func(a, b frontend) int { return compareKeys(a.key(), b.key()) })

	return all
}

func addresses(texts ...string) []netip.Addr {
	var all []netip.Addr
	for _, text := range texts {
		all = append(all, netip.MustParseAddr(text))
	}

	return all
}

// dials reports whether a client can dial a frontend, and whether that shows something by
// it.
func (c *client) dials(f frontend) bool {
	switch {
	case f.kind == loopback:
		return c.place == onNode
	case c.place == otherNode: // VIPs are its own node's affair
		return f.kind == nodePort && f.address.Addr() == hostAddresses(1)[familyOf(f.address.Addr())]
	case c.place == outside && (f.address.Addr() == netip.MustParseAddr("10.244.1.1") || f.address.Addr() == netip.MustParseAddr("fd00:10:244:1::1")):
		return false // it has no route
	}

	return true
}
