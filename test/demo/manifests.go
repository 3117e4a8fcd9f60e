package main

import (
	"bytes"
	"embed"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

//go:embed manifests/*.yaml
var manifests embed.FS

// What clients dial, as it is in the manifests.
const (
	webIPv4   = "10.96.0.80:80"
	webIPv6   = "[fd00:10:96::80]:80"
	webMapped = "[::ffff:10.96.0.80]:80"
	webNode   = 30080
	webBytes  = "255,255,10,96,0,80" // the end of it in a map

	dnsIPv4 = "10.96.0.53:53"

	emptyIPv4  = "10.96.0.99:80"
	wrongPort  = "10.96.0.80:81"
	unusedIPv4 = "10.96.0.200:80" // in the ServiceCIDR
)

// Where pods answer, as it is in the manifests.
const (
	webPort = 8080
	dnsPort = 5353
)

// copyManifests puts the manifests, as they are in the repository, into a
// folder.
func copyManifests(dir string) error {
	files, err := fs.Sub(manifests, "manifests")
	if err != nil {
		return err
	}
	names, err := fs.Glob(files, "*.yaml")
	if err != nil {
		return err
	}
	for _, name := range names {
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return err
		}
		if err := replaceFile(filepath.Join(dir, name), text); err != nil {
			return err
		}
	}

	return nil
}

// takeAway removes the endpoints of a pod from all manifests in a folder, as
// the comment in web.yaml describes.
func takeAway(dir, pod string) error {
	paths, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return err
	}
	for _, path := range paths {
		had, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if has := withoutLines(had, "# "+pod); !bytes.Equal(had, has) {
			if err := replaceFile(path, has); err != nil {
				return err
			}
		}
	}

	return nil
}

// withoutLines returns a text without the lines that end in a mark.
func withoutLines(text []byte, mark string) []byte {
	var kept []byte
	for line := range bytes.Lines(text) {
		if !bytes.HasSuffix(bytes.TrimSpace(line), []byte(mark)) {
			kept = append(kept, line...)
		}
	}

	return kept
}

// replaceFile writes a file in one step, as good editors do. The agent passes
// over names that start with a dot.
func replaceFile(path string, text []byte) error {
	draft := filepath.Join(filepath.Dir(path), "."+filepath.Base(path))
	if err := os.WriteFile(draft, text, 0o644); err != nil {
		return fmt.Errorf("manifest: %w", err)
	}

	return os.Rename(draft, path)
}
