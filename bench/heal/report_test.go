package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/test/lab"
)

// Rounds are pooled: connections of all, sums, and the latest times. What failed is infinite.
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
			file := filepath.Join(t.TempDir(), "report.md")
			r := Report{Results: test.rounds}
			lab.Must(t, r.write(file))
			text, err := os.ReadFile(file)
			lab.Must(t, err)
			if !strings.Contains(string(text), test.row+"\n") {
				t.Errorf("there is no row\n%s\nin\n%s", test.row, text)
			}
		})
	}
}

// A row of a goal has the values of all sides, and names those that heal and are short of it.
func TestGoals(t *testing.T) {
	took := func(d time.Duration, failed string) Phase { return phaseOf([]load.Dial{{Took: d, Failed: failed}}) }
	r := Report{Pooled: []Result{
		{Path: "pod-tcp", Episode: "vanish", Side: "nftables", During: took(3*time.Second, "connect: no answer in time"), Until: 5},
		{Path: "pod-tcp", Episode: "vanish", Side: "sluice-eject", During: took(time.Second, ""), Until: 0.5},
		{Path: "pod-tcp", Episode: "vanish", Side: "sluice-resteer", During: took(time.Second, ""), Until: 1.5},
	}}
	want := []string{
		"| pod-tcp/vanish | failed or lost | 0 | 1 | - | 0 | 0 |  |\n",
		"| pod-tcp/vanish | p99.9 of connect | 1100 ms, 300 ms | failed | - | 1000 ms | 1000 ms | resteer |\n",
		"| pod-tcp/vanish | the last new connection to it, but for probes | 1.00 s | 5.00 s | - | 0.50 s | 1.50 s | resteer |\n",
		"| pod-tcp/vanish | others passed over | 0 | 0 | - | 0 | 0 |  |\n",
	}
	if diff := cmp.Diff(want, r.goalRows(paths[0])); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
	for _, e := range episodes {
		if len(goals[e.name]) == 0 {
			t.Errorf("%s has no goal", e.name)
		}
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
