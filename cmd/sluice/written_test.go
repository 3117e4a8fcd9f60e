package main

import (
	"bytes"
	"flag"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"

	"github.com/sluice-lb/sluice/test/lab"
)

var kubeProxy = flag.String("kube-proxy", "", "the binary of kube-proxy: rewrite what testdata/written wants")

// What --write-config-to writes is what kube-proxy 1.37.2 writes, given the same
// flags and the same file: defaults, precedence and all. Each script of
// testdata/written has
//
//	args          flags, a line each
//	config.yaml   the file, if there is one
//	written.yaml  what kube-proxy has written
//
// test/cluster/build.sh kube-proxy builds the binary that -kube-proxy wants.
func TestWrittenAsKubeProxyWrites(t *testing.T) {
	scripts, err := filepath.Glob("testdata/written/*.txtar")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("scripts: %v, %v", scripts, err)
	}
	for _, path := range scripts {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txtar"), func(t *testing.T) {
			script, err := txtar.ParseFile(path)
			lab.Must(t, err)
			dir := t.TempDir()
			args := strings.Fields(string(part(script, "args")))
			if text := part(script, "config.yaml"); text != nil {
				mustWrite(t, filepath.Join(dir, "config.yaml"), text)
				args = append(args, "--config", filepath.Join(dir, "config.yaml"))
			}
			args = append(args, "--write-config-to", filepath.Join(dir, "written.yaml"))
			if *kubeProxy != "" {
				rewrite(t, path, script, args, filepath.Join(dir, "written.yaml"))
			}
			want := part(script, "written.yaml")
			lab.Must(t, execute(io.Discard, append([]string{"agent"}, args...)...))
			got := mustReadFile(t, filepath.Join(dir, "written.yaml"))
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("written (-kube-proxy +sluice):\n%s", diff)
			}
			again := filepath.Join(dir, "again.yaml")
			lab.Must(t, execute(io.Discard, "agent", "--config", filepath.Join(dir, "written.yaml"), "--write-config-to", again))
			if diff := cmp.Diff(string(got), string(mustReadFile(t, again))); diff != "" {
				t.Errorf("reading the written file gives another configuration (-written +read):\n%s", diff)
			}
		})
	}
}

// rewrite replaces written.yaml by what kube-proxy writes.
func rewrite(t *testing.T, path string, script *txtar.Archive, args []string, written string) {
	t.Helper()
	if out, err := exec.Command(*kubeProxy, args...).CombinedOutput(); err != nil {
		t.Fatalf("kube-proxy: %v: %s", err, out)
	}
	want := mustReadFile(t, written)
	at := slices.IndexFunc(script.Files, func(f txtar.File) bool { return f.Name == "written.yaml" })
	if at < 0 {
		script.Files = append(script.Files, txtar.File{Name: "written.yaml", Data: want})
	} else {
		script.Files[at].Data = want
	}
	mustWrite(t, path, txtar.Format(script))
}

// execute runs the command line in this process.
func execute(out io.Writer, args ...string) error {
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(out)
	root.SetErr(new(bytes.Buffer))

	return root.Execute()
}

func part(script *txtar.Archive, name string) []byte {
	for _, f := range script.Files {
		if f.Name == name {
			return f.Data
		}
	}

	return nil
}

func mustWrite(t *testing.T, path string, text []byte) {
	t.Helper()
	lab.Must(t, os.WriteFile(path, text, 0o644))
}

func mustReadFile(t *testing.T, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	lab.Must(t, err)

	return text
}
