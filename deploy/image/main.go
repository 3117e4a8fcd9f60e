// Image writes the container image of Sluice as an OCI layout and as a tar file of
// that, without a container engine. It is the image that the Dockerfile describes.
// The same source, version and Go give the same digest.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

func main() {
	version := flag.String("version", "unknown", "what `sluice version` says, and the tag of the image")
	platforms := flag.String("platforms", "linux/amd64,linux/arm64", "for what to build")
	out := flag.String("o", "bin/image", "folder of the layout; what is there goes. The tar file is beside it")
	flag.Parse()

	digest, err := run(*out, *version, strings.Split(*platforms, ","))
	if err == nil {
		err = archive(*out, *out+".tar")
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "image: %v\n", err)
		os.Exit(1)
	}
	fmt.Printf("%s %s\n%s.tar %s:%s\n", *out, digest, *out, repository, *version)
}

func run(out, version string, platforms []string) (v1.Hash, error) {
	aside, err := os.MkdirTemp("", "sluice-image-")
	if err != nil {
		return v1.Hash{}, fmt.Errorf("folder of binaries: %w", err)
	}
	defer os.RemoveAll(aside)

	var parts []part
	for _, text := range platforms {
		platform, err := v1.ParsePlatform(text)
		if err != nil {
			return v1.Hash{}, fmt.Errorf("platform %q: %w", text, err)
		}
		binary := filepath.Join(aside, strings.ReplaceAll(text, "/", "-"))
		if err := compile(binary, version, *platform); err != nil {
			return v1.Hash{}, fmt.Errorf("platform %s: %w", text, err)
		}
		parts = append(parts, part{platform: *platform, binary: binary})
	}

	return write(out, version, parts)
}

const modulePath = "github.com/sluice-lb/sluice"

// buildArgs is what the Dockerfile says to go.
func buildArgs(binary, version string) []string {
	return []string{"build", "-trimpath", "-buildvcs=false",
		"-ldflags", "-s -w -X main.version=" + version, "-o", binary, modulePath + "/cmd/sluice"}
}

func compile(binary, version string, platform v1.Platform) error {
	cmd := exec.Command("go", buildArgs(binary, version)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+platform.OS, "GOARCH="+platform.Architecture)
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build of sluice: %w", err)
	}

	return nil
}
