package scene

import (
	"testing"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/sluice-lb/sluice/test/cluster"
)

// MustClient returns a client of the API server that all tests share, as
// cluster-admin.
func MustClient(t testing.TB) kubernetes.Interface {
	t.Helper()
	cfg := cluster.Shared(t).Config()
	cfg.WarningHandler = rest.NoWarnings{} // externalIPs are deprecated
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}

	return client
}
