package maps

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// numbered returns one of many addresses.
func numbered(i int) Addr {
	var a Addr
	a.Bytes[10], a.Bytes[11] = 0xff, 0xff
	binary.BigEndian.PutUint32(a.Bytes[12:], 0x0a600000+uint32(i))

	return a
}

// mustShareBit returns two addresses that have the same bit.
func mustShareBit(t *testing.T) (Addr, Addr) {
	t.Helper()
	seen := map[uint32]Addr{}
	for i := range 1 << 20 {
		a := numbered(i)
		if b, ok := seen[filterBit(a)]; ok {
			return a, b
		}
		seen[filterBit(a)] = a
	}
	t.Fatal("no two addresses share a bit")

	return Addr{}, Addr{}
}

// A bit stays until the last address that has it is removed.
func TestAddrFilterCounts(t *testing.T) {
	f := NewFakes(0).AddrFilter
	a, b := mustShareBit(t)
	for _, step := range []struct {
		what string
		do   func(Addr)
		addr Addr
		want bool
	}{
		{"one added", f.Add, a, true},
		{"both added", f.Add, b, true},
		{"one removed", f.Remove, a, true},
		{"added again", f.Add, a, true},
		{"removed again", f.Remove, a, true},
		{"both removed", f.Remove, b, false},
		{"added at last", f.Add, b, true},
	} {
		step.do(step.addr)
		if f.May(a) != step.want || f.May(b) != step.want {
			t.Errorf("%s: %v and %v, want %v", step.what, f.May(a), f.May(b), step.want)
		}
	}
}

// An address of the node has a second bit, which stays when the address goes.
func TestAddrFilterOfNode(t *testing.T) {
	f := NewFakes(0).AddrFilter
	node, service := numbered(1), numbered(2)
	f.Add(node)
	f.Add(service)
	f.AddNode(node)
	if !f.MayNode(node) || f.MayNode(service) {
		t.Errorf("the node's: %v, the Service's: %v", f.MayNode(node), f.MayNode(service))
	}
	f.Trim()
	if f.Remove(node); !f.MayNode(node) || f.May(node) {
		t.Errorf("gone: of the node: %v, in addrs: %v", f.MayNode(node), f.May(node))
	}
}

// The hash spreads the addresses of a cluster: few of the others share a bit with one in addrs.
func TestAddrFilterSpreads(t *testing.T) {
	f := NewFakes(0).AddrFilter
	const ours = 10_000
	for i := range ours {
		f.Add(numbered(i))
	}
	wrong := 0
	for i := range ours {
		if !f.May(numbered(i)) {
			t.Fatalf("address %d was added, and its bit is clear", i)
		}
		if f.May(numbered(1<<20 + i)) {
			wrong++
		}
	}
	if wrong > 2*ours*ours/int(abiAddrFilterADDR_FILTER_BITS) {
		t.Errorf("%d of %d addresses that are not ours have a bit of ours", wrong, ours)
	}
}

// Bits of an earlier agent stay until Trim, and those of adopted addresses after it.
func TestAddrFilterAdopts(t *testing.T) {
	root := lab.MustBPFRoot(t)
	first := mustCreate(t, root, small())
	for i := range 3 {
		first.AddrFilter.Add(numbered(i))
	}
	lab.Must(t, first.Close())

	p := mustCreate(t, root, small())
	may := func() [4]bool {
		return [4]bool{
			p.AddrFilter.May(numbered(0)), p.AddrFilter.May(numbered(1)),
			p.AddrFilter.May(numbered(2)), p.AddrFilter.May(numbered(3)),
		}
	}
	if got, want := may(), [4]bool{true, true, true, false}; got != want {
		t.Errorf("found %v, want %v", got, want)
	}
	p.AddrFilter.Add(numbered(1))
	p.AddrFilter.Add(numbered(3))
	if got, want := may(), [4]bool{true, true, true, true}; got != want {
		t.Errorf("before Trim: %v, want %v", got, want)
	}
	p.AddrFilter.Trim()
	if got, want := may(), [4]bool{false, true, false, true}; got != want {
		t.Errorf("after Trim: %v, want %v", got, want)
	}
	p.AddrFilter.Remove(numbered(1))
	if got, want := may(), [4]bool{false, false, false, true}; got != want {
		t.Errorf("after Remove: %v, want %v", got, want)
	}
}

// The kernel, and so a program, looks up the bits in memory.
func TestMappedAddrFilter(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	p.AddrFilter.Add(numbered(5))
	bit := filterBit(numbered(5))
	var word uint64
	if err := p.byName[NameAddrFilter].Lookup(bit/64, &word); err != nil || word != 1<<(bit%64) {
		t.Errorf("word %d: %#x, %v, want bit %d", bit/64, word, err, bit%64)
	}
	if err := errors.Join(p.AddrFilter.close(), p.AddrFilter.close()); err != nil {
		t.Errorf("close: %v", err)
	}
}

// Every address of a Service CIDR is covered, and none beyond the first 63 bits that it has.
func TestCIDRCovers(t *testing.T) {
	for _, test := range []struct{ cidr, inside, last, outside string }{
		{"10.96.0.0/12", "10.96.0.0", "10.111.255.255", "10.112.0.0"},
		{"10.96.0.128/25", "10.96.0.128", "10.96.0.255", "10.96.0.127"},
		{"10.96.0.7/32", "10.96.0.7", "10.96.0.7", "10.96.0.6"},
		{"0.0.0.0/0", "0.0.0.0", "255.255.255.255", ""},
		{"fd00:10:96::/112", "fd00:10:96::", "fd00:10:96::ffff", "fd00:10:97::"},
		{"fd00:10:96:1::/64", "fd00:10:96:1::", "fd00:10:96:1:ffff::", "fd00:10:96:2::"},
		{"fd00::/8", "fd00::", "fdff:ffff::1", "fe00::"},
		{"::/0", "::", "ffff::", ""},
	} {
		covers := NewFakes(0).CIDRCovers
		covers.Add(CIDRKeyOf(netip.MustParsePrefix(test.cidr)))
		for _, in := range []string{test.inside, test.last} {
			if !covers.May(AddrOf(netip.MustParseAddr(in))) {
				t.Errorf("%s does not cover %s", test.cidr, in)
			}
		}
		if test.outside != "" && covers.May(AddrOf(netip.MustParseAddr(test.outside))) {
			t.Errorf("%s covers %s", test.cidr, test.outside)
		}
		covers.Remove(CIDRKeyOf(netip.MustParsePrefix(test.cidr)))
		if covers.May(AddrOf(netip.MustParseAddr(test.inside))) {
			t.Errorf("%s covers %s after it was removed", test.cidr, test.inside)
		}
	}
}

// However many CIDRs come and go, each is covered while it is there.
func TestManyCIDRs(t *testing.T) {
	covers := NewFakes(0).CIDRCovers
	cidr := func(i int) CIDRKey {
		return CIDRKeyOf(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i), 0, 0}), 16))
	}
	stranger := AddrOf(netip.MustParseAddr("192.0.2.1"))
	const room = int(abiCidrCoverCIDR_COVERS)
	for n := range room + 3 {
		covers.Add(cidr(n))
		for i := range n + 1 {
			if !covers.May(cidr(i).Addr) {
				t.Errorf("of %d CIDRs, number %d is not covered", n+1, i)
			}
		}
		if all := covers.May(stranger); all != (n >= room) {
			t.Errorf("%d CIDRs: a stranger is covered is %v", n+1, all)
		}
	}
	for n := range room + 2 {
		covers.Remove(cidr(n))
		for i := n + 1; i < room+3; i++ {
			if !covers.May(cidr(i).Addr) {
				t.Errorf("CIDR %d is not covered after %d was removed", i, n)
			}
		}
	}
}

// Of two CIDRs with one cover, the second keeps it.
func TestCIDRsWithOneCover(t *testing.T) {
	covers := NewFakes(0).CIDRCovers
	a, b := CIDRKeyOf(netip.MustParsePrefix("fd00:10:96::/112")), CIDRKeyOf(netip.MustParsePrefix("fd00:10:96::1:0/112"))
	covers.Add(a)
	covers.Add(b)
	if covers.Remove(a); !covers.May(b.Addr) {
		t.Error("what two shared is gone with the first")
	}
	if covers.Remove(b); covers.May(b.Addr) {
		t.Error("what two shared is there after both are gone")
	}
}
