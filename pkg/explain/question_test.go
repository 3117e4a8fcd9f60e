package explain

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/pods"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/pkg/status"
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
	lab.Must(t, os.Mkdir(filepath.Join(root, "logs"), 0o755))
	if _, err := e.findClients("web-1", new(Question)); err == nil || !strings.HasPrefix(err.Error(), "--from web-1: the names of Pods are not known here") {
		t.Errorf("where no names are known: %v", err)
	}
}

// A destination is understood in each form in which a person or a verb of Sluice names it.
func TestAsk(t *testing.T) {
	fakes := maps.NewFakes(100)
	writer, err := reconcile.New(reconcile.Config{Tables: fakes.Tables})
	lab.Must(t, err)
	state := lb.NewState(lb.Node{Name: "node-1"})
	add := func(namespace, name, v4, v6 string, ports ...lb.ServicePort) {
		svc := lb.Service{
			Name: lb.ServiceName{Namespace: namespace, Name: name}, Families: []lb.Family{lb.IPv4, lb.IPv6},
			ClusterIPs: []netip.Addr{netip.MustParseAddr(v4), netip.MustParseAddr(v6)}, Ports: ports,
		}
		state.SetService(svc)
		resolution, _ := state.Resolve(svc.Name)
		writer.Set(svc.Name, time.Time{}, resolution)
	}
	add("default", "web", "10.96.0.10", "fd00:96::10", lb.ServicePort{Name: "http", Protocol: lb.TCP, Port: 80}, lb.ServicePort{Name: "dns", Protocol: lb.UDP, Port: 53})
	add("shop", "db", "10.96.0.11", "fd00:96::11", lb.ServicePort{Protocol: lb.TCP, Port: 5432})
	add(status.ProbeService.Namespace, status.ProbeService.Name, "10.96.0.12", "fd00:96::12", lb.ServicePort{Protocol: lb.TCP, Port: 80}) // is none of the cluster
	lab.Must(t, writer.Apply())
	e := New(Config{Maps: &maps.Pinned{Tables: fakes.Tables}})
	for _, test := range []struct{ from, to, want string }{
		{"", "10.96.0.10:80", "10.96.0.10:80/TCP"},
		{"", "10.96.0.10:80/TCP", "10.96.0.10:80/TCP"},
		{"", "10.96.0.10:53/udp", "10.96.0.10:53/UDP"},
		{"", "[fd00:96::10]:80", "[fd00:96::10]:80/TCP"},
		{"", "[fd00:96::10]:80/TCP", "[fd00:96::10]:80/TCP"},
		{"", "web:80", "10.96.0.10:80/TCP"},
		{"", "default/web:http", "10.96.0.10:80/TCP"},
		{"", "default/web:dns", "10.96.0.10:53/UDP"},
		{"", "svc/web:http", "10.96.0.10:80/TCP"},
		{"", "service/db", "10.96.0.11:5432/TCP"},
		{"", "svc/web:53/UDP", "10.96.0.10:53/UDP"},
		{"", "db.shop", "10.96.0.11:5432/TCP"},
		{"", "db.shop.svc", "10.96.0.11:5432/TCP"},
		{"", "web.default.svc.cluster.local:80", "10.96.0.10:80/TCP"},
		{"", "web.default.svc.cluster.local.:http/TCP", "10.96.0.10:80/TCP"},
		{"fd00::7", "db.shop", "[fd00:96::11]:5432/TCP"},
		{"[fd00::7]", "db.shop", "[fd00:96::11]:5432/TCP"},
		{"198.51.100.7:40000", "db.shop", "10.96.0.11:5432/TCP"},
		{"[fd00::7]:40000", "10.96.0.10:80", "--from [fd00::7]:40000 has no address of the family of 10.96.0.10"},
		{"", "10.96.0.10", "--to 10.96.0.10: the port is missing, as in 10.96.0.10:80"},
		{"", "[fd00:96::10]", "--to [fd00:96::10]: the port is missing, as in [fd00:96::10]:80"},
		{"", "web", "--to web: the Service has the ports 53/udp, 80/tcp: choose one, as in web:53/udp"},
		{"", "svc/web:8080", "--to svc/web:8080: Service default/web has no such port; it has dns 53/udp, http 80/tcp"},
		{"", "db.shop:http", "--to db.shop:http: Service shop/db has no such port; it has 5432/tcp"},
		{"", "shop/web:80", "--to shop/web:80: of those with a ClusterIP, no Service is called \"shop/web\"; there are default/web, shop/db (clients of others connect to what DNS returns)"},
		{"", "nosuch:80", "--to nosuch:80: of those with a ClusterIP, no Service is called \"nosuch\"; there are default/web, shop/db (clients of others connect to what DNS returns)"},
		{"", "web-0.web.default.svc:80", "--to web-0.web.default.svc:80: of those with a ClusterIP, no Service is called \"web-0.web.default.svc\"; there are default/web (clients of others connect to what DNS returns)"},
	} {
		q, err := e.Ask(test.from, test.to, "")
		got := fmt.Sprintf("%s/%s", q.To, q.Protocol)
		if err != nil {
			got = err.Error()
		}
		if got != test.want {
			t.Errorf("from %q to %q: %s, want %s", test.from, test.to, got, test.want)
		}
	}
}
