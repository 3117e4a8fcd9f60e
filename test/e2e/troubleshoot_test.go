package e2e

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

const troubleshootPage = "../../docs/troubleshoot.md"

// example is a verb in a page, with its output.
var example = regexp.MustCompile("(?m)^```\n\\$ sluice (explain [^\n]*)\n((?s:.*?))^```$")

// What docs/troubleshoot.md shows of sluice explain is its output, on a node with the Services of
// testdata/troubleshoot.
func TestTroubleshoot(t *testing.T) {
	node, err := sluice.NewNode(sluice.Config{
		Binary: sluice.MustBinary(t), Namespace: lab.MustNew(t, lab.Config{Nodes: 1}).Nodes[0].Namespace,
		Cgroup: lab.MustCgroup(t, "e2e"), NodeName: "node-1", Manifests: "testdata/troubleshoot",
	})
	lab.Must(t, err)
	t.Cleanup(func() { node.Close() })
	lab.Must(t, node.Start())
	lab.Must(t, node.WaitSynced(t.Context()))

	page, err := os.ReadFile(troubleshootPage)
	lab.Must(t, err)
	examples := 0
	rewritten := example.ReplaceAllStringFunc(string(page), func(block string) string {
		examples++
		found := example.FindStringSubmatch(block)
		var out bytes.Buffer
		if err := node.Exec(&out, &out, strings.Fields(found[1])...); err != nil {
			t.Fatalf("sluice %s: %v\n%s", found[1], err, &out)
		}
		if !*update && out.String() != found[2] {
			t.Errorf("sluice %s: the page has\n%sand the output is\n%s", found[1], found[2], &out)
		}

		return "```\n$ sluice " + found[1] + "\n" + out.String() + "```"
	})
	if examples < 7 {
		t.Errorf("only %d examples were found", examples)
	}
	if *update {
		lab.Must(t, os.WriteFile(troubleshootPage, []byte(rewritten), 0o600))
	}
}
