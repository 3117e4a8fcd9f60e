package e2e

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// How many files an agent has open, and may, is in its status. When few are left it is not well, and says what to do; when
// none is left, no verb takes that for health. It ends when the limit is raised.
func TestFewFilesLeft(t *testing.T) {
	world := lab.MustNew(t, lab.Config{Nodes: 1})
	node, err := sluice.NewNode(sluice.Config{
		Binary: sluice.MustBinary(t), Namespace: world.Nodes[0].Namespace,
		Cgroup: lab.MustCgroup(t, "e2e"), NodeName: "node-1", Manifests: "testdata/troubleshoot",
	})
	lab.Must(t, err)
	t.Cleanup(func() { node.Close() })
	lab.Must(t, node.Start())
	lab.Must(t, node.WaitSynced(t.Context()))
	var before unix.Rlimit
	lab.Must(t, unix.Prlimit(node.PID(), unix.RLIMIT_NOFILE, nil, &before))
	limit := func(files uint64) {
		lab.Must(t, unix.Prlimit(node.PID(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: before.Max}, nil))
	}
	must := func(isWell bool, texts ...string) {
		t.Helper()
		lab.Eventually(t, "status is as it should be", func() bool {
			shown, err := node.Run("status")
			for _, text := range texts {
				if !strings.Contains(shown, text) {
					return false
				}
			}

			return (err == nil) == isWell
		})
	}
	state, err := node.Status()
	lab.Must(t, err)
	if state.Files.Limit != before.Cur || state.Files.Open < 50 || state.Files.Open > 500 {
		t.Errorf("the files are %+v, want some 100 of %d", state.Files, before.Cur)
	}
	must(true, "files: ")
	scrape := mustAnswer(t, in(world.Nodes[0].Namespace), metricsAddress, "/metrics", 200, fmt.Sprintf("\nsluice_open_files_limit %d\n", before.Cur), "\nsluice_other_instances 0\n")
	if open := regexp.MustCompile(`(?m)^sluice_open_files (\d+)$`).FindStringSubmatch(scrape.body); open == nil || len(open[1]) < 2 || len(open[1]) > 3 {
		t.Errorf("the metric of open files is %q, want some 100", open)
	}
	limit(state.Files.Open + 5)
	must(false, "problem: the agent has ", "raise the limit (LimitNOFILE of the container runtime, ulimit -Hn) to 8192")
	if shown, err := node.Run("doctor"); err == nil || !strings.Contains(shown, "files open of") {
		t.Errorf("doctor (%v):\n%s", err, shown)
	}
	limit(3)
	for _, verb := range []string{"status", "verify", "doctor"} {
		if shown, err := node.Run(verb); err == nil {
			t.Errorf("without a file left, %s ends with 0:\n%s", verb, shown)
		}
	}
	limit(before.Cur)
	must(true, "files: ")
}
