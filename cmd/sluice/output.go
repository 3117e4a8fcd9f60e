package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"unicode"
	"unicode/utf16"

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
		text = append(escapeJSON(text), '\n')
	case "yaml":
		text, err = marshalYAML(v)
	default:
		return fmt.Errorf("--output %q: it is table, json or yaml", o.format)
	}
	if err != nil {
		return fmt.Errorf("output: %w", err)
	}
	_, err = w.Write(text)

	return err
}

// escapeJSON escapes what JSON leaves in texts and a terminal may obey, as controls beyond ASCII and marks that reverse the
// direction of writing. Outside of texts, JSON has none.
func escapeJSON(text []byte) []byte {
	return escape(text, func(r rune) string {
		if r > 0xffff {
			high, low := utf16.EncodeRune(r)

			return fmt.Sprintf(`\u%04x\u%04x`, high, low)
		}

		return fmt.Sprintf(`\u%04x`, r)
	})
}

// marshalYAML returns YAML. Its parser takes no such characters, and its writer escapes controls; what it leaves become
// question marks, as they cannot be escaped in all of its texts.
func marshalYAML(v any) ([]byte, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}

	text, err = yaml.JSONToYAML(escape(text, func(r rune) string { return fmt.Sprintf(`\U%08x`, r) }))

	return escape(text, func(rune) string { return "?" }), err
}

// escape replaces the characters of a text that a terminal may obey.
func escape(text []byte, code func(rune) string) []byte {
	if !bytes.ContainsFunc(text, isObeyed) {
		return text
	}
	var escaped bytes.Buffer
	for _, r := range string(text) {
		if isObeyed(r) {
			escaped.WriteString(code(r))
		} else {
			escaped.WriteRune(r)
		}
	}

	return escaped.Bytes()
}

// isObeyed reports whether a terminal may take a character for anything but a character.
func isObeyed(r rune) bool {
	return r != '\n' && r != '\t' && !unicode.IsPrint(r) && !unicode.Is(unicode.Zs, r)
}

// printable is an output of text for terminals: what others could write, as zones in EndpointSlices or names of programs,
// may have characters that a terminal would obey. They become question marks.
type printable struct{ io.Writer }

// Write implements [io.Writer].
func (p printable) Write(text []byte) (int, error) {
	_, err := p.Writer.Write(escape(text, func(rune) string { return "?" }))

	return len(text), err
}

// table aligns rows in columns, up to the next note.
type table struct {
	w   *tabwriter.Writer
	err error // the first of writing
}

func newTable(w io.Writer) *table {
	return &table{w: tabwriter.NewWriter(printable{w}, 0, 8, 3, ' ', 0)}
}

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
