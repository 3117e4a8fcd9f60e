package main

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/bench/report"
	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	load.Main()
	os.Exit(m.Run())
}

// quick are flags for a run that shows that everything works, and nothing else.
var quick = []string{
	"--services", "10", "--proxies", "sluice,nftables", "--rounds", "1", "--starts", "1", "--changes", "3",
	"--updates", "20", "--duration", "50ms", "--sustained", "50ms", "--warm-up", "10ms", "--rest", "100ms", "--rate", "200",
}

// A run measures every case on every path, and leaves nothing behind but the report.
func TestRun(t *testing.T) {
	before := traces(t)
	run := mustRun(t, t.Context(), os.Stderr)
	if run.Interrupted || len(run.Gaps) > 0 {
		t.Errorf("interrupted %v, gaps %+v", run.Interrupted, run.Gaps)
	}
	for _, text := range run.Errors {
		if !strings.HasPrefix(text, report.NFTables) { // kube-proxy loses a datagram now and then
			t.Error(text)
		}
	}
	for _, side := range []string{report.Ref, report.Sluice, report.NFTables} {
		for _, c := range cases {
			for _, path := range c.paths {
				if side != report.Ref || isControl(path) {
					mustHave(t, run, side, c.name, path)
				}
			}
		}
		for _, name := range []string{report.Start, report.Memory, report.ChangeQuiet, report.ChangeChurn, report.Updates} {
			if side != report.Ref {
				mustHave(t, run, side, name, "")
			}
		}
	}
	for _, path := range profiled {
		mustHave(t, run, report.Sluice, report.Profile, path)
	}
	if after := traces(t); !slices.Equal(before, after) {
		t.Errorf("before the run there were %q, and after it %q", before, after)
	}
}

// mustHave fails the test unless there are values, and those that cannot be
// zero or less are not.
func mustHave(t *testing.T, run *report.Run, side, name, path string) {
	t.Helper()
	// These may be zero or negative: a proxy gets an event before we do, the kernel frees memory meanwhile,
	// clocks of processors tick too rarely for a run as short, and changes are written
	// through memory.
	free := []string{report.Slow, report.Failed, report.Silence, report.MapWrites, report.EventP50, report.EventP99, report.KernelMemory, report.CPU, report.SoftIRQ, report.CPUPerGbit, report.CPUPerChange, report.CPUThousand}
	found := false
	for _, s := range run.Samples {
		if s.Side != side || s.Case != name || s.Path != path {
			continue
		}
		found = true
		if s.Services != 10 || s.Value <= 0 && !slices.Contains(free, s.Metric) {
			t.Errorf("unlikely: %v, with %d Services", s, s.Services)
		}
	}
	if !found {
		t.Errorf("%s %s %s: no values", side, name, path)
	}
}

// An interrupted run keeps what was measured before.
func TestInterruptedRun(t *testing.T) {
	before := traces(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	run := mustRun(t, ctx, listener(func(line string) {
		if strings.Contains(line, report.Exchange+" "+report.Direct) { // the first case is done
			cancel()
		}
	}), "--only", "^(exchange|udp-new)$")
	if !run.Interrupted {
		t.Error("it is not marked as interrupted")
	}
	mustHave(t, run, report.Sluice, report.Exchange, report.ServiceFirst)
	for _, s := range run.Samples {
		if s.Case == report.UDPNew && s.Side == report.NFTables {
			t.Errorf("went on: %v", s)
		}
	}
	if after := traces(t); !slices.Equal(before, after) {
		t.Errorf("before the run there were %q, and after it %q", before, after)
	}
}

// mustRun runs the command with a flag or two more, and returns its report.
func mustRun(t *testing.T, ctx context.Context, progress io.Writer, args ...string) *report.Run {
	t.Helper()
	output := t.TempDir()
	cmd := command()
	cmd.SetArgs(slices.Concat(quick, []string{"--output", output}, args))
	cmd.SetErr(progress)
	cmd.SetOut(io.Discard)
	if err := cmd.ExecuteContext(ctx); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"report.txt", "report.md"} {
		if info, err := os.Stat(filepath.Join(output, name)); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
	file, err := os.Open(filepath.Join(output, "report.json.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	unpacked, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	run := new(report.Run)
	if err := json.NewDecoder(unpacked).Decode(run); err != nil {
		t.Fatal(err)
	}

	return run
}

// listener gets the lines of progress.
type listener func(line string)

func (l listener) Write(line []byte) (int, error) {
	l(string(line))

	return os.Stderr.Write(line)
}

// traces returns the namespaces, cgroups, pins and folders of this process that exist now.
func traces(t *testing.T) []string {
	t.Helper()
	root, err := lab.CgroupRoot()
	if err != nil {
		t.Fatal(err)
	}
	own := fmt.Sprintf("sluice-%d-*", os.Getpid())
	var found []string
	for _, pattern := range []string{
		"/run/netns/" + own, root + "/" + own, fmt.Sprintf("/sys/fs/bpf/sluice-node-%d-*", os.Getpid()), os.TempDir() + "/sluice-bench-*",
	} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, names...)
	}

	return found
}
