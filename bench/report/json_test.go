package report

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The JSON has all of the run, the names, and summaries of the rounds with the values of the tables.
func TestJSON(t *testing.T) {
	for name, run := range map[string]*Run{"full": madeRun(), "empty": new(Run)} {
		t.Run(name, func(t *testing.T) {
			var file bytes.Buffer
			if err := run.WriteJSON(&file); err != nil {
				t.Fatal(err)
			}
			got := document{Run: new(Run)}
			if err := json.NewDecoder(&file).Decode(&got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(run, got.Run); diff != "" {
				t.Errorf("run (-want +got):\n%s", diff)
			}
			if len(got.Cases) != len(Cases) || len(got.Paths) != len(Paths) || len(got.Metrics) != len(Metrics) {
				t.Errorf("%d cases, %d paths, %d metrics are explained", len(got.Cases), len(got.Paths), len(got.Metrics))
			}
			if name == "full" {
				checkSummary(t, got.Summaries)
			}
		})
	}
}

func checkSummary(t *testing.T, all []Summary) {
	t.Helper()
	for _, s := range all {
		if s.Services != 1000 || s.Case != Bulk || s.Side != Sluice {
			continue
		}
		by := func(a, b float64) float64 { return a / b } // not exactly, as constants would be
		want := Summary{1000, Bulk, ServiceRemote, Sluice, Throughput, "Gbit/s", SpreadOf([]float64{20, 20.05, 19.85}),
			SpreadOf([]float64{by(20, 20.1), by(20.05, 20), by(19.85, 19.8)}), Spread{},
			map[string]Spread{IPTables: SpreadOf([]float64{by(20, 18), by(20.05, 17.9)})}}
		if diff := cmp.Diff(want, s); diff != "" {
			t.Errorf("summary (-want +got):\n%s", diff)
		}

		return
	}
	t.Error("there is no summary of Sluice's bulk throughput")
}
