package lab

import (
	"strings"
	"sync"
)

// Log keeps what is printed. Any goroutine may write and read it.
type Log struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write implements [io.Writer].
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()

	return l.text.Write(p)
}

// String returns all that was printed so far.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()

	return l.text.String()
}
