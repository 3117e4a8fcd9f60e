package main

import (
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/pkg/config"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/test/lab"
)

// namesNothing are the fields and flags that name nothing which could be missing: numbers, durations, switches and words
// of which validation refuses those that there are not.
var namesNothing = strings.Fields(`
	apiVersion kind
	clientConnection.acceptContentTypes clientConnection.contentType clientConnection.qps clientConnection.burst
	logging.format logging.flushFrequency logging.verbosity logging.options.text.splitStream logging.options.text.infoBufferSize
	logging.options.json.splitStream logging.options.json.infoBufferSize logging.vmodule
	bindAddressHardFail enableProfiling showHiddenMetricsForVersion mode
	iptables.masqueradeBit iptables.masqueradeAll iptables.localhostNodePorts iptables.syncPeriod iptables.minSyncPeriod
	ipvs.syncPeriod ipvs.minSyncPeriod ipvs.scheduler ipvs.excludeCIDRs ipvs.strictARP ipvs.tcpTimeout ipvs.tcpFinTimeout ipvs.udpTimeout
	nftables.masqueradeBit nftables.masqueradeAll nftables.syncPeriod nftables.minSyncPeriod
	winkernel.networkName winkernel.sourceVip winkernel.enableDSR winkernel.rootHnsEndpointName winkernel.forwardHealthCheckVip
	detectLocalMode oomScoreAdj
	conntrack.maxPerCore conntrack.min conntrack.tcpEstablishedTimeout conntrack.tcpCloseWaitTimeout conntrack.tcpBeLiberal
	conntrack.udpTimeout conntrack.udpStreamTimeout
	configSyncPeriod portRange windowsRunAsService

	--kube-api-content-type --kube-api-qps --kube-api-burst --oom-score-adj --version --boot-id-file --machine-id-file
	--healthz-port --metrics-port --bind-address-hard-fail --profiling --show-hidden-metrics-for-version
	--proxy-mode --masquerade-all --iptables-localhost-nodeports --iptables-sync-period --iptables-min-sync-period --iptables-masquerade-bit
	--ipvs-sync-period --ipvs-min-sync-period --ipvs-scheduler --ipvs-exclude-cidrs --ipvs-strict-arp --ipvs-tcp-timeout --ipvs-tcpfin-timeout
	--ipvs-udp-timeout --config-sync-period --detect-local-mode
	--conntrack-max-per-core --conntrack-min --conntrack-tcp-timeout-established --conntrack-tcp-timeout-close-wait
	--conntrack-tcp-be-liberal --conntrack-udp-timeout --conntrack-udp-timeout-stream
	--cleanup --init-only --write-config-to --dry-run
	--log-flush-frequency --log-json-info-buffer-size --log-json-split-stream --log-text-info-buffer-size --log-text-split-stream
	--logging-format --v --vmodule
	--udp --device-attach --forwarding --flow-table-memory --mark --algorithm --pod-opt-out --heal --service-metrics --handshake-metrics
	--hash-table-size --hash-seed --backend-metrics --fail-fast`)

// absent are configurations that name what neither the node below nor its cluster has. Each is refused, with the error
// refused, or its status is not well, with a trouble that has all texts of told; or else nothing is missed.
var absent = []struct {
	name, names string // what the case covers: fields and flags
	fields      string
	args        []string
	refused     string
	told        []string
	appears     func(*node.State, *kube.Node) // what is told ends with it
}{
	{name: "a node name", names: "hostnameOverride", fields: "hostnameOverride: node-9",
		told: []string{"configuration: hostnameOverride node-9: the cluster has no Node of this name", "Set hostnameOverride"}, appears: called("node-9")},
	{name: "a node name by a flag", names: "--hostname-override", fields: "none", args: []string{"--hostname-override=node-9"},
		told: []string{"hostnameOverride node-9"}, appears: called("node-9")},
	{name: "an address of the node", names: "bindAddress", fields: "bindAddress: 192.168.50.9",
		told: []string{"configuration: bindAddress 192.168.50.9: no device of this node has this address"}, appears: owning("192.168.50.9")},
	{name: "an address of the node by a flag", names: "--bind-address", fields: "none", args: []string{"--bind-address=192.168.50.9", "--nodeport-addresses=primary"},
		told: []string{"bindAddress 192.168.50.9: no device of this node has this address: node ports do not answer on IPv4"}, appears: owning("192.168.50.9")},
	{name: "ranges of node ports", names: "nodePortAddresses", fields: "nodePortAddresses: [203.0.113.0/24, 198.51.100.0/24]",
		told: []string{"configuration: nodePortAddresses 203.0.113.0/24,198.51.100.0/24: none of this node's addresses is in it: 192.168.50.1, 10.244.1.1; node ports do not answer on IPv4"}, appears: owning("198.51.100.7")},
	{name: "ranges of node ports by a flag", names: "--nodeport-addresses", fields: "none", args: []string{"--nodeport-addresses=2001:db8::/64"},
		told: []string{"nodePortAddresses 2001:db8::/64: none of this node's addresses is in it: fd00:50::1; node ports do not answer on IPv6"}, appears: owning("2001:db8::7")},
	{name: "one of several ranges", fields: "nodePortAddresses: [203.0.113.0/24, 192.168.0.0/16, 'fd00::/8']"},
	{name: "loopback addresses alone", fields: "nodePortAddresses: [127.0.0.0/8, '::1/128']"},
	{name: "a bridge", names: "detectLocal.bridgeInterface", fields: "detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cbr0}",
		told: []string{"configuration: detectLocal.bridgeInterface cbr0: none of the devices that lead to pods (veth1) is detected by it"}, appears: renamed("cni0", "cbr0")},
	{name: "a bridge by a flag", names: "--pod-bridge-interface", fields: "none", args: []string{"--detect-local-mode=BridgeInterface", "--pod-bridge-interface=cbr0"},
		told: []string{"detectLocal.bridgeInterface cbr0"}, appears: renamed("cni0", "cbr0")},
	{name: "no bridge", fields: "detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0}"},
	{name: "a prefix of names", names: "detectLocal.interfaceNamePrefix", fields: "detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: cali}",
		told: []string{"configuration: detectLocal.interfaceNamePrefix cali: none of the devices that lead to pods (veth1)"}, appears: renamed("veth1", "cali1")},
	{name: "a prefix of names by a flag", names: "--pod-interface-name-prefix", fields: "none", args: []string{"--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=cali"},
		told: []string{"detectLocal.interfaceNamePrefix cali"}, appears: renamed("veth1", "cali1")},
	{name: "pods' addresses", names: "clusterCIDR", fields: "clusterCIDR: 10.200.0.0/16",
		told: []string{"configuration: clusterCIDR 10.200.0.0/16: the podCIDR of this node, 10.244.1.0/24, is not in it"}, appears: servingPods("10.200.1.0/24")},
	{name: "pods' addresses by a flag", names: "--cluster-cidr", fields: "none", args: []string{"--cluster-cidr=10.200.0.0/16"},
		told: []string{"clusterCIDR 10.200.0.0/16"}, appears: servingPods("10.200.1.0/24")},
	{name: "a device", names: "--devices", fields: "none", args: []string{"--devices=enp0s9,eth0,veth*"},
		told: []string{"configuration: --devices enp0s9: this node has no such device"}, appears: uplink("enp0s9")},
	{name: "all devices of a kind", fields: "none", args: []string{"--devices=enp*,veth*"},
		told: []string{"configuration: --devices enp*: this node has no such device, and programs are attached to none that leads to other hosts: node ports do not answer what arrives by eth0"}, appears: renamed("eth0", "enp0s8")},
	{name: "one of several kinds of devices", fields: "none", args: []string{"--devices=enp*,eth*,veth*"}},
	{name: "an excluded device, which is left out anyway", names: "--exclude-devices", fields: "none", args: []string{"--exclude-devices=docker0"}},
	{name: "datagrams left to devices that are left out", fields: "none", args: []string{"--udp=off", "--exclude-devices=veth*"},
		told: []string{"configuration: --udp off: it leaves what pods send over UDP to their devices, and nothing is attached to veth1"}, appears: renamed("veth1", "cali1")},
	{name: "devices of pods that are left out", fields: "none", args: []string{"--devices=eth0"}},
	{name: "a gate", names: "featureGates", fields: "featureGates: {NoSuchGate: true}"}, // told as ignored: see TestUnknownPartsAreReported
	{name: "a gate by a flag", names: "--feature-gates", fields: "none", args: []string{"--feature-gates=NoSuchGate=true"}},
	{name: "a kubeconfig", names: "clientConnection.kubeconfig", fields: "clientConnection: {kubeconfig: /nosuch/kubeconfig}", refused: "/nosuch/kubeconfig"},
	{name: "a kubeconfig by a flag", names: "--kubeconfig", fields: "none", args: []string{"--kubeconfig=/nosuch/kubeconfig"}, refused: "/nosuch/kubeconfig"},
	{name: "an API server", names: "--master", fields: "none", args: []string{"--master=https://[nosuch"}, refused: "API server https://[nosuch"},
	{name: "a configuration file", names: "--config", fields: "none", args: []string{"--config=/nosuch/config"}, refused: "/nosuch/config"},
	{name: "a cgroup", names: "--cgroup-root", fields: "none", args: []string{"--cgroup-root=/nosuch"}, refused: `cgroup root "/nosuch"`},
	{name: "a folder that is no cgroup", fields: "none", args: []string{"--cgroup-root=/proc"}, refused: `cgroup root "/proc": not on a cgroup2 file system`},
	{name: "a folder for pins", names: "--bpf-root", fields: "none", args: []string{"--bpf-root=/nosuch/sluice"}, refused: `bpf root "/nosuch/sluice"`},
	{name: "a folder that is not on a bpffs", fields: "none", args: []string{"--bpf-root=/proc/sluice"}, refused: `bpf root "/proc/sluice": not on a bpf file system`},
	// The agent makes the folder of its socket, and has no other verbs' flags: TestPlacesOfVerbs.
	{name: "places of other verbs", names: "--socket --pod-logs"},
	{name: "a folder of manifests", names: "--manifests", fields: "none", args: []string{"--manifests=/nosuch/folder"}, refused: "/nosuch/folder"},
	// A server that cannot listen is seen by trying: TestServersThatCannotListen, and test/e2e.TestNotAsConfigured.
	{name: "addresses of servers", names: "healthzBindAddress metricsBindAddress --healthz-bind-address --metrics-bind-address"},
}

// The changes of [absentNode] by which what is missed appears.

func called(name string) func(*node.State, *kube.Node) {
	return func(_ *node.State, object *kube.Node) { object.Name = name }
}

func owning(addr string) func(*node.State, *kube.Node) {
	return func(state *node.State, _ *kube.Node) {
		state.Addresses = append(state.Addresses, node.Address{Addr: netip.MustParseAddr(addr), IfIndex: 2})
	}
}

func renamed(from, to string) func(*node.State, *kube.Node) {
	return func(state *node.State, _ *kube.Node) {
		for i, d := range state.Devices {
			if d.Name == from {
				state.Devices[i].Name = to
			}
		}
	}
}

func uplink(name string) func(*node.State, *kube.Node) {
	return func(state *node.State, _ *kube.Node) {
		state.Devices = append(state.Devices, node.Device{Index: 9, Name: name, LinkLayer: node.LinkEthernet, IsUp: true})
	}
}

func servingPods(prefix string) func(*node.State, *kube.Node) {
	return func(_ *node.State, object *kube.Node) {
		object.PodCIDRs = []netip.Prefix{netip.MustParsePrefix(prefix)}
	}
}

// absentNode is node-1, with a pod behind a bridge.
func absentNode() (node.State, kube.Node) {
	v4, v6 := netip.MustParseAddr("192.168.50.1"), netip.MustParseAddr("fd00:50::1")
	state := node.State{
		Addresses: []node.Address{
			{Addr: netip.MustParseAddr("127.0.0.1"), IfIndex: 1, IsLoopback: true}, {Addr: netip.IPv6Loopback(), IfIndex: 1, IsLoopback: true},
			{Addr: v4, IfIndex: 2}, {Addr: v6, IfIndex: 2}, {Addr: netip.MustParseAddr("fe80::1"), IfIndex: 2}, {Addr: netip.MustParseAddr("10.244.1.1"), IfIndex: 3},
		},
		Devices: []node.Device{
			{Index: 1, Name: "lo", IsLoopback: true},
			{Index: 2, Name: "eth0", LinkLayer: node.LinkEthernet, IsUp: true, Network: netip.PrefixFrom(v4, 24)},
			{Index: 3, Name: "cni0", Kind: "bridge", LinkLayer: node.LinkEthernet, IsUp: true},
			{Index: 4, Name: "veth1", Kind: "veth", LinkLayer: node.LinkEthernet, IsUp: true, Master: 3, PeerNetns: 1},
		},
	}

	return state, kube.Node{
		Node: lb.Node{Name: "node-1", PrimaryIPs: []netip.Addr{v4, v6}}, Exists: true,
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")},
	}
}

// Whatever a configuration names and is not there is refused or told, and each field and flag has its case.
func TestWhatTheConfigurationNames(t *testing.T) {
	covered := slices.Clone(namesNothing)
	for _, test := range absent {
		covered = append(covered, strings.Fields(test.names)...)
		if test.fields == "" {
			continue
		}
		t.Run("it names "+test.name, func(t *testing.T) {
			agent, err := agentOf(t, test.fields, test.args...)
			var troubles []string
			if err == nil {
				troubles = agent.troubles()
			}
			switch {
			case test.refused != "" && (err == nil || !strings.Contains(err.Error(), test.refused)):
				t.Errorf("the error is %v, want one with %q", err, test.refused)
			case test.refused == "" && err != nil:
				t.Error(err)
			case (len(troubles) > 0) != (test.told != nil):
				t.Errorf("the troubles are %q, want %q", troubles, test.told)
			}
			for _, text := range test.told {
				if !strings.Contains(strings.Join(troubles, "\n"), text) {
					t.Errorf("the troubles are %q, want %q", troubles, text)
				}
			}
			if test.told == nil {
				return
			}
			if test.appears == nil {
				t.Fatal("nothing shows that it ends")
			}
			state, object := absentNode()
			test.appears(&state, &object)
			if agent.become(state, object); len(agent.troubles()) > 0 {
				t.Errorf("it appears, and the troubles are %q", agent.troubles())
			}
			if state, object := absentNode(); object.Name == agent.Status().Node { // for a Node is known for good
				if agent.become(state, object); len(agent.troubles()) != len(troubles) {
					t.Errorf("it goes again, and the troubles are %q, want %q", agent.troubles(), troubles)
				}
			}
		})
	}
	for _, name := range allNames() {
		if !slices.Contains(covered, name) {
			t.Errorf("what if %s names nothing that there is? Nothing shows it", name)
		}
		covered = slices.DeleteFunc(covered, func(c string) bool { return c == name })
	}
	if len(covered) > 0 {
		t.Errorf("neither a field nor a flag: %q", covered)
	}
}

// agentOf returns an agent on [absentNode] with this configuration.
func agentOf(t *testing.T, fields string, args ...string) (absence, error) {
	t.Helper()
	set := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	flags := newAgentFlags(set)
	var where places
	where.addTo(set)
	if fields != "none" {
		args = append(args, "--config", mustConfigFile(t, fields))
	}
	lab.Must(t, set.Parse(args))
	if !set.Changed("hostname-override") && !strings.Contains(fields, "hostnameOverride") {
		lab.Must(t, set.Set("hostname-override", "node-1"))
	}
	s, err := flags.resolve()
	if err != nil {
		return absence{}, err
	}
	onKernel := set.Changed("cgroup-root") || set.Changed("bpf-root")
	flags.dryRun = !onKernel // needs no cgroup
	cfg, err := flags.agentConfig(&where, s, slog.New(slog.DiscardHandler))
	if err != nil && !strings.Contains(err.Error(), "in-cluster") {
		return absence{}, err
	}
	if onKernel {
		return absence{}, cfg.Datapath.Validate()
	}
	if cfg.Manifests != "" {
		_, _, err := agent.DryRun(t.Context(), cfg)

		return absence{}, err
	}
	state, object := absentNode()
	if cfg.NodeName != object.Name {
		object = kube.Node{}
	}

	return newAbsence(t, cfg, state, object), nil
}

// absence is an agent on a node that may lack what its configuration names.
type absence struct {
	*agent.Offline
}

// newAbsence returns an agent on a node. An object without a name is none.
func newAbsence(t *testing.T, cfg agent.Config, state node.State, object kube.Node) absence {
	t.Helper()
	writer, err := reconcile.New(reconcile.Config{Tables: maps.NewFakes(100).Tables})
	lab.Must(t, err)
	a := absence{agent.NewOffline(cfg, writer)}
	a.become(state, object)

	return a
}

// become changes the node.
func (a absence) become(state node.State, object kube.Node) {
	a.SetState(state)
	if object.Name != "" {
		a.Sink().SetNode(object, nil)
	}
	a.Work()
}

func (a absence) troubles() []string { return a.Status().Troubles() }

// allNames returns the paths of all fields of a configuration, all flags of the agent, and those of places that verbs share.
func allNames() []string {
	var names []string
	var add func(prefix string, of reflect.Type)
	add = func(prefix string, of reflect.Type) {
		for i := range of.NumField() {
			field := of.Field(i)
			name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
			inner := field.Type
			if inner.Kind() == reflect.Pointer {
				inner = inner.Elem()
			}
			switch isOurs := inner.Kind() == reflect.Struct && !slices.Contains([]string{"Duration", "TimeOrMetaDuration", "QuantityValue"}, inner.Name()); {
			case name == "" && (field.Anonymous || strings.Contains(options, "inline")):
				add(prefix, inner)
			case isOurs:
				add(prefix+name+".", inner)
			default:
				names = append(names, prefix+name)
			}
		}
	}
	add("", reflect.TypeFor[config.KubeProxy]())
	set := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	newAgentFlags(set)
	new(places).addTo(set)
	var podLogs string
	verb := &cobra.Command{}
	addPodLogs(verb, &podLogs)
	set.AddFlagSet(verb.Flags())
	set.VisitAll(func(flag *pflag.Flag) { names = append(names, "--"+flag.Name) })

	return names
}

// Verbs that are led to places which are not there, or are other things, say so, and list nothing.
func TestPlacesOfVerbs(t *testing.T) {
	root := mustPin(t)
	logs := t.TempDir()
	for args, want := range map[string]string{
		"connections --cgroup-root /nosuch":               `cgroup root "/nosuch": file system: no such file or directory`,
		"connections --cgroup-root /proc":                 `cgroup root "/proc": not on a cgroup2 file system`,
		"monitor --since 1m --cgroup-root /nosuch":        `cgroup root "/nosuch": file system: no such file or directory`,
		"explain --to web --cgroup-root /nosuch":          `cgroup root "/nosuch": file system: no such file or directory`,
		"status --cgroup-root /nosuch":                    `cgroup root "/nosuch": file system: no such file or directory`,
		"connections --pod web --pod-logs /nosuch":        "logs of pods: open /nosuch: no such file or directory",
		"monitor --since 1m --pod web --pod-logs /nosuch": "logs of pods: open /nosuch: no such file or directory",
		"verify --socket " + logs + "/nosuch":             "no agent is running: dial unix " + logs + "/nosuch: connect: no such file or directory",
	} {
		out, err := runVerb(root, strings.Fields(args)...)
		if err == nil || !strings.Contains(err.Error(), want) || out != "" {
			t.Errorf("sluice %s: %v after %q, want %s", args, err, out, want)
		}
	}
}

func mustConfigFile(t *testing.T, fields string) string {
	t.Helper()
	path := t.TempDir() + "/config.yaml"
	mustWrite(t, path, []byte(fileHeader+fields))

	return path
}
