// Image writes the container image of Sluice as an OCI layout, without a container
// engine:
//
//	image -version v1.2.3 -o bin/image linux/amd64=BINARY linux/arm64=BINARY
//
// The same binaries and version give the same digest. `make image` builds the
// binaries, and a tar file of the layout.
package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// repository is the image's name on this machine and on the nodes of a development
// cluster. No registry has that name, so that nothing is pulled from it.
const repository = "localhost/sluice"

// binaryPath is the path of the binary in the image, which has no other file.
const binaryPath = "/usr/bin/sluice"

func config(version string) v1.Config {
	return v1.Config{
		User:       "0:0",
		Env:        []string{"PATH=" + path.Dir(binaryPath)},
		Entrypoint: []string{binaryPath},
		WorkingDir: "/",
		Labels: map[string]string{
			"org.opencontainers.image.title":       "sluice",
			"org.opencontainers.image.description": "Kubernetes Services without kube-proxy",
			"org.opencontainers.image.source":      "https://github.com/sluice-lb/sluice",
			"org.opencontainers.image.licenses":    "Apache-2.0 AND (GPL-2.0-only OR BSD-2-Clause)",
			"org.opencontainers.image.version":     version,
		},
	}
}

func main() {
	version := flag.String("version", "unknown", "the tag of the image")
	out := flag.String("o", "bin/image", "folder of the layout; its content is replaced")
	flag.Parse()

	digest, err := write(*out, *version, flag.Args())
	if err != nil {
		fmt.Fprintf(os.Stderr, "image: %v\n", err)
		os.Exit(1)
	}
	fmt.Printf("%s %s\n%s.tar %s:%s\n", *out, digest, *out, repository, *version)
}

// write replaces the folder by a layout, and returns the digest of its index, which
// has an image for each PLATFORM=BINARY. The layout has no timestamps. The version
// must be a tag.
func write(folder, version string, binaries []string) (v1.Hash, error) {
	tag, err := name.NewTag(repository+":"+version, name.StrictValidation)
	if err != nil {
		return v1.Hash{}, fmt.Errorf("version %q: %w", version, err)
	}
	var index v1.ImageIndex = mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arg := range binaries {
		text, binary, _ := strings.Cut(arg, "=")
		platform, err := v1.ParsePlatform(text)
		if err != nil {
			return v1.Hash{}, fmt.Errorf("platform %q: %w", text, err)
		}
		image, err := imageOf(binary, version, platform)
		if err != nil {
			return v1.Hash{}, fmt.Errorf("platform %q: %w", text, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add: image, Descriptor: v1.Descriptor{Platform: platform},
		})
	}
	if err := os.RemoveAll(folder); err != nil {
		return v1.Hash{}, fmt.Errorf("folder of the layout: %w", err)
	}
	root, err := layout.Write(folder, empty.Index)
	if err == nil {
		err = root.AppendIndex(index, layout.WithAnnotations(map[string]string{
			"org.opencontainers.image.ref.name": version,
			"io.containerd.image.name":          tag.Name(), // the name after ctr images import
		}))
	}
	if err != nil {
		return v1.Hash{}, fmt.Errorf("layout: %w", err)
	}

	return index.Digest()
}

// imageOf returns the image of one platform. Its only layer has the binary and the
// folders on its path.
func imageOf(binary, version string, platform *v1.Platform) (v1.Image, error) {
	content, err := os.ReadFile(binary)
	if err != nil {
		return nil, fmt.Errorf("binary: %w", err)
	}
	var files bytes.Buffer
	w := tar.NewWriter(&files)
	err = errors.Join(
		w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "usr/", Mode: 0o755}),
		w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "usr/bin/", Mode: 0o755}),
		w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: binaryPath[1:], Mode: 0o755, Size: int64(len(content))}),
	)
	if err == nil {
		_, err = w.Write(content)
	}
	if err := errors.Join(err, w.Close()); err != nil {
		return nil, fmt.Errorf("layer: %w", err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(files.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, fmt.Errorf("layer: %w", err)
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err := mutate.Append(base, mutate.Addendum{Layer: layer, History: v1.History{CreatedBy: "deploy/image"}})
	if err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	file, err := image.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Variant = platform.OS, platform.Architecture, platform.Variant
	file.Config = config(version)

	return mutate.ConfigFile(image, file)
}
