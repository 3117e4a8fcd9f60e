package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/pkg/doctor"
	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/realproxy"
	"github.com/sluice-lb/sluice/test/sluice"
)

// patient is a node without an agent, which the doctor looks at.
//
//	node-1 192.168.50.1 ─── pod-1-0
type patient struct {
	*sluice.Node
	lab *lab.Node
}

func mustPatient(t testing.TB) *patient {
	t.Helper()
	p := &patient{lab: lab.MustNew(t, lab.Config{Nodes: 1, PodsPerNode: 1, Profile: "plain"}).Nodes[0]}
	var err error
	p.Node, err = sluice.NewNode(sluice.Config{
		Binary: sluice.MustBinary(t), Namespace: p.lab.Namespace, Cgroup: lab.MustCgroup(t, "doctor"), NodeName: "node-1",
		Manifests: t.TempDir(),
	})
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, p.Close()) })

	return p
}

// ask returns what the doctor finds, by check, as "STATE: SEEN", and its exit code.
func (p *patient) ask(t testing.TB, flags ...string) (map[string][]string, int) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	err := p.Exec(&stdout, &stderr, append([]string{"doctor", "-o", "json"}, flags...)...)
	var report doctor.Report
	if err := json.Unmarshal(stdout.Bytes(), &report); err != nil {
		t.Fatalf("sluice doctor: %v: %s%s", err, &stdout, &stderr)
	}
	found := make(map[string][]string)
	for _, f := range report.Findings {
		found[f.Check] = append(found[f.Check], fmt.Sprintf("%s: %s", f.State, f.Seen))
	}
	if err == nil {
		return found, 0
	}

	return found, exitCodeOf(t, err)
}

func exitCodeOf(t testing.TB, err error) int {
	t.Helper()
	exit, ok := err.(interface{ ExitCode() int })
	if !ok {
		t.Fatal(err)
	}

	return exit.ExitCode()
}

// want fails the test unless a check has a finding that begins so.
func want(t testing.TB, found map[string][]string, check, text string) {
	t.Helper()
	if !slices.ContainsFunc(found[check], func(f string) bool { return strings.HasPrefix(f, text) }) {
		t.Errorf("%s: %q, want %q", check, found[check], text)
	}
}

// What stands in the way on a real node is found by the check that has its name, and by no other.
func TestDoctor(t *testing.T) {
	healthy, code := mustPatient(t).ask(t)
	if code != 0 {
		t.Errorf("exit code of a healthy node: %d", code)
	}
	for check, found := range healthy {
		// The cgroup is the test's own, and no API server is named. Other tests may run kube-proxy, and have meshes.
		if !slices.Contains([]string{"cgroup", "api-server", "service-cidrs", "clock", "configuration", "kube-proxy", "mesh"}, check) && !strings.HasPrefix(found[0], "ok: ") {
			t.Errorf("%s of a healthy node: %q", check, found)
		}
	}
	for _, test := range []struct {
		name, check, want string
		code              int
		fall              func(*lab.Namespace) error
	}{
		{
			"a firewall of node ports", "node-port-firewall",
			"warning: these rules will not match packets to Services: nftables inet firewall early drops packets to ports 30000-32767", 0,
			func(ns *lab.Namespace) error {
				return ns.Netfilter("table inet firewall { chain early {\ntype filter hook prerouting priority raw\ntcp dport 30000-32767 drop\n}\n}")
			},
		},
		{
			"a firewall of an old iptables", "node-port-firewall",
			"warning: these rules will not match packets to Services: legacy iptables mangle PREROUTING drops packets to 192.0.2.7/32 to ports 80", 0,
			commands("iptables-legacy -t mangle -A PREROUTING -d 192.0.2.7 -p tcp --dport 80 -j DROP"),
		},
		{
			"Docker's rules against what is sent to containers directly", "node-port-firewall",
			"warning: these rules will match packets to Services, if a backend has the address: nftables ip raw PREROUTING drops packets to 172.17.0.2/32", 0,
			func(ns *lab.Namespace) error {
				return errors.Join(ns.AddBridge("docker0", netip.MustParsePrefix("172.17.0.1/16")),
					commands("iptables-nft -t raw -A PREROUTING -d 172.17.0.2/32 ! -i docker0 -j DROP")(ns))
			},
		},
		{
			"rules of an old iptables that kube-proxy has left", "kube-proxy", "warning: rules of kube-proxy are there: legacy iptables nat", 0,
			commands("iptables-legacy -t nat -N KUBE-SERVICES"),
		},
		{
			"the marks of a VPC CNI", "connection-marks",
			"warning: the CNI marks connections, and routing rule 1024 selects by a mark: nftables ip mangle PREROUTING marks connections of packets", 0,
			commands("iptables-nft -t mangle -A PREROUTING -i eth0 -m addrtype --dst-type LOCAL -j CONNMARK --set-xmark 0x80/0x80",
				"ip rule add pref 1024 fwmark 0x80/0x80 lookup main"),
		},
		{
			"IPsec", "ipsec", "warning: 1 IPsec policies", 0,
			commands("ip xfrm policy add src 192.0.2.0/24 dst 198.51.100.0/24 dir out"),
		},
		{
			"no forwarding", "ip-forward", "problem: net.ipv4.ip_forward is 0", 1,
			func(ns *lab.Namespace) error { return ns.Sysctl("net/ipv4/ip_forward", "0") },
		},
		{
			"strict reverse paths of two uplinks", "rp-filter", "warning: the node has 2 uplinks, and rp_filter is strict on eth9", 0,
			func(ns *lab.Namespace) error {
				uplink := lab.End{Namespace: ns, Device: "eth9", Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24")}}
				lab.MustVeth(t, uplink, lab.End{Namespace: lab.MustNamespace(t, "peer"), Device: "eth0"})

				return ns.Sysctl("net/ipv4/conf/eth9/rp_filter", "1")
			},
		},
		{
			"an ephemeral range with node ports in it", "ports", "warning: sockets of the node get ports 10000-65000", 0,
			func(ns *lab.Namespace) error { return ns.Sysctl("net/ipv4/ip_local_port_range", "10000 65000") },
		},
		{
			"an uplink with a small MTU", "mtu", "warning: pods send packets of up to 1500 bytes", 0,
			func(ns *lab.Namespace) error { return ns.SetMTU("eth0", 1400) },
		},
		{
			"the device of IPVS", "ipvs", "warning: the device kube-ipvs0", 0,
			func(ns *lab.Namespace) error { return ns.AddBridge("kube-ipvs0") },
		},
		{
			"Calico's eBPF dataplane", "calico", "problem: Calico's eBPF dataplane translates Services, too: bpfin.cali", 1,
			func(ns *lab.Namespace) error { return ns.AddBridge("bpfin.cali") },
		},
		{
			"an XDP program", "device-hooks", "warning: XDP programs see packets before Sluice: eth0 xdp: theirs", 0,
			func(ns *lab.Namespace) error {
				attached, err := link.AttachXDP(link.XDPOptions{
					Interface: mustIndex(t, ns, "eth0"), Program: mustProgram(t, ebpf.XDP, 2), Flags: link.XDPGenericMode,
				})
				if err == nil {
					t.Cleanup(func() { attached.Close() })
				}

				return err
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := mustPatient(t)
			lab.MustDo(t, p.lab.Namespace, func() error { return test.fall(p.lab.Namespace) })
			found, code := p.ask(t)
			want(t, found, test.check, test.want)
			if code != test.code {
				t.Errorf("exit code %d, want %d", code, test.code)
			}
			others := maps.Clone(healthy)
			// These have names of the node, or of processes and memory of the machine.
			for _, check := range []string{test.check, "pins", "bpffs", "cgroup", "device-hooks", "kube-proxy", "mesh", "memory"} {
				delete(found, check)
				delete(others, check)
			}
			if diff := cmp.Diff(others, found); diff != "" {
				t.Errorf("other checks (-healthy +now):\n%s", diff)
			}
		})
	}
}

// commands returns a function that runs these in a namespace.
func commands(lines ...string) func(*lab.Namespace) error {
	return func(ns *lab.Namespace) error {
		for _, line := range lines {
			words := strings.Fields(line)
			if _, err := lab.Output(ns, nil, words[0], words[1:]...); err != nil {
				return err
			}
		}

		return nil
	}
}

// mustProgram returns a program that returns a verdict.
func mustProgram(t testing.TB, kind ebpf.ProgramType, verdict int32) *ebpf.Program {
	t.Helper()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "theirs", Type: kind, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, verdict), asm.Return()},
	})
	lab.Must(t, err)
	t.Cleanup(func() { program.Close() })

	return program
}

func mustIndex(t testing.TB, ns *lab.Namespace, device string) int {
	t.Helper()
	l, err := ns.Netlink().LinkByName(device)
	lab.Must(t, err)

	return l.Attrs().Index
}

// The doctor also tells how the agent is, before and after it runs, and what has come before its
// programs since it ended.
func TestDoctorOfAgent(t *testing.T) {
	p := mustPatient(t)
	lab.Must(t, p.Start())
	sluice.MustWait(t, p.Node)
	found, code := p.ask(t)
	want(t, found, "agent", "ok: agent test runs and is well")
	want(t, found, "pins", "ok: the maps below "+p.BPFRoot()+" have the layout of this build")
	want(t, found, "cgroup-hooks", "ok: no other program")
	want(t, found, "device-hooks", "ok: no other program")
	if code != 0 {
		t.Errorf("exit code %d", code)
	}

	lab.Must(t, p.Kill())
	found, code = p.ask(t)
	want(t, found, "agent", "problem: programs without an agent since 20")
	if code != 1 {
		t.Errorf("exit code %d without an agent, want 1", code)
	}

	const actOK = 0 // ends the chain
	lab.MustDo(t, p.lab.Namespace, func() error {
		attached, err := link.AttachTCX(link.TCXOptions{
			Interface: mustIndex(t, p.lab.Namespace, "eth0"), Program: mustProgram(t, ebpf.SchedCLS, actOK),
			Attach: ebpf.AttachTCXIngress, Anchor: link.Head(),
		})
		if errors.Is(err, ebpf.ErrNotSupported) {
			t.Log("no tcx before Linux 6.6")

			return nil
		}
		if err != nil {
			return err
		}
		t.Cleanup(func() { attached.Close() })
		found, _ = p.ask(t)
		want(t, found, "device-hooks", "warning: other programs run before that of Sluice: eth0 ingress: theirs")

		return nil
	})
}

// The rules that the real kube-proxy writes are recognized in each of its modes, also when it has
// ended. None of them is taken for a firewall.
func TestDoctorOfKubeProxy(t *testing.T) {
	c := cluster.Shared(t)
	// kube-proxy waits for its Node.
	c.KubectlInput(t, `{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "doctor-1"},
		"status": {"addresses": [{"type": "InternalIP", "address": "192.168.50.1"}]}}`, "create", "-f", "-")
	defer c.Kubectl(t, "delete", "node", "doctor-1")
	for mode, table := range map[realproxy.Mode]string{
		realproxy.NFTables: "nftables ip kube-proxy", realproxy.IPTables: "nftables ip nat", realproxy.IPTablesLegacy: "legacy iptables nat",
	} {
		t.Run(string(mode), func(t *testing.T) {
			p := mustPatient(t)
			c.MustTunnel(t, p.lab.Namespace)
			proxy, err := realproxy.Start(realproxy.Config{
				Mode: mode, Binary: c.Binary("kube-proxy"), Namespace: p.lab.Namespace, Directory: t.TempDir(),
				Config: fmt.Sprintf(kubeProxyFormat, mode.Name(), c.Kubeconfig()),
			})
			lab.Must(t, err)
			defer func() { lab.Must(t, proxy.Close()) }()
			lab.Eventually(t, "the doctor sees rules of kube-proxy", func() error {
				found, code := p.ask(t)
				text := strings.Join(found["kube-proxy"], " ")
				if !strings.Contains(text, "kube-proxy runs (PID ") || !strings.Contains(text, "rules of kube-proxy are there: ") || !strings.Contains(text, table) {
					return fmt.Errorf("kube-proxy: %q", found["kube-proxy"])
				}
				want(t, found, "node-port-firewall", "ok: ")
				want(t, found, "connection-marks", "ok: ")
				if code != 0 {
					t.Errorf("exit code %d", code)
				}

				return nil
			})
		})
	}
}

const kubeProxyFormat = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
clientConnection: {kubeconfig: %q}
detectLocalMode: ClusterCIDR
clusterCIDR: "10.244.0.0/16,fd00:10:244::/48"
hostnameOverride: doctor-1
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`

// The API server is asked as the agent would ask it.
func TestDoctorAsksTheAPIServer(t *testing.T) {
	c := cluster.Shared(t)
	p := mustPatient(t)
	found, code := p.ask(t, "--kubeconfig", c.Kubeconfig())
	want(t, found, "api-server", "problem: "+c.URL()+": dial tcp")
	if code != 1 {
		t.Errorf("exit code %d without a way to the API server, want 1", code)
	}
	c.MustTunnel(t, p.lab.Namespace)
	found, code = p.ask(t, "--kubeconfig", c.Kubeconfig())
	want(t, found, "api-server", "ok: "+c.URL()+" answers")
	want(t, found, "clock", "ok: ")
	// Namespaces of other tests may have such routes.
	if seen := found["service-cidrs"]; strings.HasPrefix(seen[0], "warning: not compared") {
		t.Errorf("service-cidrs: %q", seen)
	}
	// No Node has the name of this host.
	want(t, found, "configuration", "problem: configuration: hostnameOverride ")
	if code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
}

// Without root, the doctor reports what it could not look at, and is no less exact about the rest.
func TestDoctorWithoutRoot(t *testing.T) {
	p := mustPatient(t)
	folder, err := os.MkdirTemp("", "doctor-")
	lab.Must(t, err)
	defer os.RemoveAll(folder)
	binary := filepath.Join(folder, "sluice")
	content, err := os.ReadFile(p.Binary())
	lab.Must(t, err, os.Chmod(folder, 0o755), os.WriteFile(binary, content, 0o755))
	out, err := lab.Output(p.lab.Namespace, nil, "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", binary, "doctor")
	if err == nil || exitCodeOf(t, errors.Unwrap(err)) != 1 {
		t.Errorf("sluice doctor of another user: %v", err)
	}
	for _, line := range []string{
		"problem   capabilities        this process lacks SYS_ADMIN, NET_ADMIN",
		"warning   kernel              not looked at: ",
		"warning   node-port-firewall  not looked at: ",
		"ok        ip-forward          packets are forwarded",
		"Run sluice doctor as root on the node, or as the Job of deploy/doctor.",
	} {
		if !strings.Contains(out, line) {
			t.Errorf("no line %q in\n%s", line, out)
		}
	}
}

// The doctor changes nothing: no sysctl, no rule, no pin; and it creates no table by looking for it.
func TestDoctorChangesNothing(t *testing.T) {
	p := mustPatient(t)
	lab.Must(t, p.lab.Netfilter("table inet t { chain c {\ntype filter hook prerouting priority raw\ntcp dport 30080 drop\n}\n}"))
	look := func() map[string]string {
		t.Helper()
		seen := make(map[string]string)
		var err error
		for _, line := range []string{"nft list ruleset", "tc qdisc", "ip rule"} {
			words := strings.Fields(line)
			seen[line], err = lab.Output(p.lab.Namespace, nil, words[0], words[1:]...)
			lab.Must(t, err)
		}
		lab.MustDo(t, p.lab.Namespace, func() error {
			for _, name := range []string{"ip_tables_names", "ip6_tables_names"} {
				text, err := os.ReadFile("/proc/thread-self/net/" + name)
				if err != nil && !errors.Is(err, fs.ErrNotExist) {
					return err
				}
				seen[name] = string(text)
			}

			return filepath.WalkDir("/proc/sys/net/ipv4", func(path string, entry fs.DirEntry, err error) error {
				if err != nil || entry.IsDir() {
					return err
				}
				text, _ := os.ReadFile(path) // some can only be written
				seen[path] = string(text)

				return nil
			})
		})

		return seen
	}
	before := look()
	p.ask(t)
	if diff := cmp.Diff(before, look()); diff != "" {
		t.Errorf("changed (-before +after):\n%s", diff)
	}
	if _, err := os.Stat(p.BPFRoot()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder of pins: %v", err)
	}
}
