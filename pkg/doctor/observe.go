package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/pods"
	"github.com/sluice-lb/sluice/pkg/status"
)

// Config is what [Observe] looks at, as the agent is configured.
type Config struct {
	CgroupRoot string // empty: what the agent finds
	BPFRoot    string
	Socket     string
	// Model is the agent's configuration of the node: the name of its Node object, addresses, and the rules by which
	// the agent chooses devices.
	Model node.ModelConfig
	// Attachment is how the agent attaches to devices; empty: by what the kernel has.
	Attachment   datapath.Attachment
	ThroughStack bool // --forwarding stack
	FlowMemory   uint64

	// APIServer is the URL of the API server, and Client asks it. Without a Client none is asked, for
	// the reason ClientErr if there is one.
	APIServer string
	Client    *http.Client
	ClientErr error
}

// Fact is something that was looked at. Err is why it could not be seen.
type Fact[T any] struct {
	Value T
	Err   error
}

func look[T any](at func() (T, error)) Fact[T] {
	value, err := at()

	return Fact[T]{value, err}
}

// Version is a version of the kernel.
type Version struct{ Major, Minor int }

func (v Version) before(o Version) bool {
	return v.Major < o.Major || v.Major == o.Major && v.Minor < o.Minor
}

// Kernel is the running kernel.
type Kernel struct {
	Release string
	Version Version
}

// Process is what the kernel allows this process.
type Process struct {
	Capabilities uint64 // effective ones, as bits
	Seccomp      int    // 0: no filter
}

func (p Process) has(capability string) bool {
	return p.Capabilities&(1<<capabilityNumbers[capability]) != 0
}

// Pins are what is pinned below the bpf root.
type Pins struct {
	Folders    []string
	Complete   bool     // all maps of this build's layout are there
	Others     []string // of builds with another layout
	Unreadable error    // why this build cannot read those of its own layout
	// LastRan is when an agent last ran; zero if that is not known.
	LastRan time.Time
}

// Namespace is a network namespace besides the node's.
type Namespace struct {
	node.Namespace
	Pod    string // NAMESPACE/NAME, empty if that is not known
	Routes []node.Route
}

// String names the pod, as well as it is known.
func (n Namespace) String() string {
	if n.PodUID == "" {
		return fmt.Sprintf("network namespace %d", n.Inode)
	}

	return "pod " + cmp.Or(n.Pod, n.PodUID)
}

// Forwarding is for which families the kernel forwards packets.
type Forwarding struct{ V4, V6 bool }

// Node is what was seen of a node.
type Node struct {
	Config   Config
	Kernel   Fact[Kernel]
	Features Fact[datapath.Features]
	JIT      Fact[int]    // net.core.bpf_jit_enable
	Memlock  Fact[uint64] // limit of locked memory
	Memory   Fact[node.Memory]
	// Files is how many files a process may have open.
	Files   Fact[uint64]
	Process Fact[Process]

	Cgroup   Fact[datapath.Cgroup]
	CgroupV1 bool  // is mounted, too
	BPFFS    error // why pins cannot be there
	Pins     Fact[Pins]
	// Others are other instances of Sluice that act on the node.
	Others Fact[[]datapath.Other]
	Agent  Fact[status.Status]

	// Programs of other owners at the hooks of Sluice.
	CgroupPrograms Fact[[]datapath.Foreign]
	DevicePrograms Fact[[]datapath.Foreign]
	CiliumPins     []string
	// Processes are the PIDs of other proxies, by name. AllProcesses is false in a PID namespace that
	// is not the node's.
	Processes    Fact[map[string][]int]
	AllProcesses bool

	Devices       Fact[[]Device]
	Addresses     []netip.Addr // of this node
	State         Fact[node.State]
	Netfilter     Fact[node.Netfilter]
	IPVS          Fact[int] // virtual servers
	MarkRules     Fact[[]int]
	IPsecPolicies Fact[int]
	IPForward     Fact[Forwarding]
	Ephemeral     Fact[[]bpf.PortRange]
	Masquerade    Fact[node.MasqueradePorts]
	APIServer     Fact[APIServer]
	Routes        Fact[[]node.Route]
	Namespaces    Fact[[]Namespace]
}

// byClsact reports whether the agent attaches to devices by filters.
func (n Node) byClsact() bool {
	return n.Config.Attachment == datapath.Clsact || n.Config.Attachment == "" && !n.Features.Value.TCX
}

// Observe looks at the node of the calling thread's namespaces. It changes nothing: programs that
// probe the kernel are loaded and closed at once.
func Observe(ctx context.Context, cfg Config) Node {
	n := Node{
		Config: cfg,
		Kernel: look(readKernel), Features: look(datapath.ProbeFeatures), Memlock: look(readMemlock), Memory: look(node.ReadMemory),
		JIT: look(readJIT), Files: look(datapath.MaxFiles),
		Process: look(readProcess),
		BPFFS:   datapath.CheckBPFRoot(cfg.BPFRoot),
		Cgroup: look(func() (datapath.Cgroup, error) {
			if cfg.CgroupRoot == "" {
				return datapath.FindCgroupRoot()
			}

			return datapath.LookupCgroup(cfg.CgroupRoot)
		}),
		CgroupV1:  hasCgroupV1(),
		Pins:      look(func() (Pins, error) { return readPins(cfg.BPFRoot) }),
		Agent:     look(func() (status.Status, error) { return status.NewClient(cfg.Socket).Status(ctx) }),
		Netfilter: look(node.ReadNetfilter), IPVS: look(countIPVS), MarkRules: look(node.MarkRules), IPsecPolicies: look(node.IPsecPolicies),
		IPForward: look(readForwarding), Ephemeral: look(node.EphemeralPorts), Masquerade: look(node.ReadMasqueradePorts),
		APIServer:  look(func() (APIServer, error) { return askAPIServer(ctx, cfg) }),
		Routes:     look(node.Routes),
		Namespaces: look(readNamespaces),
		Processes:  look(findProcesses), AllProcesses: seesAllProcesses(),
	}
	n.Others = look(func() ([]datapath.Other, error) {
		if n.Cgroup.Err != nil {
			return nil, n.Cgroup.Err
		}

		return datapath.Others(cfg.BPFRoot, n.Cgroup.Value.Path)
	})
	n.CgroupPrograms = look(func() ([]datapath.Foreign, error) {
		if n.Cgroup.Err != nil {
			return nil, n.Cgroup.Err
		}

		return datapath.ForeignInCgroup(n.Cgroup.Value.Path)
	})
	state := look(node.Read)
	n.State = state
	for _, a := range state.Value.Addresses {
		n.Addresses = append(n.Addresses, a.Addr)
	}
	n.Devices = look(func() ([]Device, error) {
		if state.Err != nil {
			return nil, state.Err
		}

		return readDevices(node.Decide(state.Value.Devices, cfg.Model.Devices))
	})
	n.DevicePrograms = look(func() ([]datapath.Foreign, error) {
		var indices []int
		for _, d := range n.Devices.Value {
			if d.Class != node.ClassNone {
				indices = append(indices, d.Index)
			}
		}

		return datapath.ForeignAtDevices(indices)
	})
	n.CiliumPins, _ = filepath.Glob(filepath.Join(filepath.Dir(cfg.BPFRoot), "tc/globals/cilium_*")) // the pattern is valid

	return n
}

func readNamespaces() ([]Namespace, error) {
	names, err := pods.Names(pods.DefaultLogs)
	if err != nil {
		return nil, err
	}
	var all []Namespace
	err = node.OtherNamespaces(func(of node.Namespace, routes []node.Route) {
		all = append(all, Namespace{of, names[of.PodUID], routes})
	})
	slices.SortFunc(all, func(a, b Namespace) int { return cmp.Or(cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Inode, b.Inode)) })

	return all, err
}

func readKernel() (Kernel, error) {
	var names unix.Utsname
	if err := unix.Uname(&names); err != nil {
		return Kernel{}, fmt.Errorf("version of the kernel: %w", err)
	}
	k := Kernel{Release: unix.ByteSliceToString(names.Release[:])}
	if _, err := fmt.Sscanf(k.Release, "%d.%d", &k.Version.Major, &k.Version.Minor); err != nil {
		return k, fmt.Errorf("version of the kernel: %q: %w", k.Release, err)
	}

	return k, nil
}

// readJIT returns net.core.bpf_jit_enable, or 0 or 1 by how the kernel treats a program: only its
// first network namespace has the sysctl.
func readJIT() (int, error) {
	enabled, err := node.ReadNumber("/proc/sys/net/core/bpf_jit_enable")
	if !errors.Is(err, fs.ErrNotExist) {
		return enabled, err
	}
	compiles, err := datapath.Compiles()
	if compiles {
		return 1, err
	}

	return 0, err
}

func readMemlock() (uint64, error) {
	var limit unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit)

	return limit.Cur, err
}

func readProcess() (Process, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return Process{}, fmt.Errorf("capabilities: %w", err)
	}
	seccomp, err := unix.PrctlRetInt(unix.PR_GET_SECCOMP, 0, 0, 0, 0)

	return Process{uint64(sets[1].Effective)<<32 | uint64(sets[0].Effective), seccomp}, err
}

func hasCgroupV1() bool {
	mounts, _ := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup")) // without the list, nothing can be said

	return len(mounts) > 0
}

func readPins(root string) (Pins, error) {
	var p Pins
	var err error
	if _, err := os.ReadDir(root); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return p, err
	}
	if p.Folders, err = maps.Folders(root); err != nil {
		return p, err
	}
	if p.Others, err = maps.OtherFolders(root); err != nil {
		return p, err
	}
	if len(p.Folders) == len(p.Others) {
		return p, nil
	}
	pinned, err := maps.Load(root)
	if errors.Is(err, maps.ErrStale) || errors.Is(err, fs.ErrNotExist) {
		p.Unreadable = err

		return p, nil
	}
	if err != nil {
		return p, err
	}

	p.Complete, p.LastRan = true, pinned.Heartbeat.LastBeat()

	return p, pinned.Close()
}

// rivals are the processes of other proxies, or of what may be one.
var rivals = map[string]bool{"kube-proxy": true, "cilium-agent": true}

func findProcesses() (map[string][]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	found := make(map[string][]int)
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		name, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "comm"))
		if is := strings.TrimSpace(string(name)); err == nil && rivals[is] { // or else it has ended
			found[is] = append(found[is], pid)
		}
	}

	return found, nil
}

// seesAllProcesses reports whether this process is in the node's PID namespace: only there kernel
// threads are seen.
func seesAllProcesses() bool {
	name, err := os.ReadFile("/proc/2/comm")

	return err == nil && strings.TrimSpace(string(name)) == "kthreadd"
}

func countIPVS() (int, error) {
	text, err := os.ReadFile("/proc/thread-self/net/ip_vs")
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	servers := 0
	for line := range strings.Lines(string(text)) {
		switch protocol, _, _ := strings.Cut(line, " "); protocol {
		case "TCP", "UDP", "SCTP", "FWM":
			servers++
		}
	}

	return servers, err
}

func readForwarding() (Forwarding, error) {
	v4, err := node.ReadNumber("/proc/sys/net/ipv4/ip_forward")
	if err != nil {
		return Forwarding{}, err
	}
	v6, err := node.ReadNumber("/proc/sys/net/ipv6/conf/all/forwarding")
	if errors.Is(err, fs.ErrNotExist) {
		v6, err = 1, nil // without IPv6 there is nothing to forward
	}

	return Forwarding{v4 != 0, v6 != 0}, err
}

// readDevices adds to devices what only this package needs.
func readDevices(decisions []node.Decision) ([]Device, error) {
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	mtus := make(map[int]int)
	for _, i := range interfaces {
		mtus[i.Index] = i.MTU
	}
	all, err := node.ReadNumber("/proc/sys/net/ipv4/conf/all/rp_filter")
	if err != nil {
		return nil, err
	}
	devices := make([]Device, 0, len(decisions))
	for _, d := range decisions {
		filter, err := node.ReadNumber("/proc/sys/net/ipv4/conf/" + d.Name + "/rp_filter")
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // it has just gone
			return nil, err
		}
		forwards, err := node.ReadNumber("/proc/sys/net/ipv4/conf/" + d.Name + "/forwarding")
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		devices = append(devices, Device{d, mtus[d.Index], max(all, filter), err == nil && forwards == 0})
	}

	return devices, nil
}

// apiTimeout is enough for an API server that is busy.
const apiTimeout = 10 * time.Second

// askAPIServer asks for the Service `kubernetes`, which every cluster has. An answer that refuses
// to list it shows as well that the server is there.
func askAPIServer(ctx context.Context, cfg Config) (APIServer, error) {
	api := APIServer{URL: cfg.APIServer}
	if cfg.ClientErr != nil {
		return api, cfg.ClientErr
	}
	if cfg.Client == nil {
		return api, errNotConfigured
	}
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	// list decodes what the API server lists, if this client may see it.
	list := func(path string, into any) (*http.Response, error) {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(cfg.APIServer, "/")+path, nil)
		if err != nil {
			return nil, err
		}
		request.Header.Set("Accept", "application/json")
		response, err := cfg.Client.Do(request)
		if err != nil {
			var failed *url.Error
			if errors.As(err, &failed) {
				err = failed.Err // without the URL
			}

			return nil, err
		}
		defer response.Body.Close()
		if body, err := io.ReadAll(io.LimitReader(response.Body, 16<<20)); err == nil {
			_ = json.Unmarshal(body, into) // a refusal has no items
		}

		return response, nil
	}
	var services struct {
		Items []struct {
			Spec struct{ ClusterIPs []string }
		}
	}
	began := time.Now()
	response, err := list("/api/v1/namespaces/default/services?fieldSelector=metadata.name=kubernetes", &services)
	if err != nil {
		return api, err
	}
	api.Status = response.StatusCode
	if date, err := http.ParseTime(response.Header.Get("Date")); err == nil {
		// The header has whole seconds, and was written while the request was on its way.
		middle := began.Add(time.Since(began) / 2)
		api.Skew = date.Add(500 * time.Millisecond).Sub(middle)
	}
	for _, item := range services.Items {
		api.ServiceIPs = append(api.ServiceIPs, item.Spec.ClusterIPs...)
	}
	var cidrs struct {
		Items []struct{ Spec struct{ CIDRs []string } }
	}
	var nodes struct {
		Items []struct {
			Metadata struct{ Name string }
			Spec     struct{ PodCIDRs []string }
		}
	}
	if cfg.Model.NodeName != "" {
		var self nodeObject
		response, err := list("/api/v1/nodes/"+url.PathEscape(cfg.Model.NodeName), &self)
		if err != nil {
			return api, err
		}
		api.setSelf(response.StatusCode, self)
	}
	if response, err = list("/apis/networking.k8s.io/v1/servicecidrs", &cidrs); err != nil {
		return api, err
	}
	api.CIDRStatus = response.StatusCode
	if _, err := list("/api/v1/nodes?limit=500", &nodes); err != nil { // of which one shows the same mistake as all
		return api, err
	}
	for _, item := range cidrs.Items {
		api.ServiceCIDRs = append(api.ServiceCIDRs, prefixesOf(item.Spec.CIDRs)...)
	}
	for _, item := range nodes.Items {
		for _, prefix := range prefixesOf(item.Spec.PodCIDRs) {
			api.PodCIDRs = append(api.PodCIDRs, PodCIDR{item.Metadata.Name, prefix})
		}
	}

	return api, nil
}

// nodeObject is what is read of the Node object of this node.
type nodeObject struct {
	Spec   struct{ PodCIDRs []string }
	Status struct {
		Addresses []struct{ Type, Address string }
	}
}

// setSelf sets what the API server has answered about the Node object of this node. Of each family, its first InternalIP
// counts, or else its first ExternalIP.
func (a *APIServer) setSelf(status int, self nodeObject) {
	a.SelfStatus, a.SelfPodCIDRs = status, prefixesOf(self.Spec.PodCIDRs)
	for _, wanted := range []string{"InternalIP", "ExternalIP"} {
		for _, at := range self.Status.Addresses {
			ip, err := netip.ParseAddr(at.Address)
			sameFamily := func(other netip.Addr) bool { return other.Is4() == ip.Is4() }
			if err == nil && at.Type == wanted && !slices.ContainsFunc(a.SelfIPs, sameFamily) {
				a.SelfIPs = append(a.SelfIPs, ip)
			}
		}
	}
}

// prefixesOf returns the address ranges among the texts.
func prefixesOf(texts []string) []netip.Prefix {
	var prefixes []netip.Prefix
	for _, text := range texts {
		if prefix, err := netip.ParsePrefix(text); err == nil {
			prefixes = append(prefixes, prefix)
		}
	}

	return prefixes
}
