package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// repository is the image's name as far as this machine and the nodes of a
// development cluster go. Nothing is pulled from such a name.
const repository = "localhost/sluice"

// binaryPath is where the binary is in the image, and all that is there.
const binaryPath = "/usr/bin/sluice"

// config is what the final stage of the Dockerfile says.
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

// part is the image of one platform.
type part struct {
	platform v1.Platform
	binary   string // a file
}

// write makes the layout, in place of what is in the folder, and returns the
// digest of the index. It has no timestamps. The version must be a tag.
func write(folder, version string, parts []part) (v1.Hash, error) {
	tag, err := name.NewTag(repository+":"+version, name.StrictValidation)
	if err != nil {
		return v1.Hash{}, fmt.Errorf("version %q: %w", version, err)
	}
	var index v1.ImageIndex = mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, p := range parts {
		image, err := p.image(version)
		if err != nil {
			return v1.Hash{}, err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add: image, Descriptor: v1.Descriptor{Platform: &p.platform},
		})
	}
	if err := os.RemoveAll(folder); err != nil {
		return v1.Hash{}, fmt.Errorf("folder of the layout: %w", err)
	}
	root, err := layout.Write(folder, empty.Index)
	if err == nil {
		err = root.AppendIndex(index, layout.WithAnnotations(map[string]string{
			"org.opencontainers.image.ref.name": version,
			"io.containerd.image.name":          tag.Name(), // ctr images import
		}))
	}
	if err != nil {
		return v1.Hash{}, fmt.Errorf("layout: %w", err)
	}

	return index.Digest()
}

// archive writes the files of a layout into a tar file, which containerd imports.
// It has no timestamps.
func archive(folder, file string) error {
	out, err := os.Create(file)
	if err != nil {
		return fmt.Errorf("archive: %w", err)
	}
	w := tar.NewWriter(out)
	files := os.DirFS(folder)
	err = fs.WalkDir(files, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || path == "." {
			return err
		}
		if entry.IsDir() {
			return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: path + "/", Mode: 0o755})
		}
		content, err := fs.ReadFile(files, path)
		if err == nil {
			err = w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: path, Mode: 0o644, Size: int64(len(content))})
		}
		if err == nil {
			_, err = w.Write(content)
		}

		return err
	})
	if err := errors.Join(err, w.Close(), out.Close()); err != nil {
		return fmt.Errorf("archive: %w", err)
	}

	return nil
}

func (p part) image(version string) (v1.Image, error) {
	files, err := p.files()
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(files)), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, fmt.Errorf("layer: %w", err)
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err := mutate.Append(base, mutate.Addendum{
		Layer: layer, History: v1.History{CreatedBy: "deploy/image"},
	})
	if err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	file, err := image.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Variant = p.platform.OS, p.platform.Architecture, p.platform.Variant
	file.Config = config(version)

	return mutate.ConfigFile(image, file)
}

// files is the one layer, as a tar file: the binary and its folders.
func (p part) files() ([]byte, error) {
	binary, err := os.ReadFile(p.binary)
	if err != nil {
		return nil, fmt.Errorf("binary: %w", err)
	}
	var packed bytes.Buffer
	w := tar.NewWriter(&packed)
	var errs []error
	for _, folder := range []string{"usr/", "usr/bin/"} {
		errs = append(errs, w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: folder, Mode: 0o755}))
	}
	header := tar.Header{Typeflag: tar.TypeReg, Name: binaryPath[1:], Mode: 0o755, Size: int64(len(binary))}
	errs = append(errs, w.WriteHeader(&header))
	_, err = w.Write(binary)
	if err := errors.Join(append(errs, err, w.Close())...); err != nil {
		return nil, fmt.Errorf("layer: %w", err)
	}

	return packed.Bytes(), nil
}
