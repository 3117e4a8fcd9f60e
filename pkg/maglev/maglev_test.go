package maglev

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
)

// backendsOf returns n backends, of both families and with a few ports.
func backendsOf(n int) []netip.AddrPort {
	backends := make([]netip.AddrPort, n)
	for i := range backends {
		addr := netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)})
		if i%3 == 2 {
			addr = netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(i >> 8), 15: byte(i)})
		}
		backends[i] = netip.AddrPortFrom(addr, uint16(8080+i%2))
	}

	return backends
}

// shares returns how many entries of a table each backend has.
func shares(table []int, backends int) []int {
	counts := make([]int, backends)
	for _, backend := range table {
		counts[backend]++
	}

	return counts
}

// Two versions that share a cluster must send a client to the same backend.
func TestGolden(t *testing.T) {
	for _, test := range []struct {
		backends []string
		first    []int
	}{
		{[]string{"10.244.1.2:8080"}, []int{0}},
		{[]string{"10.244.1.2:8080", "10.244.2.2:8080"}, []int{0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0}},
		{
			[]string{"10.244.1.2:8080", "10.244.1.2:8443", "10.244.2.2:8080"},
			[]int{0, 0, 2, 0, 1, 1, 2, 1, 1, 0, 1, 2, 1, 1, 1, 1, 1, 1, 0, 2, 2, 0, 0, 0},
		},
		{
			[]string{"[fd00::1]:53", "[fd00::2]:53", "[fd00::3]:53", "[fd00::4]:53", "[fd00::5]:53"},
			[]int{1, 1, 3, 4, 2, 0, 3, 2, 2, 2, 4, 3, 0, 0, 3, 4, 1, 0, 1, 1, 3, 0, 4, 2},
		},
	} {
		var backends []netip.AddrPort
		for _, text := range test.backends {
			backends = append(backends, netip.MustParseAddrPort(text))
		}
		table := Table(backends, DefaultSize)
		if first := table[:min(len(table), 24)]; !slices.Equal(first, test.first) {
			t.Errorf("the table of %v begins with %v, want %v", backends, first, test.first)
		}
	}
}

func TestSize(t *testing.T) {
	for _, test := range []struct{ usual, backends, size int }{
		{16381, -1, 0}, {16381, 0, 0}, {16381, 1, 1}, {16381, 2, 16381}, {16381, 109, 16381}, {16381, 4095, 16381},
		{16381, 4096, 65521}, {16381, 100000, 65521},
		{251, 1, 1}, {251, 2, 251}, {251, 62, 251}, {251, 63, 16381}, {251, 4095, 16381}, {251, 4096, 65521},
		{1021, 255, 1021}, {1021, 256, 16381}, {1021, 4096, 65521},
		{8191, 2047, 8191}, {8191, 2048, 16381}, {8191, 4096, 65521},
	} {
		if size := Size(test.backends, test.usual); size != test.size {
			t.Errorf("where %d is usual, %d backends have a table of %d, want %d", test.usual, test.backends, size, test.size)
		}
	}
}

// Every backend's preferences visit every entry only if the size is prime.
func TestSizesArePrime(t *testing.T) {
	for _, size := range append(Sizes, LargeSize) {
		for d := 2; d*d <= size; d++ {
			if size%d == 0 {
				t.Errorf("%d is %d times %d", size, d, size/d)
			}
		}
	}
}

func TestBalance(t *testing.T) {
	var parts []string
	for _, n := range []int{0, 1, 2, 3, 4, 5, 10, 12, 13, 100, 300, 1000, 4000} {
		table := Table(backendsOf(n), DefaultSize)
		if len(table) != Size(n, DefaultSize) {
			t.Errorf("%d backends have a table of %d, want %d", n, len(table), Size(n, DefaultSize))
		}
		if n == 0 {
			continue
		}
		counts := shares(table, n)
		if least, most := slices.Min(counts), slices.Max(counts); most-least > 1 || least < 1 {
			t.Errorf("of %d backends, one has %d of %d entries and one %d", n, least, len(table), most)
		}
		if n == 100 || n == 300 {
			parts = append(parts, fmt.Sprintf("%d or %d of %d", slices.Min(counts), slices.Max(counts), n))
		}
	}
	mustStandIn(t, "docs/balancing.md", strings.Join(parts, ", "))
}

// More backends than entries: the first ones have one each.
func TestMoreBackendsThanEntries(t *testing.T) {
	n := LargeSize + 10
	backends := make([]netip.AddrPort, n)
	for i := range backends {
		backends[i] = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 80)
	}
	if counts := shares(Table(backends, DefaultSize), n); slices.Max(counts) != 1 {
		t.Errorf("one backend has %d entries", slices.Max(counts))
	}
}

// A node that hears of the backends in another order has the same table.
func TestOrder(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	for _, n := range []int{2, 7, 30, 300} {
		backends := backendsOf(n)
		table := Table(backends, DefaultSize)
		shuffled := slices.Clone(backends)
		random.Shuffle(n, func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		for i, backend := range Table(shuffled, DefaultSize) {
			if shuffled[backend] != backends[table[i]] {
				t.Fatalf("%d backends: entry %d is %v in one order and %v in another", n, i, backends[table[i]], shuffled[backend])
			}
		}
	}
}

// Backends that differ only in their port, or only in their family, choose on
// their own.
func TestPreferencesDiffer(t *testing.T) {
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	seen := make(map[[2]uint64]netip.AddrPort)
	for _, backend := range []netip.AddrPort{
		netip.AddrPortFrom(a, 80), netip.AddrPortFrom(a, 80<<8), netip.AddrPortFrom(a, 81),
		netip.AddrPortFrom(a.Next(), 80), netip.AddrPortFrom(b, 80), netip.AddrPortFrom(b, 81),
	} {
		first, step := hashes(backend)
		if other, ok := seen[[2]uint64{first, step}]; ok || first == step {
			t.Errorf("%v and %v have the same preferences", backend, other)
		}
		seen[[2]uint64{first, step}] = backend
	}
}

// When a backend comes or goes, its share moves, and of the others' hashes few: at most twice what the
// paper's figure 12 shows for one backend of some with as many entries each, which is two percent.
func TestDisruption(t *testing.T) {
	const most, atMost, hashes = 300, 2 * 0.02, 1 << 16
	random := rand.New(rand.NewPCG(9, 1))
	backends := backendsOf(most + 1)
	random.Shuffle(len(backends), func(i, j int) { backends[i], backends[j] = backends[j], backends[i] })
	sum, worst := 0.0, 0.0
	fewer := Table(backends[:1], DefaultSize)
	for n := 1; n <= most; n++ {
		more := Table(backends[:n+1], DefaultSize)
		moved := 0
		for hash := range hashes {
			was, is := fewer[hash*len(fewer)/hashes], more[hash*len(more)/hashes]
			if is != was && is != n {
				moved++
			}
		}
		share := float64(moved) / hashes
		if share > atMost {
			t.Errorf("between %d and %d backends, %.1f %% of the hashes move from one that stays to another", n, n+1, 100*share)
		}
		sum, worst, fewer = sum+share, max(worst, share), more
	}
	mustStandIn(t, "docs/balancing.md", fmt.Sprintf("%.1f %% on average, %.1f %% at most, at each step from 1 to %d backends", 100*sum/most, 100*worst, most))
	mustStandIn(t, "README.md", fmt.Sprintf("%.1f %% of those of others, %.1f %% at most", 100*sum/most, 100*worst))
}

// mustStandIn checks that a page has these figures.
func mustStandIn(t *testing.T, page, want string) {
	t.Helper()
	text, err := os.ReadFile("../../" + page)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), want) {
		t.Errorf("%s does not say: %s", page, want)
	}
}

func BenchmarkTable(b *testing.B) {
	for _, n := range []int{3, 10, 100, 1000, 10000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			backends := backendsOf(n)
			for b.Loop() {
				Table(backends, DefaultSize)
			}
		})
	}
}
