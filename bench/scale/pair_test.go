package scale

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
)

// BenchmarkBesideKubeProxy starts the real kube-proxy and Sluice in turn, on the
// same node and against the same API server, until all that is in it is
// programmed, and tells what each of them took: time, CPU (kube-proxy's includes
// its nft processes, which do half of the work), and memory at the peak and
// at rest (without nft's).
func BenchmarkBesideKubeProxy(b *testing.B) {
	if !*real {
		b.Skip("without -apiserver")
	}
	ns := lab.MustNew(b, lab.Config{Nodes: 1}).Nodes[0].Namespace
	var c *cluster.Cluster
	must(b, ns.Do(func() error {
		c = cluster.Start(b)

		return nil
	}))
	mustFill(b, c)
	mustCreateNode(b, c)
	for b.Loop() {
		mustMeasure(b, "kube-proxy", func() costs { return mustCostsOfKubeProxy(b, ns, c) })
		mustMeasure(b, "sluice", func() costs { return mustCostsOfSluice(b, ns, c) })
	}
}

// kubeProxyConfig leaves alone what belongs to the machine.
const kubeProxyConfig = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
hostnameOverride: %s
clusterCIDR: 11.0.0.0/8
clientConnection:
  kubeconfig: %s
conntrack:
  maxPerCore: 0
  tcpEstablishedTimeout: 0s
  tcpCloseWaitTimeout: 0s
oomScoreAdj: 0
`

// costs are what a proxy took to start.
type costs struct {
	took, cpu  time.Duration
	peak, rest float64 // bytes
}

// rest is how long after all is programmed a proxy is left alone, before its memory
// at rest is read.
const rest = 15 * time.Second

func mustMeasure(b *testing.B, name string, measure func() costs) {
	b.Helper()
	c := measure()
	b.ReportMetric(c.took.Seconds(), name+"-s")
	b.ReportMetric(c.cpu.Seconds(), name+"-cpu-s")
	b.ReportMetric(c.peak/1e6, name+"-peak-MB")
	b.ReportMetric(c.rest/1e6, name+"-rest-MB")
	b.Logf("%s: %.1f s, CPU %.1f s, memory %.0f MB at its peak, %.0f MB at rest",
		name, c.took.Seconds(), c.cpu.Seconds(), c.peak/1e6, c.rest/1e6)
}

func mustCostsOfSluice(b *testing.B, ns *lab.Namespace, c *cluster.Cluster) costs {
	b.Helper()
	n := mustNodeOf(b, ns, c.Kubeconfig())
	start := time.Now()
	n.mustStart(b)
	costs := mustCostsOf(b, n.PID(), start)
	must(b, n.Close())

	return costs
}

func mustCostsOfKubeProxy(b *testing.B, ns *lab.Namespace, c *cluster.Cluster) costs {
	b.Helper()
	config := filepath.Join(b.TempDir(), "config.yaml")
	text := fmt.Sprintf(kubeProxyConfig, nodeName, c.Kubeconfig())
	must(b, os.WriteFile(config, []byte(text), 0o600))
	cmd := exec.Command(c.Binary("kube-proxy"), "--config", config)
	cmd.Env = append(os.Environ(), "PATH=/usr/sbin:/usr/bin:/sbin:/bin")
	log, err := os.Create(filepath.Join(b.TempDir(), "kube-proxy.log"))
	must(b, err)
	cmd.Stdout, cmd.Stderr = log, log
	start := time.Now()
	must(b, ns.Do(cmd.Start))
	for deadline := start.Add(10 * time.Minute); !hasSynced(ns); {
		if time.Now().After(deadline) {
			tail, _ := os.ReadFile(log.Name())
			b.Fatalf("kube-proxy has not synced in 10 minutes:\n%s", tail[max(0, len(tail)-4096):])
		}
		time.Sleep(20 * time.Millisecond)
	}
	costs := mustCostsOf(b, cmd.Process.Pid, start)
	must(b, cmd.Process.Kill())
	_ = cmd.Wait() // it was killed
	must(b, ns.Do(exec.Command("/usr/sbin/nft", "flush", "ruleset").Run))

	return costs
}

// mustCostsOf reads what a process took that has just programmed everything.
func mustCostsOf(b *testing.B, pid int, start time.Time) costs {
	b.Helper()
	c := costs{took: time.Since(start), cpu: mustReadCPUOf(b, pid)}
	time.Sleep(rest)
	c.peak, c.rest = mustReadMemoryOf(b, pid, "VmHWM"), mustReadMemoryOf(b, pid, "VmRSS")

	return c
}

// hasSynced says whether kube-proxy has programmed IPv4 once.
func hasSynced(ns *lab.Namespace) bool {
	var conn net.Conn
	err := ns.Do(func() (err error) {
		conn, err = net.DialTimeout("tcp", "127.0.0.1:10249", time.Second)

		return err
	})
	if err != nil {
		return false
	}
	defer conn.Close()
	request, err := http.NewRequest(http.MethodGet, "http://127.0.0.1:10249/metrics", nil)
	if err != nil || request.Write(conn) != nil {
		return false
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), request)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return false
	}
	const gauge = `kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} `
	_, value, ok := strings.Cut(string(body), gauge)

	return ok && !strings.HasPrefix(value, "0\n")
}

// mustCreateNode creates the Node, for whose addresses kube-proxy would wait.
func mustCreateNode(b *testing.B, c *cluster.Cluster) {
	b.Helper()
	client, err := kubernetes.NewForConfig(c.Config())
	must(b, err)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}
	node, err = client.CoreV1().Nodes().Create(b.Context(), node, metav1.CreateOptions{})
	must(b, err)
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.168.50.1"}}
	_, err = client.CoreV1().Nodes().UpdateStatus(b.Context(), node, metav1.UpdateOptions{})
	must(b, err)
}
