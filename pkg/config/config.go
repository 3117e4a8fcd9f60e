// Package config reads kube-proxy's configuration, KubeProxyConfiguration
// v1alpha1, fills in its defaults, checks it, and finds the settings that have no
// effect in Sluice. It knows neither flags nor the agent.
//
// A configuration is read by [Open] and [Decode], which calls [SetDefaults]. Then
// [Complete] and [Validate] follow, and [CheckNode] once the node is known.
package config

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	kubeproxyconfig "k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"
)

// KubeProxy is kube-proxy's configuration.
type KubeProxy = kubeproxyconfig.KubeProxyConfiguration

// kind is the kind that a file must have.
const kind = "KubeProxyConfiguration"

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

// Decode reads YAML or JSON and fills in all defaults. Fields that kube-proxy does
// not have are ignored, and the error unknown names them. The result is not
// complete and not validated yet: see [Complete] and [Validate].
func Decode(text []byte) (cfg *KubeProxy, unknown, err error) {
	cfg, err = decode(text, serializer.EnableStrict)
	if runtime.IsStrictDecodingError(err) {
		unknown = err
		cfg, err = decode(text, serializer.DisableStrict)
	}
	if err != nil {
		return nil, nil, err
	}
	SetDefaults(cfg)

	return cfg, unknown, nil
}

func decode(text []byte, strict serializer.CodecFactoryOptionsMutator) (*KubeProxy, error) {
	scheme := runtime.NewScheme()
	if err := kubeproxyconfig.AddToScheme(scheme); err != nil {
		return nil, err
	}
	object, found, err := serializer.NewCodecFactory(scheme, strict).UniversalDeserializer().Decode(text, nil, nil)
	if err != nil {
		return nil, err
	}
	cfg, ok := object.(*KubeProxy)
	if !ok {
		return nil, fmt.Errorf("it is a %s, and not a %s", found, kind)
	}

	return cfg, nil
}

// Encode returns YAML that [Decode] reads, in the form of kube-proxy's
// --write-config-to: see [Shown].
func Encode(cfg *KubeProxy) ([]byte, error) {
	return yaml.Marshal(Shown(cfg))
}

// Shown returns a copy in the form in which kube-proxy shows its configuration, at
// /configz and with --write-config-to: fields that all sections have are set only
// in the mode's section.
func Shown(cfg *KubeProxy) *KubeProxy {
	shown := cfg.DeepCopy()
	shown.SetGroupVersionKind(kubeproxyconfig.SchemeGroupVersion.WithKind(kind))
	shown.IPTables.MasqueradeAll, shown.NFTables.MasqueradeAll = false, false
	*MasqueradeAll(shown) = *MasqueradeAll(cfg)
	for _, d := range []*metav1.Duration{
		&shown.IPTables.SyncPeriod, &shown.IPTables.MinSyncPeriod,
		&shown.IPVS.SyncPeriod, &shown.IPVS.MinSyncPeriod,
		&shown.NFTables.SyncPeriod, &shown.NFTables.MinSyncPeriod,
	} {
		d.Duration = 0
	}
	period, least := SyncPeriods(shown)
	from, leastFrom := SyncPeriods(cfg)
	*period, *least = *from, *leastFrom
	shown.PortRange = "" // kube-proxy drops it when it reads the file

	return shown
}
