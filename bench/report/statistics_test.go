package report

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// Quartiles by hand, of Hyndman and Fan's type 8: the place of q among n values is
// q × (n + 1/3) + 1/3.
func TestSpread(t *testing.T) {
	for _, test := range []struct {
		name   string
		values []float64
		want   Spread
	}{
		{"of nothing", nil, Spread{}},
		{"of one value", []float64{7}, Spread{1, 7, 7, 7, 7, 7}},
		{"of two values", []float64{2, 1}, Spread{2, 1.5, 1, 2, 1, 2}},
		{"of four values", []float64{4, 1, 3, 2}, Spread{4, 2.5, 17. / 12, 43. / 12, 1, 4}},
		{"of five values", []float64{50, 10, 40, 20, 30}, Spread{5, 30, 50. / 3, 130. / 3, 10, 50}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, SpreadOf(test.values), cmpopts.EquateApprox(1e-12, 0)); diff != "" {
				t.Errorf("spread (-want +got):\n%s", diff)
			}
		})
	}
}

// Values are compared with those of the same round only.
func TestRatios(t *testing.T) {
	var r Run
	add := func(path, side string, round int, value float64) {
		r.Add(Sample{10, Connect, path, side, Rate, round, value})
	}
	add(Direct, Ref, 0, 100) // the machine becomes slower with each round
	add(Direct, Ref, 1, 50)
	add(Direct, Ref, 2, 10)
	add(Direct, Ref, 3, 0)
	add(Direct, Sluice, 0, 80)
	add(Direct, Sluice, 1, 50)
	add(ServiceLast, Sluice, 0, 40)
	add(ServiceLast, Sluice, 1, 40)
	add(ServiceLast, Sluice, 2, 9)
	add(ServiceLast, Sluice, 3, 9)
	add(ServiceLast, IPTables, 1, 10)
	add(ServiceLast, NFTables, 7, 10)
	r.Add(Sample{1000, Connect, Direct, Ref, Rate, 0, 1})
	r.Add(Sample{10, Exchange, Direct, Ref, Rate, 0, 1})
	v := r.view().values
	last := key{10, Connect, ServiceLast, Sluice, Rate}
	direct := key{10, Connect, Direct, Sluice, Rate}
	ref := key{10, Connect, Direct, Ref, Rate}
	for _, test := range []struct {
		name string
		got  Spread
		want Spread
	}{
		{"beside ref, whose fourth round is 0", v.toRef(last), SpreadOf([]float64{0.4, 0.8, 0.9})},
		{"beside direct, which has two rounds", v.toDirect(last), SpreadOf([]float64{0.5, 0.8})},
		{"beside the rival's only round", v.toSide(last, IPTables), SpreadOf([]float64{4})},
		{"beside a rival of another round", v.toSide(last, NFTables), Spread{}},
		{"beside a rival that is not there", v.toSide(last, IPVS), Spread{}},
		{"of direct beside ref", v.toRef(direct), SpreadOf([]float64{0.8, 1})},
		{"of direct beside itself", v.toDirect(direct), Spread{}},
		{"of ref beside itself", v.toRef(ref), Spread{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, test.got); diff != "" {
				t.Errorf("ratio (-want +got):\n%s", diff)
			}
		})
	}
}

func TestCompare(t *testing.T) {
	for _, test := range []struct {
		metric string
		ratio  Spread
		want   string
	}{
		{Rate, SpreadOf([]float64{2, 2.5, 3}), "+ faster: 2.50 × nftables (2.08–2.92)"},
		{Rate, SpreadOf([]float64{0.9, 0.95, 0.96}), "- slower: 0.95 × nftables (0.91–0.96)"},
		{Rate, SpreadOf([]float64{0.9, 0.95, 1.2}), "= level: 0.95 × nftables (0.91–1.16)"},
		{Rate, SpreadOf([]float64{0.8}), "- slower: 0.80 × nftables"},
		{Rate, Spread{}, ""},
		{P99, SpreadOf([]float64{0.05, 0.05}), "+ faster: 0.05 × nftables (0.05–0.05)"},
		{P99, SpreadOf([]float64{1.5}), "- slower: 1.50 × nftables"},
		{CPU, SpreadOf([]float64{1.5}), "- dearer: 1.50 × nftables"},
		{RSS, SpreadOf([]float64{0.5}), "+ smaller: 0.50 × nftables"},
		{CPUThousand, SpreadOf([]float64{0}), "+ cheaper: 0.00 × nftables"},
	} {
		t.Run(test.want, func(t *testing.T) {
			if got := metricOf(test.metric).compare(test.ratio, NFTables); got != test.want {
				t.Errorf("Sluice is %q, want %q", got, test.want)
			}
		})
	}
}

func TestFormat(t *testing.T) {
	for value, want := range map[float64]string{
		0: "0.00", 0.01234: "0.0123", 0.9996: "1.00", 1.234: "1.23", 12.34: "12.3", 99.96: "100", 123.4: "123",
		1234.5: "1,234", 9999.6: "10,000", 41_237: "41,240", 1_234_567: "1,235,000", -1234: "-1,234",
	} {
		if got := formatValue(value); got != want {
			t.Errorf("%g is %q, want %q", value, got, want)
		}
	}
	for ratio, want := range map[float64]string{0: "0.00", 0.0123: "0.012", 0.974: "0.97", 1: "1.00", 12.34: "12.3", 1234: "1,234"} {
		if got := formatRatio(ratio); got != want {
			t.Errorf("ratio %g is %q, want %q", ratio, got, want)
		}
	}
	for _, test := range []struct {
		values []float64
		want   string
	}{
		{[]float64{100, 102, 98}, "100 ±1.7 %"}, {[]float64{100, 160, 40}, "100 ±50 %"}, {[]float64{100}, "100"}, {[]float64{0, 0}, "0.00"},
	} {
		if got := SpreadOf(test.values).format(); got != test.want {
			t.Errorf("%v are %q, want %q", test.values, got, test.want)
		}
	}
}

// What is no number would make the whole report unwritable.
func TestNoNumber(t *testing.T) {
	var r Run
	r.Add(Sample{Case: Connect, Side: Sluice, Metric: SoftIRQ, Value: math.NaN()}, Sample{Case: Connect, Side: Sluice, Metric: Rate, Value: math.Inf(1)})
	if len(r.Samples) != 0 || len(r.Gaps) != 2 {
		t.Errorf("%d samples and %d gaps, want 0 and 2", len(r.Samples), len(r.Gaps))
	}
}
