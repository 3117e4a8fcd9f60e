package main

import (
	"bytes"
	"io"
	"sync/atomic"
	"time"
)

const (
	// queuedLines is how many lines of the log may wait to be read. A start in a large cluster with
	// many problems logs some hundreds at once.
	queuedLines = 4096
	// logFlush limits how long an agent that ends waits for its last lines to be read.
	logFlush = time.Second
)

// logWriter passes the lines of the log on, and never makes an agent wait until they are read: a container
// runtime that hangs, or one whose disk is full, must not keep Services from being programmed. A line that finds no
// place in the queue, or cannot be written, is lost and counted.
type logWriter struct {
	lines chan []byte
	ended chan struct{}
	lost  *atomic.Uint64
}

// newLogWriter returns a writer to w. It adds to lost the number of lines that are, and calls
// report, which may log that, when lines are written again after some were lost.
func newLogWriter(w io.Writer, lost *atomic.Uint64, report func(lost uint64)) *logWriter {
	l := &logWriter{lines: make(chan []byte, queuedLines), ended: make(chan struct{}), lost: lost}
	go l.pass(w, report)

	return l
}

func (l *logWriter) pass(w io.Writer, report func(lost uint64)) {
	defer close(l.ended)
	known := l.lost.Load()
	for line := range l.lines {
		if line == nil { // see flush
			return
		}
		if _, err := w.Write(line); err != nil {
			l.lost.Add(1)

			continue
		}
		if now := l.lost.Load(); now != known {
			known = now
			report(now)
		}
	}
}

// Write implements [io.Writer]. It is called with whole lines, and never fails.
func (l *logWriter) Write(line []byte) (int, error) {
	select {
	case l.lines <- bytes.Clone(line):
	default:
		l.lost.Add(1)
	}

	return len(line), nil
}

// flush waits until all lines are written, for a second at most. Lines that are logged later are lost.
func (l *logWriter) flush() {
	timeout := time.After(logFlush)
	select {
	case l.lines <- nil:
	case <-timeout:
		return
	}
	select {
	case <-l.ended:
	case <-timeout:
	}
}
