package e2e

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// One agent has a node's maps, and one answers at a socket. What else would write
// the maps is refused, whatever socket it gets, and changes nothing. A killed
// agent locks out no one.
func TestOneAgent(t *testing.T) {
	cfg := sluice.Config{
		Binary: sluice.MustBinary(t), Namespace: lab.MustNamespace(t, "node"), Cgroup: lab.MustCgroup(t, "e2e"),
		NodeName: "node-1", Manifests: t.TempDir(),
	}
	first := sluice.MustNode(t, cfg)
	cfg.Args = []string{"--bpf-root", first.BPFRoot()}
	sameMaps := mustNewNode(t, cfg)
	cfg.Args = []string{"--socket", first.Socket()}
	sameSocket := mustNewNode(t, cfg)
	pins := mustListPins(t, first)

	for _, test := range []struct {
		name  string
		agent *sluice.Node
		want  string
	}{
		{"an agent with these maps and another socket", sameMaps, first.BPFRoot()},
		{"an agent with this socket and other maps", sameSocket, first.Socket()},
	} {
		t.Run(test.name, func(t *testing.T) {
			lab.Must(t, test.agent.Start())
			defer func() { lab.Must(t, test.agent.Kill()) }()
			mustEnd(t, test.agent)
			if log := test.agent.Log(); !strings.Contains(log, `"`+test.want+`": another agent is running`) {
				t.Errorf("it does not report that another agent has %s:\n%s", test.want, log)
			}
		})
	}
	for _, verb := range [][]string{{"cleanup"}, {"agent", "--cleanup"}, {"agent", "--init-only"}} {
		t.Run(strings.Join(verb, " "), func(t *testing.T) {
			out, err := first.Run(append(verb, "--socket", sameMaps.Socket())...)
			if err == nil || !strings.Contains(err.Error(), `bpf root "`+first.BPFRoot()+`": an`) {
				t.Errorf("it prints %q and ends with %v, want an error that names the maps", out, err)
			}
		})
	}
	if now := mustListPins(t, first); !slices.Equal(now, pins) {
		t.Errorf("pins are %v, were %v", now, pins)
	}
	if out, err := first.Run("status"); err != nil {
		t.Errorf("status of the agent: %v\n%s", err, out)
	}

	lab.Must(t, first.Kill(), sameMaps.Start())
	sluice.MustWait(t, sameMaps)
	lab.Must(t, sameMaps.Kill())
	_, err := first.Run("cleanup")
	lab.Must(t, err)
	if _, err := os.Stat(first.BPFRoot()); !os.IsNotExist(err) {
		t.Errorf("pins are left: %v", err)
	}
}

// mustNewNode returns a node without an agent.
func mustNewNode(t *testing.T, cfg sluice.Config) *sluice.Node {
	t.Helper()
	node, err := sluice.NewNode(cfg)
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, node.Close()) })

	return node
}

// mustListPins returns all files below a node's bpf root.
func mustListPins(t *testing.T, node *sluice.Node) []string {
	t.Helper()
	var pins []string
	lab.Must(t, filepath.WalkDir(node.BPFRoot(), func(path string, _ fs.DirEntry, err error) error {
		pins = append(pins, path)

		return err
	}))

	return pins
}
