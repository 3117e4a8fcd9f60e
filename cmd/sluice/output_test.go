package main

import (
	"io"
	"testing"

	"github.com/sluice-lb/sluice/pkg/flow"
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
