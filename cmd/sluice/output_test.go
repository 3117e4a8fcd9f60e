package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/test/lab"
)

// What cannot be written in full is an error, wherever that shows: in a row, in a note, or between many rows.
func TestPrintReportsWriteErrors(t *testing.T) {
	for name, draw := range map[string]func(*table){
		"a row":                 func(t *table) { t.row("a", "b") },
		"a note":                func(t *table) { t.note("a") },
		"rows aligned together": func(t *table) { drawFlows(t, make([]flow.Flow, rowsTogether)) },
	} {
		out, in := io.Pipe()
		out.Close()
		if err := newOutput().print(in, nil, draw); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// What others could write reaches no terminal as it is, whatever the format: a name of a program, a zone, an annotation.
func TestNothingIsObeyed(t *testing.T) {
	const (
		evil  = "a\x1b[2Jb\x9bc\u009b2Jd\u202ee\rf\x7fg\ufeffh\U000e0001i"
		plain = "Z\u00fcrich \u65e5\u672c\u00a0\U0001f600"
	)
	for _, format := range []string{"table", "json", "yaml"} {
		var out bytes.Buffer
		o := &output{format}
		lab.Must(t, o.print(&out, []string{evil, plain}, func(t *table) {
			t.row("NAME", "ZONE")
			t.row(evil, plain)
			t.note(evil)
		}))
		for _, r := range out.String() {
			if isObeyed(r) {
				t.Errorf("%s: %U reaches the terminal: %q", format, r, out.String())

				break
			}
		}
		if !strings.Contains(out.String(), "Z\u00fcrich \u65e5\u672c") {
			t.Errorf("%s: a name that can be printed is changed: %q", format, out.String())
		}
		if format == "json" {
			var back []string
			lab.Must(t, json.Unmarshal(out.Bytes(), &back))
			if want := strings.ToValidUTF8(evil, "\ufffd"); back[0] != want || back[1] != plain {
				t.Errorf("a program reads %q, want %q", back, []string{want, plain})
			}
		}
	}
	var errs bytes.Buffer
	printError(&errs, errors.New(evil))
	if strings.ContainsFunc(errs.String(), isObeyed) {
		t.Errorf("an error reaches the terminal as %q", errs.String())
	}
}
