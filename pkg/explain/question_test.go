package explain

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/pkg/pods"
	"github.com/sluice-lb/sluice/test/lab"
)

// A client is a process of the node, an address, or a pod of the node by its name or UID, which needs neither an
// agent nor the API server.
func TestFindClients(t *testing.T) {
	root := t.TempDir()
	write := func(path, content string) {
		t.Helper()
		path = filepath.Join(root, path)
		lab.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		lab.Must(t, os.WriteFile(path, []byte(content), 0o644))
	}
	uid := func(i int) string { return fmt.Sprintf("0f6c2d5e-6b0b-4b1f-9f0e-%012d", i) }
	link := func(process, namespace string) {
		t.Helper()
		folder := filepath.Join(root, "proc", process, "ns")
		lab.Must(t, os.MkdirAll(folder, 0o755))
		lab.Must(t, os.Symlink("net:["+namespace+"]", filepath.Join(folder, "net")))
	}
	link("self", "1")
	for i, pod := range []struct{ name, process, namespace string }{
		{"shop_web-1", "11", "2"}, {"kube-system_proxy", "12", "1"}, {"shop_db-0", "13", "3"}, {"test_db-0", "14", "4"}, {"shop_new", "", ""},
	} {
		write("logs/"+pod.name+"_"+uid(i)+"/0.log", "")
		write("cgroup/kubepods/pod"+uid(i)+"/cgroup.procs", "")
		if pod.process != "" {
			write("cgroup/kubepods/pod"+uid(i)+"/cgroup.procs", pod.process+"\n")
			link(pod.process, pod.namespace)
			write("proc/"+pod.process+"/net/fib_trie", "|-- 10.244.1."+pod.process+"\n/32 host LOCAL\n")
		}
	}
	e := New(Config{Pods: pods.Config{CgroupRoot: filepath.Join(root, "cgroup"), Logs: filepath.Join(root, "logs"), Proc: filepath.Join(root, "proc")}})
	for _, test := range []struct{ from, want string }{
		{"", "[] "},
		{"10.244.1.2", "[10.244.1.2] "},
		{"::ffff:10.244.1.2", "[10.244.1.2] "},
		{"web-1", "[10.244.1.11] Pod shop/web-1"},
		{"pod/web-1", "[10.244.1.11] Pod shop/web-1"},
		{"shop/web-1", "[10.244.1.11] Pod shop/web-1"},
		{uid(0), "[10.244.1.11] Pod shop/web-1"},
		{"proxy", "[] "}, // a process of the node
		{"test/db-0", "[10.244.1.14] Pod test/db-0"},
		{"db-0", "--from db-0: 2 Pods of this node are called so: use NAMESPACE/NAME, or the UID"},
		{"new", "--from new: no process of the Pod is seen, so its address is not known: use the address"},
		{"nosuch", "--from nosuch: no Pod of this node is called so"},
	} {
		var q Question
		addresses, err := e.findClients(test.from, &q)
		got := strings.TrimSpace(fmt.Sprint(addresses, " ", q.Name))
		if err != nil {
			got = err.Error()
		}
		if got != strings.TrimSpace(test.want) {
			t.Errorf("%q: %s, want %s", test.from, got, test.want)
		}
	}
	lab.Must(t, os.RemoveAll(filepath.Join(root, "logs")))
	if _, err := e.findClients("web-1", new(Question)); err == nil || !strings.HasPrefix(err.Error(), "--from web-1: the names of Pods are not known here") {
		t.Errorf("where no names are known: %v", err)
	}
}
