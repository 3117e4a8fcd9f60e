package deploy

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/test/lab"
)

// waitTimeout limits waits for what takes milliseconds: the machine may be compiling.
const waitTimeout = 3 * time.Minute

// machine is a node as a kubelet knows it: a network, cgroups and folders. Those
// that all nodes of the lab would share have stand-ins.
//
//	pod-1-0 10.244.1.2  client ─┬─ node-1 192.168.50.1 ── 192.168.50.100 client
//	pod-1-1 10.244.1.3:8080    ─┤  API server, agent
//	pod-1-2 10.244.1.4:8080    ─┘
type machine struct {
	lab     *lab.Cluster
	node    *lab.Node
	cgroups *cgroups
	bpffs   string // a folder in place of the root
	files   string // all other folders of the node
	image   string // the files of the image
}

func mustMachine(t testing.TB) *machine {
	t.Helper()
	cluster := lab.MustNew(t, lab.Config{Nodes: 1, PodsPerNode: 3, Client: true})
	m := &machine{
		lab:     cluster,
		node:    cluster.Nodes[0],
		cgroups: mustCgroups(t, unified),
		files:   t.TempDir(),
		image:   mustExtract(t),
	}
	m.mustPinFolder(t)
	for _, pod := range m.node.Pods[1:] {
		lab.MustServe(t, pod.Namespace, pod.Name, pod.At(8080)...)
	}

	return m
}

// mustPinFolder makes a place for pins.
func (m *machine) mustPinFolder(t testing.TB) {
	t.Helper()
	m.bpffs = lab.MustBPFRoot(t)
	if err := os.Mkdir(m.bpffs, 0o700); err != nil {
		t.Fatalf("folder of pins: %v", err)
	}
	t.Cleanup(func() {
		remove := func() error { return datapath.Remove(filepath.Join(m.bpffs, "sluice")) }
		if err := errors.Join(m.node.Do(remove), os.Remove(m.bpffs)); err != nil {
			t.Errorf("folder of pins: %v", err)
		}
	})
}

// path is where a folder of the node is.
func (m *machine) path(path string) string {
	switch path {
	case "/sys/fs/bpf":
		return m.bpffs
	case "/sys/fs/cgroup", "/run/netns":
		return path // the node has its own mounts there, and the names of the lab
	}

	return filepath.Join(m.files, path)
}

// mustExtract returns a folder with the files of the image.
func mustExtract(t testing.TB) string {
	t.Helper()
	image, _ := mustImage(t)
	files := t.TempDir()
	content := mutate.Extract(image)
	defer content.Close()
	if err := untar(content, files); err != nil {
		t.Fatalf("files of the image: %v", err)
	}

	return files
}

func untar(from io.Reader, to string) error {
	for r := tar.NewReader(from); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		path := filepath.Join(to, header.Name)
		if header.Typeflag == tar.TypeDir {
			if err := os.MkdirAll(path, header.FileInfo().Mode()); err != nil {
				return err
			}

			continue
		}
		content, err := io.ReadAll(r)
		if err == nil {
			err = os.WriteFile(path, content, header.FileInfo().Mode())
		}
		if err != nil {
			return err
		}
	}
}
