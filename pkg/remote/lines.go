package remote

import (
	"bytes"
	"io"
	"strings"
	"sync"
)

// Lines joins outputs of several nodes into one, line by line. A header, as tables have, is written once.
type Lines struct {
	mu     sync.Mutex
	w      io.Writer
	prefix func(node, line string) string
	header string
}

// NewLines returns lines that are written to w. Prefix returns what is written for a line of a node; that of
// a header is called NODE.
func NewLines(w io.Writer, prefix func(node, line string) string) *Lines {
	return &Lines{w: w, prefix: prefix}
}

// Of returns the output of one node. Close writes its last line if that has no end.
func (l *Lines) Of(node string) io.WriteCloser { return &nodeLines{lines: l, node: node, first: true} }

// nodeLines is the output of one node.
type nodeLines struct {
	lines *Lines
	node  string
	first bool // no line has been written
	rest  []byte
}

// Write writes the lines that are complete, and keeps the rest for the next call.
func (n *nodeLines) Write(p []byte) (int, error) {
	n.rest = append(n.rest, p...)
	for {
		line, rest, complete := bytes.Cut(n.rest, []byte("\n"))
		if !complete {
			return len(p), nil
		}
		n.rest = rest
		if err := n.lines.write(n.node, string(line), n.first); err != nil {
			return 0, err
		}
		n.first = false
	}
}

// Close writes what is left.
func (n *nodeLines) Close() error {
	if len(n.rest) == 0 {
		return nil
	}
	_, err := n.Write([]byte("\n"))

	return err
}

func (l *Lines) write(node, line string, first bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if header := betweenCells.ReplaceAllString(strings.TrimSpace(line), "\t"); first && headerCells.MatchString(header) {
		if header == l.header {
			return nil
		}
		node, l.header = "NODE", header
	}
	_, err := io.WriteString(l.w, l.prefix(node, line)+"\n")

	return err
}
