package load

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/procfs"
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
