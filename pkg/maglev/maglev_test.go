package maglev

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
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
		{[]string{"10.244.1.2:8080", "10.244.2.2:8080"}, []int{1, 0, 0, 1, 1, 0, 1, 0, 1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 0}},
		{
			[]string{"10.244.1.2:8080", "10.244.1.2:8443", "10.244.2.2:8080"},
			[]int{1, 0, 1, 2, 2, 1, 1, 1, 0, 0, 2, 1, 0, 1, 0, 2, 1, 2, 1, 0, 2, 1, 2, 0},
		},
		{
			[]string{"[fd00::1]:53", "[fd00::2]:53", "[fd00::3]:53", "[fd00::4]:53", "[fd00::5]:53"},
			[]int{4, 1, 2, 3, 1, 0, 3, 4, 2, 2, 1, 1, 0, 3, 4, 0, 3, 2, 0, 2, 1, 4, 0, 3},
		},
	} {
		var backends []netip.AddrPort
		for _, text := range test.backends {
			backends = append(backends, netip.MustParseAddrPort(text))
		}
		table := Table(backends)
		if first := table[:min(len(table), 24)]; !slices.Equal(first, test.first) {
			t.Errorf("the table of %v begins with %v, want %v", backends, first, test.first)
		}
	}
}

func TestSize(t *testing.T) {
	for _, test := range []struct{ backends, size int }{
		{-1, 0}, {0, 0}, {1, 1}, {2, 67}, {4, 67}, {5, 193}, {12, 193}, {13, 577}, {36, 577}, {37, 1733},
		{1000, 46663}, {2916, 46663}, {2917, 65521}, {100000, 65521},
	} {
		if size := Size(test.backends); size != test.size {
			t.Errorf("%d backends have a table of %d, want %d", test.backends, size, test.size)
		}
	}
}

// Every backend's preferences visit every entry only if the size is prime.
func TestSizesArePrime(t *testing.T) {
	for _, size := range sizes {
		for d := 2; d*d <= size; d++ {
			if size%d == 0 {
				t.Errorf("%d is %d times %d", size, d, size/d)
			}
		}
	}
}

func TestBalance(t *testing.T) {
	for _, n := range []int{0, 1, 2, 3, 4, 5, 10, 12, 13, 100, 1000, 4000} {
		table := Table(backendsOf(n))
		if len(table) != Size(n) {
			t.Errorf("%d backends have a table of %d, want %d", n, len(table), Size(n))
		}
		if n == 0 {
			continue
		}
		counts := shares(table, n)
		if least, most := slices.Min(counts), slices.Max(counts); most-least > 1 || least < min(fine, len(table)) {
			t.Errorf("of %d backends, one has %d of %d entries and one %d", n, least, len(table), most)
		}
	}
}

// More backends than entries: the first ones have one each.
func TestMoreBackendsThanEntries(t *testing.T) {
	n := sizes[len(sizes)-1] + 10
	backends := make([]netip.AddrPort, n)
	for i := range backends {
		backends[i] = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 80)
	}
	if counts := shares(Table(backends), n); slices.Max(counts) != 1 {
		t.Errorf("one backend has %d entries", slices.Max(counts))
	}
}

// A node that hears of the backends in another order has the same table.
func TestOrder(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	for _, n := range []int{2, 7, 30, 300} {
		backends := backendsOf(n)
		table := Table(backends)
		shuffled := slices.Clone(backends)
		random.Shuffle(n, func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		for i, backend := range Table(shuffled) {
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

// When a backend comes or goes, its share moves, and of the others' entries few:
// the paper's figure 12 has some 5 % where each backend has this many.
func TestDisruption(t *testing.T) {
	for _, n := range []int{6, 10, 12, 20, 36, 80, 300, 1000} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			backends := backendsOf(n)
			whole := Table(backends)
			moved, kept := 0, 0
			for gone := 0; gone < n; gone += max(1, n/20) {
				less := slices.Delete(slices.Clone(backends), gone, gone+1)
				table := Table(less)
				if len(table) != len(whole) {
					t.Fatalf("the size changes between %d and %d backends: this says nothing", n-1, n)
				}
				for i := range table {
					switch {
					case whole[i] == gone:
					case less[table[i]] != backends[whole[i]]:
						moved++
					default:
						kept++
					}
				}
			}
			share := float64(moved) / float64(moved+kept)
			t.Logf("%.1f %% of the entries of others move", 100*share)
			if share > 0.1 {
				t.Errorf("%.1f %% of the entries of others move", 100*share)
			}
		})
	}
}

func BenchmarkTable(b *testing.B) {
	for _, n := range []int{3, 10, 100, 1000, 10000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			backends := backendsOf(n)
			for b.Loop() {
				Table(backends)
			}
		})
	}
}
