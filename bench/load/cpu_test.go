package load

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestCPU(t *testing.T) {
	before, err := parseCPU("cpu  10 1 20 300 4 5 6 7 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
	must(t, err)
	after, err := parseCPU("cpu  110 2 220 3000 5 55 66 77 0 0\n")
	must(t, err)
	want := CPU{
		User:    1010 * time.Millisecond,
		System:  2 * time.Second,
		SoftIRQ: 600 * time.Millisecond,
		IRQ:     500 * time.Millisecond,
		Steal:   700 * time.Millisecond,
		Idle:    27010 * time.Millisecond,
	}
	got := after.Sub(before)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("wrong (-want +got):\n%s", diff)
	}
	if got.Busy() != 4110*time.Millisecond {
		t.Errorf("busy for %v", got.Busy())
	}
	for _, text := range []string{"", "cpu  1 2 3", "cpu0 1 2 3 4 5 6 7 8", "cpu 1 2 x 4 5 6 7 8"} {
		if _, err := parseCPU(text); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
	if now, err := ReadCPU(); err != nil || now.Busy() == 0 || now.Idle == 0 {
		t.Errorf("this machine: %+v, %v", now, err)
	}
}
