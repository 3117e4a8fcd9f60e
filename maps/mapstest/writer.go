// Package mapstest has maps for tests, and writes Services into them.
package mapstest

import (
	"encoding/binary"
	"errors"
	"fmt"
	stdmaps "maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// MustCreate returns maps in the kernel that only the test has. They are small, but for those
// with other capacities.
func MustCreate(t testing.TB, capacities map[string]uint32) *maps.Pinned {
	t.Helper()
	all := map[string]uint32{
		maps.NameFrontendIDs: 1024, maps.NameAffinity: 1024, maps.NameUDPPins: 1024,
		maps.NameFlows: 1024, maps.NameHalfOpen: 1024, maps.NameUnanswered: 1024,
	}
	stdmaps.Copy(all, capacities)
	pinned, err := maps.Create(lab.MustBPFRoot(t), maps.Options{Capacities: all})
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, pinned.Close()) })

	return pinned
}

// Writer publishes frontends with their pools and backends. It uses every place once.
type Writer struct {
	tables                                          maps.Tables
	servicePorts, frontends, pools, slots, backends uint32 // last in use
}

// New returns a writer of these maps, which must be the only one.
func New(tables maps.Tables) *Writer { return &Writer{tables: tables} }

// ServicePort returns the id of a new service port.
func (w *Writer) ServicePort() (uint32, error) {
	w.servicePorts++
	id := w.servicePorts
	name := maps.ServicePortOf("test", fmt.Sprintf("service-%d", id), "", 0, 0)

	return id, errors.Join(w.tables.Counts.Begin(id), w.tables.ServicePorts.Put(id, name))
}

// Backend publishes a new backend of a service port, and returns its id.
func (w *Writer) Backend(servicePort uint32, addr netip.AddrPort, flags uint32) (uint32, error) {
	w.backends++
	id := w.backends

	return id, errors.Join(
		w.tables.Loads.Reserve(int(id)+1),
		w.tables.Health.Reserve(int(id)+1),
		w.tables.Backends.Put(id, maps.BackendOf(id, servicePort, addr, flags)),
	)
}

// RemoveBackend retires a backend; slots with its id stay.
func (w *Writer) RemoveBackend(id uint32) error {
	gone := w.tables.Backends.Get(maps.Index(id))
	gone.Id = 0

	return w.tables.Backends.Put(maps.Index(id), gone)
}

// Pool publishes a pool with the settings of p, these backends, and the table of its algorithm.
// It returns the id of the pool.
func (w *Writer) Pool(p maps.Pool, backends, table []uint32) (uint32, error) {
	p.SlotBase, p.SlotCount = w.slots+1, uint32(len(backends))
	p.TableBase, p.TableSize = p.SlotBase+p.SlotCount, uint32(len(table))
	var errs []error
	for _, id := range slices.Concat(slices.Sorted(slices.Values(backends)), table) {
		w.slots++
		errs = append(errs, w.tables.Slots.Put(w.slots, id))
	}
	w.pools++

	return w.pools, errors.Join(append(errs, w.tables.Pools.Put(w.pools, p))...)
}

// Hashed returns what programs choose from the table of a pool by the hash of these bytes, which
// is that of addr.h without a seed: nodes of different versions must agree on it.
func Hashed[T any](table []T, bytes []byte) T { return HashedBy(0, table, bytes) }

// HashedBy is [Hashed] with a seed.
func HashedBy[T any](seed uint32, table []T, bytes []byte) T {
	h := uint32(len(bytes)) ^ seed
	for ; len(bytes) > 0; bytes = bytes[4:] {
		h ^= binary.NativeEndian.Uint32(bytes)
		h = (h ^ h>>16) * 0x85ebca6b
		h = (h ^ h>>13) * 0xc2b2ae35
		h ^= h >> 16
	}

	return table[uint64(h)*uint64(len(table))>>32]
}

// Frontend makes a frontend lead to a pool. Its address must be marked by [Writer.Mark].
func (w *Writer) Frontend(key maps.FrontendKey, kind uint8, pool uint32) error {
	id, there, err := w.tables.FrontendIDs.Lookup(key)
	if err != nil {
		return err
	}
	if !there {
		w.frontends++
		id = w.frontends
	}
	if key.Addr.IP().IsUnspecified() {
		w.tables.PortFilter.Add(maps.Port(key.Port))
	}
	if err := w.tables.Frontends.Put(id, maps.Frontend{Key: key, PoolId: pool, Kind: kind}); err != nil || there {
		return err
	}

	return w.tables.FrontendIDs.Put(key, id)
}

// ServiceCIDR adds a Service CIDR.
func (w *Writer) ServiceCIDR(cidr netip.Prefix) error {
	key := maps.CIDRKeyOf(cidr)
	w.tables.CIDRCovers.Add(key)

	return w.tables.ServiceCIDRs.Put(key, maps.CIDROfServices)
}

// OtherProxy adds the address of a Service that another proxy serves.
func (w *Writer) OtherProxy(addr netip.Addr) error {
	return w.tables.ServiceCIDRs.Put(maps.CIDRKeyOf(netip.PrefixFrom(addr, addr.BitLen())), maps.CIDROfOtherProxy)
}

// Mark adds flags to the use of an address.
func (w *Writer) Mark(addr maps.Addr, flags, ifindex uint32) error {
	use, there, err := w.tables.Addrs.Lookup(addr)
	if err != nil {
		return err
	}
	if !there {
		w.tables.AddrFilter.Add(addr)
	}
	if flags&maps.AddrNode != 0 {
		w.tables.AddrFilter.AddNode(addr)
	}
	use.Flags |= flags
	use.Ifindex = max(use.Ifindex, ifindex)

	return w.tables.Addrs.Put(addr, use)
}
