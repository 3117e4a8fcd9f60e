package config

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// ErrChanged ends [File.Follow]: the process has to be started again.
var ErrChanged = errors.New("the configuration has changed; this process has to be started again")

// pollInterval is the time between two reads of a configuration file. The kubelet takes a minute
// to show a change of a ConfigMap.
const pollInterval = time.Second

// File is a configuration file that was read.
type File struct {
	path     string
	text     []byte
	interval time.Duration // of reads
}

// Open reads the file at path.
func Open(path string) (*File, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}

	return &File{path: path, text: text, interval: pollInterval}, nil
}

// Decode is [Decode] of the text that the file had when it was opened.
func (f *File) Decode() (cfg *KubeProxy, unknown, err error) {
	if cfg, unknown, err = Decode(f.text); err != nil {
		err = fmt.Errorf("%s: %w", f.path, err)
	}

	return cfg, unknown, err
}

// Follow waits until the path leads to another text than when the file was opened, and returns
// an error wrapping [ErrChanged] then: the file was written, or another took its place, be it by
// a link on the way to it, as in the volume of a ConfigMap. It returns nil when ctx ends. A file
// that cannot be read has not changed: it may come back.
func (f *File) Follow(ctx context.Context) error {
	poll := time.NewTicker(f.interval)
	defer poll.Stop()
	for {
		text, err := os.ReadFile(f.path)
		if err == nil && !bytes.Equal(text, f.text) {
			return fmt.Errorf("%s: %w", f.path, ErrChanged)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-poll.C:
		}
	}
}
