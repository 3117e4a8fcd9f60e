package deploy

import (
	"archive/tar"
	"bytes"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"github.com/sluice-lb/sluice/test/lab"
)

// mustImage makes the image for this machine. The descriptor is that of its index, by
// which nodes import it.
func mustImage(t testing.TB) (v1.Image, v1.Descriptor) {
	t.Helper()
	lab.NeedsRoot(t)
	folder := filepath.Join(t.TempDir(), "layout")
	cmd := exec.Command("make", "--directory=../..", "image", "version=test", "platforms=linux/"+runtime.GOARCH, "image="+folder)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("image: %v: %s", err, out)
	}
	root, err := layout.ImageIndexFromPath(folder)
	if err == nil {
		err = validate.Index(root) // each blob has the size and digest of its descriptor
	}
	lab.Must(t, err)
	named := mustOne(t, root)
	index, err := root.ImageIndex(named.Digest)
	lab.Must(t, err)
	image, err := index.Image(mustOne(t, index).Digest)
	lab.Must(t, err)

	return image, named
}

// mustOne returns the only descriptor of an index.
func mustOne(t testing.TB, index v1.ImageIndex) v1.Descriptor {
	t.Helper()
	manifest, err := index.IndexManifest()
	if err != nil || len(manifest.Manifests) != 1 {
		t.Fatalf("the index is %v, want one descriptor: %v", manifest, err)
	}

	return manifest.Manifests[0]
}

// The image has the binary and nothing else, and is the same if it is made again.
func TestImage(t *testing.T) {
	image, named := mustImage(t)
	if _, again := mustImage(t); again.Digest != named.Digest {
		t.Errorf("the digest is %s, then %s", named.Digest, again.Digest)
	}
	if got, want := named.Annotations["org.opencontainers.image.ref.name"], "localhost/sluice:test"; got != want {
		t.Errorf("its name is %q, want %q", got, want)
	}
	if got, want := mustList(t, image), []string{"755 0:0 usr/bin/sluice"}; !slices.Equal(got, want) {
		t.Errorf("it has the files %q, want %q", got, want)
	}
	file, err := image.ConfigFile()
	lab.Must(t, err)
	if file.OS != "linux" || file.Architecture != runtime.GOARCH {
		t.Errorf("its platform is %s/%s", file.OS, file.Architecture)
	}
	want := v1.Config{
		User:       "0:0",
		Env:        []string{"PATH=/usr/bin"},
		Entrypoint: []string{"/usr/bin/sluice"},
		Labels: map[string]string{
			"org.opencontainers.image.title":       "sluice",
			"org.opencontainers.image.description": "Kubernetes Services without kube-proxy",
			"org.opencontainers.image.source":      "https://github.com/sluice-lb/sluice",
			"org.opencontainers.image.licenses":    "Apache-2.0 AND (GPL-2.0-only OR BSD-2-Clause)",
			"org.opencontainers.image.version":     "test",
		},
	}
	if diff := cmp.Diff(want, file.Config); diff != "" {
		t.Errorf("configuration (-want +got):\n%s", diff)
	}
	if modules := mustModules(t, image); !slices.Contains(modules, "github.com/cilium/ebpf") {
		t.Errorf("the binary lists the modules %q, for who looks for known vulnerabilities", modules)
	}
}

// A version that cannot be a tag is an error that names it.
func TestImageRefuses(t *testing.T) {
	lab.LookAtProduct(t)
	cmd := exec.Command("../../deploy/image.sh", filepath.Join(t.TempDir(), "layout"), "v1+meta", "linux/"+runtime.GOARCH)
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "v1+meta") {
		t.Errorf("version v1+meta: %v: %s", err, out)
	}
}

// mustList returns the files of an image, with their modes and owners.
func mustList(t testing.TB, image v1.Image) (files []string) {
	t.Helper()
	mustRead(t, image, func(header *tar.Header, _ io.Reader) {
		files = append(files, fmt.Sprintf("%o %d:%d %s", header.FileInfo().Mode().Perm(), header.Uid, header.Gid, header.Name))
	})

	return files
}

// mustModules returns the modules that the binary of an image says it is built from.
func mustModules(t testing.TB, image v1.Image) (modules []string) {
	t.Helper()
	mustRead(t, image, func(_ *tar.Header, content io.Reader) {
		binary, err := io.ReadAll(content)
		lab.Must(t, err)
		info, err := buildinfo.Read(bytes.NewReader(binary))
		lab.Must(t, err)
		for _, module := range info.Deps {
			modules = append(modules, module.Path)
		}
	})

	return modules
}

// mustRead reads each file of an image, which has one layer.
func mustRead(t testing.TB, image v1.Image, read func(header *tar.Header, content io.Reader)) {
	t.Helper()
	layers, err := image.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("the image has %d layers, want one: %v", len(layers), err)
	}
	content, err := layers[0].Uncompressed()
	lab.Must(t, err)
	defer content.Close()
	for r := tar.NewReader(content); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		lab.Must(t, err)
		if header.Typeflag != tar.TypeDir {
			read(header, r)
		}
	}
}
