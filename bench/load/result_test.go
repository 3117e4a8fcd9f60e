package load

import (
	"bytes"
	"encoding/gob"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/procfs"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestCPU(t *testing.T) {
	before := cpuOf(procfs.CPUStat{User: 0.1, Nice: 0.01, System: 0.2, Idle: 3, Iowait: 0.04, IRQ: 0.05, SoftIRQ: 0.06, Steal: 0.07})
	after := cpuOf(procfs.CPUStat{User: 1.1, Nice: 0.02, System: 2.2, Idle: 30, Iowait: 0.05, IRQ: 0.55, SoftIRQ: 0.66, Steal: 0.77})
	want := CPU{Busy: 4110 * time.Millisecond, SoftIRQ: 600 * time.Millisecond, Steal: 700 * time.Millisecond, Idle: 27010 * time.Millisecond}
	if diff := cmp.Diff(want, after.Sub(before)); diff != "" {
		t.Errorf("wrong (-want +got):\n%s", diff)
	}
	if now, err := ReadCPU(); err != nil || now.Busy == 0 || now.Idle == 0 {
		t.Errorf("this machine: %+v, %v", now, err)
	}
}

// Latencies keep their counts on the way through a pipe.
func TestLatencies(t *testing.T) {
	sent, few := newLatencies(), Latencies{}
	for _, latency := range []time.Duration{1, 2, 2, 3} {
		sent.add(latency)
	}
	var pipe bytes.Buffer
	lab.Must(t, gob.NewEncoder(&pipe).Encode(sent))
	lab.Must(t, gob.NewDecoder(&pipe).Decode(&few))
	if few.Count() != 4 || few.Quantile(0.5) != 2 {
		t.Errorf("there are %d, with the median %v", few.Count(), few.Quantile(0.5))
	}
	for limit, want := range []int{4, 3, 1, 0, 0} {
		if got := few.Over(time.Duration(limit)); got != want {
			t.Errorf("%d are over %d, want %d", got, limit, want)
		}
	}
	few.add(2 * time.Hour)
	if got := few.Quantile(1); got < time.Hour {
		t.Errorf("what is too long for the histogram counts as %v", got)
	}
	for name, none := range map[string]Latencies{"of nothing": {}, "of no exchange": newLatencies()} {
		if got := none.Quantile(0.5); got != 0 {
			t.Errorf("quantile %s is %v", name, got)
		}
	}
}
