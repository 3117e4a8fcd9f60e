package e2e

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// Each file of testdata/corpus has objects as software that is widely used brings them, or as users had who asked
// about them, and what verbs say on node-1:
//
//	manifests.yaml  the Services and their EndpointSlices, in a namespace of their own
//	sluice          lines "$ VERB…", each with its output; of explain, the first two lines
//
// All of them are on one node. Its comment says where the form comes from, or what was asked.
//
//	node-1 192.168.50.1 ── 10.244.1.2, 10.244.1.3
//	node-2 192.168.50.2 ── 10.244.2.2, 10.244.2.3
func TestCorpus(t *testing.T) {
	paths, err := filepath.Glob("testdata/corpus/*/*.txtar")
	lab.Must(t, err)
	if len(paths) < 22+15 {
		t.Errorf("there are %d files, want at least 37", len(paths))
	}
	manifests := t.TempDir()
	files := make(map[string]*txtar.Archive)
	for _, path := range append(paths, "testdata/corpus/node.txtar") {
		file, err := txtar.ParseFile(path)
		lab.Must(t, err)
		files[path] = file
		name := strings.ReplaceAll(strings.TrimSuffix(strings.TrimPrefix(path, "testdata/corpus/"), ".txtar"), "/", "-")
		lab.Must(t, os.WriteFile(filepath.Join(manifests, name+".yaml"), file.Files[0].Data, 0o600))
	}
	c := lab.MustNew(t, lab.Config{Nodes: 2, PodsPerNode: 2})
	node, err := sluice.NewNode(sluice.Config{
		Binary: sluice.MustBinary(t), Namespace: c.Nodes[0].Namespace,
		Cgroup: lab.MustCgroup(t, "e2e"), NodeName: "node-1", Manifests: manifests, Args: []string{"--nodeport-addresses=primary"},
	})
	lab.Must(t, err)
	t.Cleanup(func() { node.Close() })

	t.Run("it is read by a dry run", func(t *testing.T) {
		var out, log bytes.Buffer
		if err := node.Exec(&out, &log, "agent", "--dry-run", "--manifests", manifests, "--hostname-override=node-1"); err != nil && !strings.Contains(err.Error(), "exit status 1") {
			t.Errorf("%v\n%s", err, &log)
		}
	})
	lab.Must(t, node.Start())
	lab.Must(t, node.WaitSynced(t.Context()))
	for _, path := range paths {
		t.Run("it is "+filepath.Base(path), func(t *testing.T) {
			file := files[path]
			if len(file.Files) < 2 || file.Files[0].Name != "manifests.yaml" || file.Files[1].Name != "sluice" || len(file.Comment) < 20 {
				t.Fatal("it has no comment, manifests.yaml and sluice")
			}
			var got strings.Builder
			for line := range strings.Lines(string(file.Files[1].Data)) {
				verb, is := strings.CutPrefix(line, "$ ")
				if !is {
					continue
				}
				got.WriteString(line)
				var out bytes.Buffer
				args := strings.Fields(verb)
				err := node.Exec(&out, &out, args...)
				text := out.String()
				if args[0] == "explain" && err == nil {
					text = firstOf(text, 2)
				}
				for row := range strings.Lines(text) {
					got.WriteString(strings.TrimRight(row, " \n") + "\n")
				}
			}
			if *update {
				file.Files[1].Data = []byte(got.String())
				lab.Must(t, os.WriteFile(path, txtar.Format(file), 0o600))
			} else if diff := cmp.Diff(string(file.Files[1].Data), got.String()); diff != "" {
				t.Errorf("what it says (-want +got):\n%s", diff)
			}
		})
	}
	t.Run("it is as programmed as it is wanted", func(t *testing.T) {
		if shown, err := node.Run("verify"); err != nil {
			t.Errorf("%v\n%s", err, shown)
		}
	})
}

// firstOf returns the first lines of a text.
func firstOf(text string, n int) string {
	lines := strings.SplitAfterN(text, "\n", n+1)

	return strings.Join(lines[:min(n, len(lines))], "")
}
