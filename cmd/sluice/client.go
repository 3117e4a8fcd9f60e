package main

import (
	"fmt"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	componentconfig "k8s.io/component-base/config/v1alpha1"

	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/pkg/kube"
)

// setClient sets the clients of the API server, and its address. Without a kubeconfig
// and --master that is the ClusterIP of the `kubernetes` Service, which does not work
// before Sluice does: a node without another proxy needs one of the two.
func setClient(cfg *agent.Config, connection componentconfig.ClientConnectionConfiguration, master string) error {
	server, err := restConfig(connection, master)
	if err != nil {
		return err
	}
	cfg.APIServer = server.Host
	if cfg.Client, err = kubernetes.NewForConfig(server); err == nil {
		cfg.Stream, err = kube.NewStream(server)
	}
	if err != nil {
		return fmt.Errorf("API server %s: %w", server.Host, err)
	}

	return nil
}

func restConfig(connection componentconfig.ClientConnectionConfiguration, master string) (*rest.Config, error) {
	var cfg *rest.Config
	var err error
	if connection.Kubeconfig == "" && master == "" {
		cfg, err = rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("API server: %w; give --kubeconfig, --master or --manifests", err)
		}
	} else {
		cfg, err = clientcmd.BuildConfigFromFlags(master, connection.Kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("kubeconfig %q, --master %q: %w", connection.Kubeconfig, master, err)
		}
	}
	cfg.ContentType, cfg.AcceptContentTypes = connection.ContentType, connection.AcceptContentTypes
	cfg.QPS, cfg.Burst = connection.QPS, int(connection.Burst)
	cfg.UserAgent = "sluice/" + version

	return cfg, nil
}
