// Package realproxy runs the real kube-proxy on a node of the lab, for tests that compare
// with it and for benchmarks. It has each of its modes, with the programs that the mode
// needs and no others in its PATH.
package realproxy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// Mode is a mode of kube-proxy.
type Mode string

// The modes that kube-proxy has on Linux, iptables with two different tools.
const (
	IPTables       Mode = "iptables"        // with the iptables that writes nf_tables, Debian's default
	IPTablesLegacy Mode = "iptables-legacy" // with the older iptables
	NFTables       Mode = "nftables"
	IPVS           Mode = "ipvs"
)

// Name returns the mode as kube-proxy's configuration spells it.
func (m Mode) Name() string {
	if m == IPTablesLegacy {
		return string(IPTables)
	}

	return string(m)
}

// tools returns the programs that the mode needs, by the names that kube-proxy looks for:
// some binaries are several programs in one and choose by their name.
func (m Mode) tools() map[string]string {
	found := make(map[string]string)
	iptables := "xtables-nft-multi"
	switch m {
	case NFTables:
		return map[string]string{"nft": "nft"}
	case IPVS:
		found["ipset"] = "ipset"
	case IPTablesLegacy:
		iptables = "xtables-legacy-multi"
	}
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, act := range []string{"", "-save", "-restore"} {
			found[family+act] = iptables
		}
	}

	return found
}

// Config is what to run, and where.
type Config struct {
	Mode      Mode
	Binary    string         // kube-proxy
	Config    string         // text of a KubeProxyConfiguration with this mode
	Namespace *lab.Namespace // the node's
	Directory string         // for the proxy's files; the caller removes it after Close
}

// Proxy is a kube-proxy. Its methods may be called from many goroutines, except Close.
type Proxy struct {
	cfg    Config
	tools  string // folder
	cgroup *lab.Cgroup
	log    string // file
	cmd    *exec.Cmd
	// version and started are known before the process is.
	version string
	started time.Time
	exited  chan struct{} // closed when it has ended
}

// Start starts kube-proxy in a cgroup of its own, so that it ends with the caller also
// if that is killed. It returns before kube-proxy has done anything. The caller closes it.
func Start(cfg Config) (*Proxy, error) {
	p := &Proxy{cfg: cfg, log: filepath.Join(cfg.Directory, "kube-proxy.log"), exited: make(chan struct{})}
	if err := p.start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start of kube-proxy: %w", err), p.Close())
	}

	return p, nil
}

func (p *Proxy) start() (err error) {
	if p.tools, err = linkTools(p.cfg.Mode, p.cfg.Directory); err != nil {
		return err
	}
	config := filepath.Join(p.cfg.Directory, "config.yaml")
	if err := os.WriteFile(config, []byte(p.cfg.Config), 0o600); err != nil {
		return err
	}
	if p.cgroup, err = lab.NewCgroup("kube-proxy"); err != nil {
		return err
	}
	if p.version, err = p.readVersion(); err != nil {
		return err
	}
	log, err := os.Create(p.log)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := p.command("--config", config)
	cmd.Stdout, cmd.Stderr = log, log
	// Ctrl-C interrupts the caller only.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.started = time.Now()
	if err := lab.Start(p.cfg.Namespace, p.cgroup, cmd); err != nil {
		return err
	}
	p.cmd = cmd
	go func() {
		_ = cmd.Wait() // the log has the reason
		close(p.exited)
	}()

	return nil
}

// linkTools makes a folder inside of directory with links to the tools of a mode, and
// returns its path. It finds them whatever the PATH of the caller.
func linkTools(mode Mode, directory string) (string, error) {
	folder := filepath.Join(directory, "tools")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", err
	}
	for name, program := range mode.tools() {
		path, err := FindProgram(program)
		if err != nil {
			return "", err
		}
		if err := os.Symlink(path, filepath.Join(folder, name)); err != nil {
			return "", err
		}
	}

	return folder, nil
}

// FindProgram returns the path of a program of the system, whatever the PATH of the caller.
func FindProgram(name string) (string, error) {
	for _, folder := range []string{"/usr/sbin", "/sbin", "/usr/bin", "/bin"} {
		if path, err := exec.LookPath(filepath.Join(folder, name)); err == nil {
			return path, nil
		}
	}

	return "", fmt.Errorf("there is no program %s on this machine", name)
}

// command runs kube-proxy with the tools of its mode.
func (p *Proxy) command(args ...string) *exec.Cmd {
	cmd := exec.Command(p.cfg.Binary, args...)
	cmd.Env = append(os.Environ(), "PATH="+p.tools)

	return cmd
}

// tool runs one of the tools in the namespace and returns what it prints.
func (p *Proxy) tool(name string, args ...string) (string, error) {
	return lab.Output(p.cfg.Namespace, nil, filepath.Join(p.tools, name), args...)
}

// PID returns the process.
func (p *Proxy) PID() int { return p.cmd.Process.Pid }

// Cgroup returns the proxy's own cgroup.
func (p *Proxy) Cgroup() *lab.Cgroup { return p.cgroup }

// Log returns the end of what kube-proxy has printed.
func (p *Proxy) Log() string {
	const size = 8 << 10
	log, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}

	return strings.TrimSpace(string(log[max(0, len(log)-size):]))
}

// Synced returns when kube-proxy has programmed IPv4 once, or with an error that has
// the end of its log when ctx or kube-proxy ends.
func (p *Proxy) Synced(ctx context.Context) error {
	check := syncCheck{ns: p.cfg.Namespace}
	for {
		err := check.once()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w; it printed: %s", ctx.Err(), err, p.Log())
		case <-p.exited:
			return errors.New("it ended; it printed: " + p.Log())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// Version returns that of kube-proxy, and of the tool of its mode: "kube-proxy
// v1.37.2, nftables v1.0.6 (Lester Gooch #5)".
func (p *Proxy) Version() string { return p.version }

// Started returns when, all else being prepared, the process was about to be started.
func (p *Proxy) Started() time.Time { return p.started }

func (p *Proxy) readVersion() (string, error) {
	out, err := p.command("--version").Output()
	if err != nil {
		return "", err
	}
	tool := "iptables"
	if p.cfg.Mode == NFTables {
		tool = "nft"
	}
	with, err := p.tool(tool, "--version")
	if err != nil {
		return "", err
	}

	return strings.Replace(strings.TrimSpace(string(out)), "Kubernetes", "kube-proxy", 1) + ", " + strings.TrimSpace(with), nil
}

// Order returns the addresses, which are ClusterIPs with endpoints, in the order in
// which a new connection is compared with them: that of iptables' chain of Services,
// which kube-proxy writes in no particular order. In other modes they stay as they are.
func (p *Proxy) Order(addresses []netip.Addr) ([]netip.Addr, error) {
	if p.cfg.Mode.Name() != string(IPTables) {
		return addresses, nil
	}
	chain, err := p.tool("iptables", "-w", "-t", "nat", "-S", "KUBE-SERVICES")
	if err != nil {
		return nil, err
	}

	return sortByChain(addresses, chain)
}

// sortByChain sorts addresses by the first rule of a chain that matches them. The
// chain is as iptables -S prints it.
func sortByChain(addresses []netip.Addr, chain string) ([]netip.Addr, error) {
	places := make(map[string]int)
	for line := range strings.Lines(chain) {
		_, rule, _ := strings.Cut(line, " -d ")
		address, _, ok := strings.Cut(rule, "/32 ")
		if _, seen := places[address]; ok && !seen {
			places[address] = len(places)
		}
	}
	for _, address := range addresses {
		if _, ok := places[address.String()]; !ok {
			return nil, fmt.Errorf("no rule matches %s", address)
		}
	}

	return slices.SortedFunc(slices.Values(addresses), func(a, b netip.Addr) int {
		return places[a.String()] - places[b.String()]
	}), nil
}

// Close ends kube-proxy. Its rules stay, see [Proxy.Clean]. Closing twice is not an error.
func (p *Proxy) Close() error {
	if p.cgroup == nil {
		return nil
	}
	err := p.cgroup.Close() // kills it
	p.cgroup = nil
	if p.cmd != nil {
		<-p.exited
	}

	return err
}

// Clean removes all rules of the namespace, after Close. Settings of the namespace and
// entries of conntrack stay, and so do, with [IPTablesLegacy], empty tables with their
// hooks. kube-proxy's own --cleanup removes the same, but takes minutes for many Services.
func (p *Proxy) Clean() error {
	switch p.cfg.Mode {
	case NFTables, IPTables:
		return p.cfg.Namespace.Netfilter("flush ruleset")
	case IPTablesLegacy:
		var err error
		for _, family := range []string{"iptables", "ip6tables"} {
			for _, table := range []string{"nat", "filter", "mangle"} {
				_, flushed := p.tool(family, "-w", "-t", table, "-F")
				_, deleted := p.tool(family, "-w", "-t", table, "-X")
				err = errors.Join(err, flushed, deleted)
			}
		}

		return err
	default:
		cmd := p.command("--cleanup")
		if err := lab.Start(p.cfg.Namespace, nil, cmd); err != nil {
			return err
		}

		return cmd.Wait()
	}
}
