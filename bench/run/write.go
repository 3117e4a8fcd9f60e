package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// write writes the report in all its forms.
func (b *bencher) write() error {
	if err := os.MkdirAll(b.output, 0o755); err != nil {
		return fmt.Errorf("folder of the report: %w", err)
	}
	_, err := b.report.WritePlots(b.output)
	for name, write := range map[string]func(io.Writer) error{
		"report.txt":  b.report.WriteText,
		"report.md":   func(w io.Writer) error { return b.report.WriteMarkdown(w) },
		"report.json": b.report.WriteJSON,
	} {
		err = errors.Join(err, writeFile(filepath.Join(b.output, name), write))
	}
	b.logf("the report is in %s", b.output)

	return err
}

func writeFile(path string, write func(io.Writer) error) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}

	return errors.Join(write(file), file.Close())
}
