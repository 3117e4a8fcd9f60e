// Package config reads kube-proxy's configuration, KubeProxyConfiguration
// v1alpha1, fills in its defaults, checks it, and finds the settings that have no
// effect in Sluice. It knows neither flags nor the agent.
//
// A configuration goes through [Decode], which calls [SetDefaults], then
// [Complete] and [Validate]; once the node is known, through [CheckNode].
package config

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	kubeproxyconfig "k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"
)

// KubeProxy is kube-proxy's configuration.
type KubeProxy = kubeproxyconfig.KubeProxyConfiguration

// kind is the kind that a file must have.
const kind = "KubeProxyConfiguration"

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
