package proxy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

const pollInterval = 10 * time.Millisecond

// kubeProxy is the real one.
type kubeProxy struct {
	cfg    Config
	tools  string // folder of the programs that it finds
	config string // file
	own    *lab.Cgroup
	log    string // file
	cmd    *exec.Cmd

	exited chan struct{} // closed when it has ended
}

func (k *kubeProxy) prepare() (err error) {
	if k.tools, err = linkTools(k.cfg.Kind, k.cfg.Directory); err != nil {
		return err
	}
	k.config, err = writeConfig(k.cfg, k.mode())

	return err
}

func (k *kubeProxy) start() (err error) {
	if k.own, err = lab.NewCgroup("kube-proxy"); err != nil {
		return err
	}
	k.log = filepath.Join(k.cfg.Directory, "kube-proxy.log")
	log, err := os.Create(k.log)
	if err != nil {
		return err
	}
	defer log.Close()

	cmd := k.command(k.cfg.Binary, "--config", k.config)
	cmd.Stdout, cmd.Stderr = log, log
	// Ctrl-C interrupts the benchmark only.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := lab.Start(k.cfg.Namespace, k.own, cmd); err != nil {
		return err
	}
	k.cmd, k.exited = cmd, make(chan struct{})
	go func() {
		_ = cmd.Wait() // the log has the reason
		close(k.exited)
	}()

	return nil
}

func (k *kubeProxy) mode() string {
	if k.cfg.Kind == IPTablesLegacy {
		return string(IPTables)
	}

	return string(k.cfg.Kind)
}

// command is one that finds the tools of this kind, and no others.
func (k *kubeProxy) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "PATH="+k.tools)

	return cmd
}

// tool runs one of the tools in the namespace and returns what it prints.
func (k *kubeProxy) tool(name string, args ...string) (string, error) {
	return lab.Output(k.cfg.Namespace, nil, filepath.Join(k.tools, name), args...)
}

func (k *kubeProxy) pid() int {
	if k.cmd == nil {
		return 0
	}

	return k.cmd.Process.Pid
}

func (k *kubeProxy) cgroup() *lab.Cgroup { return k.own }

func (k *kubeProxy) synced(ctx context.Context) error {
	look := syncCheck{ns: k.cfg.Namespace}
	for {
		err := look.look()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err, k.quote())
		case <-k.exited:
			return errors.Join(errors.New("it ended"), k.quote())
		case <-time.After(pollInterval):
		}
	}
}

// quote returns the end of the log as an error.
func (k *kubeProxy) quote() error {
	log, err := os.ReadFile(k.log)
	if err != nil {
		return err
	}

	return fmt.Errorf("it printed: %s", tail(string(log)))
}

// tail is the end of a log.
func tail(log string) string {
	const size = 4 << 10

	return strings.TrimSpace(log[max(0, len(log)-size):])
}

func (k *kubeProxy) version() (string, error) {
	out, err := k.command(k.cfg.Binary, "--version").Output()
	if err != nil {
		return "", err
	}
	tool := "iptables"
	if k.cfg.Kind == NFTables {
		tool = "nft"
	}
	with, err := k.tool(tool, "--version")
	if err != nil {
		return "", err
	}

	return strings.Replace(strings.TrimSpace(string(out)), "Kubernetes", "kube-proxy", 1) + ", " + strings.TrimSpace(with), nil
}

func (k *kubeProxy) close() error {
	if k.own == nil {
		return nil
	}
	err := k.own.Close() // kills it
	if k.cmd != nil {
		<-k.exited
		err = errors.Join(err, k.clean())
	}
	k.own, k.cmd = nil, nil

	return err
}
