// Package objects writes the objects of a benchmark to its API server: many Services with
// several endpoints each, every one of which has an address of its own that a pod
// of the lab answers for, and a few Services for single measurements.
//
// [Plan] computes which objects there are, without any input or output. [Writer] writes them.
package objects

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// ServiceRange holds all ClusterIPs of a [Plan]. It is what the API server needs
// as --service-cluster-ip-range.
const ServiceRange = "10.96.0.0/12"

// Two pods answer for all addresses of these, one on the node that is measured,
// and one on the other node.
var (
	LocalPrefix  = netip.MustParsePrefix("100.64.0.0/12")
	RemotePrefix = netip.MustParsePrefix("100.80.0.0/12")
)

// The ports of the many Services. Only the first and the last one have DNSPort.
const (
	Port        = 80   // TCP
	DNSPort     = 53   // UDP
	BackendPort = 8080 // where endpoints answer both
)

// How a prefix of 2^20 addresses is used: its first half for endpoints, then for
// those that replace them, and at the end for those of the Service "single".
const (
	spares   = 1 << 19
	singles  = 1<<20 - 1<<16
	maxSlice = 1000 // endpoints, the API's limit
)

var firstClusterIP = netip.MustParseAddr("10.97.0.0")

// Place is a node, and its pod that serves.
type Place struct {
	Node    string
	Address netip.Addr // the node's
	Pod     netip.Addr // the pod's own
}

// Plan is the set of objects. Services and endpoints are counted from 0.
type Plan struct {
	Services  int
	Endpoints int // of each Service
	// Endpoints with even numbers are at the local place, the others at the
	// remote one.
	Local, Remote Place
}

// Fits returns an error if there are too many Services or endpoints, or too few.
func (p Plan) Fits() error {
	if p.Services < 0 || p.Endpoints < 1 || p.Endpoints > maxSlice {
		return fmt.Errorf("plan of %d Services with %d endpoints: want at least none with 1 to %d", p.Services, p.Endpoints, maxSlice)
	}
	if p.Services*p.perPlace() > spares {
		return fmt.Errorf("plan of %d Services with %d endpoints: there are %d addresses for each place", p.Services, p.Endpoints, spares)
	}

	return nil
}

// ClusterIP is that of Service i.
func (p Plan) ClusterIP(i int) netip.Addr { return after(firstClusterIP, i) }

// EndpointAddress is that of endpoint e of Service i. In each generation but 0,
// endpoint 0 has another address, local too, which no Service had before, until
// half a million of them have been used.
func (p Plan) EndpointAddress(i, e, generation int) netip.Addr {
	if e == 0 && generation > 0 {
		return after(LocalPrefix.Addr(), spares+(i+generation*p.Services)%(singles-spares))
	}
	prefix := LocalPrefix
	if e%2 == 1 {
		prefix = RemotePrefix
	}

	return after(prefix.Addr(), i*p.perPlace()+e/2)
}

// HasDNS reports whether Service i is one of those with DNSPort.
func (p Plan) HasDNS(i int) bool { return i == 0 || i == p.Services-1 }

// SingleAddress is that of the only endpoint of the Service "single", which is
// local and another one in each generation, up to 65,535.
func (p Plan) SingleAddress(generation int) netip.Addr {
	return after(LocalPrefix.Addr(), singles+generation%(1<<16))
}

// perPlace is how many addresses of a prefix each Service has.
func (p Plan) perPlace() int { return (p.Endpoints + 1) / 2 }

// after is the IPv4 address that is n after base.
func after(base netip.Addr, n int) netip.Addr {
	bytes := base.As4()
	number := binary.BigEndian.Uint32(bytes[:]) + uint32(n)
	binary.BigEndian.PutUint32(bytes[:], number)

	return netip.AddrFrom4(bytes)
}
