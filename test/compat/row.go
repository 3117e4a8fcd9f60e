// Package compat holds what is said about everything that kube-proxy shows to
// the outside: its flags, the fields of its configuration file, endpoints,
// metrics and events. There is one YAML file for each, a list of [Row]. The
// package's test checks them, and that docs/kube-proxy.md is made of them;
// with -update it writes that file.
package compat

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"sigs.k8s.io/yaml"
)

// State is how Sluice treats something that kube-proxy has.
type State string

// The states.
const (
	Supported   State = "supported"   // it means here what it means there
	Mapped      State = "mapped"      // it has a different meaning with the same purpose; Here describes it
	Meaningless State = "meaningless" // it is accepted, and nothing follows; Here says why
	Added       State = "added"       // kube-proxy has no such thing
)

// Row is one flag, field, endpoint, metric or event.
type Row struct {
	// Name is as users know it: "--bind-address", "conntrack.min",
	// ":10256/healthz", "kubeproxy_proxy_healthz_total".
	Name string `json:"name"`
	// Default is what holds if nothing is said. Flags and fields have one.
	Default string `json:"default,omitempty"`
	// Labels are those of a metric, with commas between them.
	Labels string `json:"labels,omitempty"`
	State  State  `json:"state"`
	// Here is what it does in Sluice, or why it does nothing. Markdown, no more
	// than a few sentences.
	Here string `json:"here"`
	// Tests show it: FOLDER.NAME of a test function, as pkg/config.TestDefaults,
	// or the path of a script, as test/e2e/testdata/config.txtar.
	Tests []string `json:"tests"`
}

// Validate returns an error that names the field that is missing or wrong.
func (r Row) Validate() error {
	switch {
	case r.Name == "":
		return errors.New("a row without a name")
	case !slices.Contains([]State{Supported, Mapped, Meaningless, Added}, r.State):
		return fmt.Errorf("%s: state %q: there is no such state", r.Name, r.State)
	case r.Here == "":
		return fmt.Errorf("%s: here: it is empty", r.Name)
	case len(r.Tests) == 0:
		return fmt.Errorf("%s: tests: there are none", r.Name)
	}

	return nil
}

// Section is one table.
type Section struct {
	Title string
	// File is where the rows are, in the package's folder.
	File string
	// Lead goes before the table.
	Lead string
	Rows []Row
}

// Read reads all sections from the YAML files in dir.
func Read(dir string) ([]Section, error) {
	all := sections()
	for i := range all {
		rows, err := readRows(filepath.Join(dir, all[i].File))
		if err != nil {
			return nil, err
		}
		all[i].Rows = rows
	}

	return all, nil
}

func readRows(path string) ([]Row, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("rows: %w", err)
	}
	var rows []Row
	if err := yaml.UnmarshalStrict(text, &rows); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	var problems []error
	for _, row := range rows {
		problems = append(problems, row.Validate())
	}
	sorted := slices.SortedFunc(slices.Values(rows), func(a, b Row) int { return cmp.Compare(a.Name, b.Name) })
	for i := 1; i < len(sorted); i++ {
		if sorted[i].Name == sorted[i-1].Name {
			problems = append(problems, fmt.Errorf("%s: there are two rows", sorted[i].Name))
		}
	}
	if err := errors.Join(problems...); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}

	return rows, nil
}
