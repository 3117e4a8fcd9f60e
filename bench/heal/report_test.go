package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/test/lab"
)

// Rounds are pooled: connections of all, sums, and the latest times. What failed is infinite, also in
// JSON.
func TestReport(t *testing.T) {
	round := func(failed bool, until Seconds, back *Seconds) Result {
		d := load.Dial{Took: 2 * time.Millisecond}
		if failed {
			d = load.Dial{Took: 3 * time.Second, Failed: "connect: no answer in time"}
		}

		return Result{
			Path: "pod-tcp", Episode: "vanish", Side: "nftables", During: phaseOf([]load.Dial{{Took: time.Millisecond}, d}),
			Into: 3, Until: until, Probes: 1, PassedOver: 2, Back: back,
		}
	}
	for _, test := range []struct {
		name   string
		rounds []Result
		row    string
	}{
		{"one round", []Result{round(false, 0.5, new(Seconds(1)))},
			"| vanish | nftables | 0 of 2 | 0 | 2.00 ms | 2.00 ms | 2.00 ms | 2.00 ms | 3, 0.50 s | 1 | 2 | 0 | 1.00 s | 0, 0.00 ms |"},
		{"two rounds", []Result{round(false, 0.5, new(Seconds(1))), round(true, 0.4, new(Seconds(2)))},
			"| vanish | nftables | 1 of 4 | 0 | 2.00 ms | failed | failed | failed | 6, 0.50 s | 2 | 4 | 0 | 2.00 s | 0, 0.00 ms |"},
		{"not back in one of them", []Result{round(false, 0.5, nil), round(false, 0.4, new(Seconds(2)))},
			"| vanish | nftables | 0 of 4 | 0 | 2.00 ms | 2.00 ms | 2.00 ms | 2.00 ms | 6, 0.50 s | 2 | 4 | 0 | - | 0, 0.00 ms |"},
	} {
		t.Run(test.name, func(t *testing.T) {
			folder := t.TempDir()
			r := Report{Results: test.rounds}
			var text strings.Builder
			lab.Must(t, r.write(folder, &text))
			if !strings.Contains(text.String(), test.row+"\n") {
				t.Errorf("there is no row\n%s\nin\n%s", test.row, text.String())
			}
			packed, err := os.ReadFile(filepath.Join(folder, "report.json"))
			lab.Must(t, err)
			var read struct {
				Pooled []struct{ During struct{ P999 any } }
			}
			lab.Must(t, json.Unmarshal(packed, &read))
			want := any(2.0)
			if strings.Contains(test.row, "failed") {
				want = "failed"
			}
			if len(read.Pooled) != 1 || read.Pooled[0].During.P999 != want {
				t.Errorf("in JSON: %+v, want one with p99.9 %v", read.Pooled, want)
			}
		})
	}
}

// Flags that make no sense are named.
func TestValidate(t *testing.T) {
	o := options{
		sides: []string{"sluice-magic"}, only: "(", rounds: -1, rate: 1,
		phases: phases{healthy: time.Second, after: time.Second},
	}
	err := o.validate()
	for _, flag := range []string{"--sides", "--only", "--rounds", "--rate", "--episode"} {
		if err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%s is not in the error: %v", flag, err)
		}
	}
}
