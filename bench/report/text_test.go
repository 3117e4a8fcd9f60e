package report

import (
	"bytes"
	"flag"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write what comes out to testdata")

// The report of a run in which things went wrong.
func TestText(t *testing.T) {
	for _, test := range []struct {
		golden string
		write  func(out io.Writer) error
	}{
		{"run.txt", madeRun().WriteText},
		{"run.md", madeRun().WriteMarkdown},
		{"once.txt", onceRun().WriteText},
		{"empty.txt", new(Run).WriteText},
	} {
		t.Run(test.golden, func(t *testing.T) {
			var out bytes.Buffer
			if err := test.write(&out); err != nil {
				t.Fatal(err)
			}
			name := filepath.Join("testdata", test.golden)
			if *update {
				if err := os.WriteFile(name, out.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), out.String()); diff != "" {
				t.Errorf("text (-want +got):\n%s", diff)
			}
		})
	}
}

// Lines of progress show the first metric of a case, a line for each path.
func TestProgress(t *testing.T) {
	want := []string{
		"connect direct rate:  ref 40,000 ±1.0 %  sluice 39,600 ±1.0 % (0.99 × ref)  iptables 36,000 ±1.0 % (0.90 × ref)  nftables 38,000 ±1.0 % (0.95 × ref)",
		"connect service-last rate:  sluice 39,200 ±1.0 % (0.98 × ref)  iptables 16,000 ±1.0 % (0.40 × ref)  nftables 40,400 ±1.0 % (1.01 × ref)",
	}
	if diff := cmp.Diff(want, madeRun().Summary(1000, Connect)); diff != "" {
		t.Errorf("connections (-want +got):\n%s", diff)
	}
	want = []string{"memory resident:  sluice 41.0 ±1.5 %  nftables 51.0 ±1.6 %"}
	if diff := cmp.Diff(want, madeRun().Summary(10, Memory)); diff != "" {
		t.Errorf("memory (-want +got):\n%s", diff)
	}
	if got := madeRun().Summary(10, UDPNew); got != nil {
		t.Errorf("of what was not measured there is %q", got)
	}
	sample := Sample{10, Connect, ServiceLast, Sluice, P50, 1, 103.2}
	if got := sample.String(); got != "sluice connect service-last: p50 103 µs" {
		t.Errorf("sample is %q", got)
	}
}
