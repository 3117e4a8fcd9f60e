package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// While the log is not read, logging takes no time. Afterwards the lines that were queued are there, one with the
// number of those that are lost, and new ones.
func TestNobodyReadsTheLog(t *testing.T) {
	r, w, err := os.Pipe()
	lab.Must(t, err)
	defer r.Close()
	defer w.Close()
	var lost, told atomic.Uint64
	var log *slog.Logger
	lines := newLogWriter(w, &lost, func(n uint64) {
		log.Warn("lost", "lines", n)
		told.Add(1)
	})
	log = slog.New(slog.NewTextHandler(lines, nil))

	const many = 3 * queuedLines
	logged := make(chan struct{})
	go func() {
		defer close(logged)
		for i := range many {
			log.Info(strings.Repeat("x", 100), "line", i)
		}
	}()
	select {
	case <-logged:
	case <-time.After(30 * time.Second):
		t.Fatal("logging waits for the reader of the log")
	}
	if dropped := lost.Load(); dropped == 0 || dropped >= many {
		t.Fatalf("%d of %d lines are lost", dropped, many)
	}

	text := make(chan string)
	go func() {
		all, err := io.ReadAll(r)
		if err != nil {
			t.Error(err)
		}
		text <- string(all)
	}()
	for len(lines.lines) > 0 {
		time.Sleep(time.Millisecond)
	}
	log.Info("the last one")
	lines.flush()
	lab.Must(t, w.Close())
	all := <-text
	// Those that tell it, and the last one, are lines as well.
	if got, logged := uint64(strings.Count(all, "\n")), many+told.Load()+1; got+lost.Load() != logged {
		t.Errorf("%d lines are read and %d lost, of %d", got, lost.Load(), logged)
	}
	// The line that tells it may be lost as well, and another one told instead.
	if want := fmt.Sprintf("msg=lost lines=%d\n", lost.Load()); !strings.Contains(all, want) || !strings.HasSuffix(all, "msg=\"the last one\"\n") {
		t.Errorf("the log ends with %q, want %q and the last line", all[max(0, len(all)-300):], want)
	}
}

// An agent whose log is not read any more does not wait for that when it ends.
func TestFlushOfALogThatNobodyReads(t *testing.T) {
	r, w := io.Pipe()
	defer r.Close()
	var lost atomic.Uint64
	lines := newLogWriter(w, &lost, func(uint64) {})
	fmt.Fprintln(lines, "line")
	begin := time.Now()
	lines.flush()
	if took := time.Since(begin); took < logFlush || took > 30*time.Second {
		t.Errorf("it waited for %v, want %v", took, logFlush)
	}
}

// An agent that ends with an error ends, whether that is read or not.
func TestErrorThatNobodyReads(t *testing.T) {
	r, w := io.Pipe()
	defer r.Close()
	printed := make(chan struct{})
	go func() {
		defer close(printed)
		printError(w, errors.New("it failed"))
	}()
	select {
	case <-printed:
	case <-time.After(30 * time.Second):
		t.Fatal("it waits until the error is read")
	}

	var text strings.Builder
	printError(&text, errors.New("it failed"))
	if want := "sluice: it failed\n"; text.String() != want {
		t.Errorf("printed is %q, want %q", &text, want)
	}
}
