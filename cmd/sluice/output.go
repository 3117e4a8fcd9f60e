package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"
)

// output prints in the format of the flag -o.
type output struct {
	format string
}

func newOutput() *output { return &output{format: "table"} }

func (o *output) flag(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&o.format, "output", "o", o.format, "table, json or yaml")
}

// print writes v in the format of the flag. Draw fills the table.
func (o *output) print(w io.Writer, v any, draw func(*table)) error {
	var text []byte
	var err error
	switch o.format {
	case "table":
		t := newTable(w)
		draw(t)
		t.flush()

		return t.err
	case "json":
		text, err = json.MarshalIndent(v, "", "  ")
		text = append(text, '\n')
	case "yaml":
		text, err = yaml.Marshal(v)
	default:
		return fmt.Errorf("--output %q: it is table, json or yaml", o.format)
	}
	if err != nil {
		return fmt.Errorf("output: %w", err)
	}
	_, err = w.Write(text)

	return err
}

// table aligns rows in columns, up to the next note.
type table struct {
	w   *tabwriter.Writer
	err error // the first of writing
}

func newTable(w io.Writer) *table { return &table{w: tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)} }

// row writes one line of cells; empty cells show as "-".
func (t *table) row(cells ...string) {
	for i, cell := range cells {
		if cell == "" {
			cells[i] = "-"
		}
	}
	t.line(strings.Join(cells, "\t"))
}

// note writes a line of text, which ends the columns.
func (t *table) note(text string) {
	t.flush()
	t.line(text)
	t.flush()
}

func (t *table) line(text string) {
	_, err := fmt.Fprintln(t.w, text)
	t.err = cmp.Or(t.err, err)
}

// flush writes the rows so far, which ends the columns.
func (t *table) flush() { t.err = cmp.Or(t.err, t.w.Flush()) }
