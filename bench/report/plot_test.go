package report

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The charts that have values are written, with titles, axes and legends.
func TestPlots(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "plots") // is made
	if err := madeRun().WritePlots(folder); err != nil {
		t.Fatal(err)
	}
	names, _ := filepath.Glob(folder + "/*")
	var want []string
	for _, file := range []string{"change-quiet", "connect-p50", "connect-rate", "memory", "no-service"} {
		want = append(want, filepath.Join(folder, file+".svg"))
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	content, err := os.ReadFile(filepath.Join(folder, "connect-p50.svg"))
	if err != nil {
		t.Fatal(err)
	}
	for _, words := range []string{">Latency of connect() to a ClusterIP<", ">median latency, µs<", ">Services in the cluster, logarithmic<",
		">1,000<", ">ref<", ">sluice, last<", ">iptables, last<", ">nftables, last<",
		">First, last: of all Services. ref: a node without a proxy, endpoints dialled directly. Medians of 3 rounds, bars: their quartiles.<",
		"Arial", "#0072B2", "#D55E00"} { // a common typeface, and the colours of Sluice and iptables
		if !strings.Contains(string(content), words) {
			t.Errorf("%q is not in the plot", words)
		}
	}
	if strings.Contains(string(content), "sluice, first") {
		t.Error("the plot has a curve without values")
	}
}

// Values that no axis likes are drawn as well as they can be.
func TestPlotsOfOddValues(t *testing.T) {
	for name, values := range map[string][]float64{
		"it is zero": {0, 0}, "it is negative": {-3, 5}, "one is zero": {0, 5}, "it is tiny": {1e-7, 1e-9}, "it is huge": {1, 1e12}, "it is one value": {5}, "they are all alike": {1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			r := new(Run)
			for i, value := range values {
				for _, side := range []string{Ref, Sluice} {
					r.Add(Sample{i * 10, Connect, controlOf(ServiceLast), side, P50, 0, value}, Sample{i * 10, Connect, ServiceLast, side, P50, 0, value},
						Sample{i * 10, Connect, ServiceLast, side, Rate, 0, value}, Sample{i * 10, Memory, "", side, RSS, 0, value})
				}
			}
			if err := r.WritePlots(t.TempDir()); err != nil {
				t.Error(err)
			}
		})
	}
}

// Each side has a colour and a shape of its own.
func TestLooks(t *testing.T) {
	for i, side := range Sides {
		for _, other := range Sides[:i] {
			if lookOf(side).color == lookOf(other).color || lookOf(side).shape == lookOf(other).shape {
				t.Errorf("%s and %s look alike", side, other)
			}
		}
	}
}
