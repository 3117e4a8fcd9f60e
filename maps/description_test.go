package maps

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/test/golden"
	"github.com/sluice-lb/sluice/test/lab"
)

// Every map of maps.h is described, and no other.
func TestDescriptions(t *testing.T) {
	specs, err := mapSpecs()
	lab.Must(t, err)
	have := slices.Sorted(slices.Values(namesOf(func(description) bool { return true })))
	if diff := gocmp.Diff(slices.Sorted(maps.Keys(specs)), have); diff != "" {
		t.Errorf("descriptions (-maps.h +descriptions):\n%s", diff)
	}
}

// The tables in docs/maps.md are made from the descriptions: go test ./maps -run Docs -update
func TestDocs(t *testing.T) {
	const path = "../docs/maps.md"
	text, err := os.ReadFile(path)
	lab.Must(t, err)
	specs, err := mapSpecs()
	lab.Must(t, err)
	page := string(text)
	for _, state := range []bool{false, true} {
		folder := Version
		if state {
			folder = StateVersion
		}
		var table strings.Builder
		fmt.Fprintf(&table, "| pin in `%s` | key → value | written by |\n|---|---|---|\n", folder)
		for _, d := range descriptions {
			if d.state != state {
				continue
			}
			chunks := ""
			if isChunked(specs[d.name]) {
				chunks = " *"
			}
			fmt.Fprintf(&table, "| `%s`%s | %s | %s |\n", d.name, chunks, d.content, d.writers)
		}
		before, rest, ok := strings.Cut(page, "| pin in `"+folder+"` ")
		if !ok {
			t.Fatalf("%s has no table of %s", path, folder)
		}
		_, after, _ := strings.Cut(rest, "\n\n")
		page = before + table.String() + "\n" + after
	}
	golden.Match(t, path, page)
}
