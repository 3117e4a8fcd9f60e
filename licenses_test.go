package sluice_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The kernel accepts our programs, and others may use them, under either
// license. The rest of the tree is under LICENSE.
const bothLicenses = "/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */"

func TestLicensesOfC(t *testing.T) {
	var sources []string
	for _, pattern := range []string{"bpf/*.[ch]", "bpf/*/*.[ch]", "maps/*.[ch]"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		sources = append(sources, found...)
	}
	for _, name := range sources {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		code := strings.TrimPrefix(string(text), "//go:build ignore\n\n")
		if !strings.HasPrefix(code, bothLicenses+"\n") {
			t.Errorf("%s does not begin with %s", name, bothLicenses)
		}
	}
}
