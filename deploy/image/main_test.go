package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

var platforms = []v1.Platform{{OS: "linux", Architecture: "amd64"}, {OS: "linux", Architecture: "arm64"}}

// mustWrite writes a layout with text for binaries, each its own.
func mustWrite(t *testing.T, version string) (folder string, digest v1.Hash) {
	t.Helper()
	var binaries []string
	for _, platform := range platforms {
		binary := filepath.Join(t.TempDir(), "binary")
		if err := os.WriteFile(binary, []byte("for "+platform.String()), 0o600); err != nil {
			t.Fatal(err)
		}
		binaries = append(binaries, platform.String()+"="+binary)
	}
	folder = filepath.Join(t.TempDir(), "layout")
	digest, err := write(folder, version, binaries)
	if err != nil {
		t.Fatal(err)
	}

	return folder, digest
}

// mustImages reads the images of a layout, by platform. Every blob must have the
// size and digest of its descriptor.
func mustImages(t *testing.T, folder string) map[string]v1.Image {
	t.Helper()
	root, err := layout.ImageIndexFromPath(folder)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(root); err != nil {
		t.Fatal(err)
	}
	manifest, err := root.IndexManifest()
	if err != nil || len(manifest.Manifests) != 1 {
		t.Fatalf("the layout has %v, want one index: %v", manifest, err)
	}
	index, err := root.ImageIndex(manifest.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	if manifest, err = index.IndexManifest(); err != nil {
		t.Fatal(err)
	}
	images := make(map[string]v1.Image)
	for _, is := range manifest.Manifests {
		images[is.Platform.String()], err = index.Image(is.Digest)
		if err != nil {
			t.Fatal(err)
		}
	}

	return images
}

// mustFiles lists the files of an image, with their modes and content.
func mustFiles(t *testing.T, image v1.Image) (files []string) {
	t.Helper()
	layers, err := image.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("the image has %d layers, want one: %v", len(layers), err)
	}
	content, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer content.Close()
	for r := tar.NewReader(content); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if header.Typeflag == tar.TypeDir {
			continue
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, fmt.Sprintf("%o %d:%d /%s %s", header.Mode, header.Uid, header.Gid, header.Name, text))
	}
}

func TestLayoutHasAnImageForEachPlatform(t *testing.T) {
	folder, _ := mustWrite(t, "v1")
	images := mustImages(t, folder)
	if len(images) != len(platforms) {
		t.Errorf("the index has %d images, want %d", len(images), len(platforms))
	}
	for _, platform := range platforms {
		image, ok := images[platform.String()]
		if !ok {
			t.Errorf("no image for %s", platform)

			continue
		}
		want := []string{fmt.Sprintf("755 0:0 %s for %s", binaryPath, platform)}
		if got := mustFiles(t, image); !slices.Equal(got, want) {
			t.Errorf("%s has the files %q, want %q", platform, got, want)
		}
		file, err := image.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		if got := *file.Platform(); !got.Equals(platform) {
			t.Errorf("the image of %s has the platform %s", platform, got)
		}
		if !file.Created.IsZero() {
			t.Errorf("the image of %s has a time of creation: %s", platform, file.Created)
		}
		if diff := cmp.Diff(config("v1"), file.Config); diff != "" {
			t.Errorf("%s: configuration (-want +got):\n%s", platform, diff)
		}
	}
}

func TestLayoutIsReproducible(t *testing.T) {
	first, once := mustWrite(t, "v1")
	again, twice := mustWrite(t, "v1")
	if once != twice {
		t.Errorf("the digest is %s, then %s", once, twice)
	}
	if diff := cmp.Diff(mustRead(t, first), mustRead(t, again)); diff != "" {
		t.Errorf("the layout is written otherwise the second time:\n%s", diff)
	}
	if _, other := mustWrite(t, "v2"); other == once {
		t.Error("another version has the same digest")
	}
}

// A second write leaves nothing of the first behind.
func TestLayoutReplaces(t *testing.T) {
	folder, _ := mustWrite(t, "v1")
	before := mustRead(t, folder)
	binary := filepath.Join(t.TempDir(), "binary")
	if err := os.WriteFile(binary, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := write(folder, "v2", []string{platforms[0].String() + "=" + binary}); err != nil {
		t.Fatal(err)
	}
	for file := range mustRead(t, folder) {
		if _, old := before[file]; old && strings.HasPrefix(file, "blobs/") {
			t.Errorf("%s is left of the layout before", file)
		}
	}
	mustImages(t, folder)
}

// mustRead returns the files of a folder with their content.
func mustRead(t *testing.T, folder string) map[string]string {
	t.Helper()
	files := make(map[string]string)
	err := filepath.WalkDir(folder, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		name, _ := filepath.Rel(folder, path)
		content, err := os.ReadFile(path)
		files[name] = string(content)

		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	return files
}

// containerd takes the name from the entry of the layout's index.
func TestLayoutHasAName(t *testing.T) {
	folder, _ := mustWrite(t, "v1.2-3-gabc-dirty")
	root, err := layout.ImageIndexFromPath(folder)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := root.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"io.containerd.image.name":          "localhost/sluice:v1.2-3-gabc-dirty",
		"org.opencontainers.image.ref.name": "v1.2-3-gabc-dirty",
	}
	if diff := cmp.Diff(want, manifest.Manifests[0].Annotations); diff != "" {
		t.Errorf("the annotations are not as wanted:\n%s", diff)
	}
	for want, write := range map[string]func() (v1.Hash, error){
		`version "v1+meta"`:              func() (v1.Hash, error) { return write(folder, "v1+meta", nil) },
		`platform "linux/a/b/c"`:         func() (v1.Hash, error) { return write(folder, "v1", []string{"linux/a/b/c=x"}) },
		`platform "linux/amd64": binary`: func() (v1.Hash, error) { return write(folder, "v1", []string{"linux/amd64=/nosuch"}) },
	} {
		if _, err := write(); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("error is %v, want %s", err, want)
		}
	}
}
