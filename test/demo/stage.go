package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// stage is what the scenes are played on: one node with four pods. Three of
// them answer, and in the fourth and on the node itself are clients.
type stage struct {
	cfg config
	out *printer

	dir      string // of this run, with the manifests in it
	node     *lab.Node
	backends []*lab.Pod
	servers  map[string]*lab.Server // of web, by pod
	clientIn *lab.Pod
	cgroup   *lab.Cgroup // what clients are in, and the agent attaches to
	agent    *sluice.Node
	pod      *client
	host     *client

	closers []func() error // what to undo, in the order of doing
	traces  []trace
}

// trace is something that a run makes and that must be gone in the end.
type trace struct {
	kind string
	path string
}

func newStage(cfg config, out *printer) *stage {
	return &stage{cfg: cfg, out: out, servers: make(map[string]*lab.Server)}
}

// build makes it all. What is made is there to be closed also after an error.
func (s *stage) build(ctx context.Context) error {
	for _, step := range []func(context.Context) error{
		s.makeFolder, s.makeCluster, s.makeCgroup, s.startServers, s.startClients, s.startAgent,
	} {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := step(ctx); err != nil {
			return err
		}
	}

	return s.showAgent()
}

func (s *stage) manifests() string { return filepath.Join(s.dir, "manifests") }

func (s *stage) makeFolder(context.Context) error {
	dir, err := os.MkdirTemp("", "sluice-demo-")
	if err != nil {
		return err
	}
	s.dir = dir
	s.made("folder", dir, func() error { return os.RemoveAll(dir) })
	if err := os.Mkdir(s.manifests(), 0o755); err != nil {
		return err
	}

	return copyManifests(s.manifests())
}

func (s *stage) makeCluster(context.Context) error {
	cluster, err := lab.New(lab.Config{Nodes: 1, PodsPerNode: 4})
	if err != nil {
		return fmt.Errorf("%w (in a container: it has to be privileged)", err)
	}
	s.node = cluster.Nodes[0]
	s.backends, s.clientIn = s.node.Pods[:3], s.node.Pods[3]
	s.made("namespace", cluster.Uplink.Path(), cluster.Close)
	s.made("namespace", s.node.Path(), nil)
	for _, pod := range cluster.Pods() {
		s.made("namespace", pod.Path(), nil)
	}
	s.draw()

	return nil
}

func (s *stage) startServers(context.Context) error {
	for _, pod := range s.backends {
		web, err := lab.Serve(pod.Namespace, pod.Name, pod.At(webPort)...)
		if err != nil {
			return err
		}
		s.closers = append(s.closers, web.Close)
		s.servers[pod.Name] = web
		dns, err := lab.Serve(pod.Namespace, pod.Name, pod.At(dnsPort)...)
		if err != nil {
			return err
		}
		s.closers = append(s.closers, dns.Close)
	}

	return nil
}

func (s *stage) makeCgroup(context.Context) (err error) {
	s.cgroup, err = lab.NewCgroup("demo")
	if err == nil {
		s.made("cgroup", s.cgroup.Path(), s.cgroup.Close)
	}

	return err
}

// startAgent starts the agent for the first time.
func (s *stage) startAgent(ctx context.Context) (err error) {
	s.agent, err = sluice.NewNode(sluice.Config{
		Binary:    s.cfg.sluice,
		Namespace: s.node.Namespace,
		Cgroup:    s.cgroup,
		NodeName:  s.node.Name,
		Manifests: s.manifests(),
	})
	if err != nil {
		return err
	}
	s.made("pin folder", s.agent.BPFRoot(), s.agent.Close)

	return s.runAgent(ctx)
}

// showAgent prints where the agent is and its status.
func (s *stage) showAgent() error {
	status, err := s.agent.Status()
	if err != nil {
		return err
	}
	s.out.seen("the agent follows %d Services in %s", status.Services, s.manifests())
	s.out.seen("%d hooks are attached to %s, where clients are", len(status.Hooks), status.CgroupRoot)

	return nil
}

// runAgent starts the agent and waits until it serves Services.
func (s *stage) runAgent(ctx context.Context) error {
	if err := s.agent.Start(); err != nil {
		return err
	}
	s.made("process", procOf(s.agent.PID()), nil)
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()

	return s.agent.Wait(ctx)
}

func (s *stage) startClients(context.Context) (err error) {
	if s.pod, err = s.startClient(s.clientIn.Namespace, s.clientIn.Name); err != nil {
		return err
	}
	s.host, err = s.startClient(s.node.Namespace, s.node.Name)

	return err
}

// made notes something that is there now, and how it is removed; nil if it goes
// with something else.
func (s *stage) made(kind, path string, remove func() error) {
	s.traces = append(s.traces, trace{kind, path})
	if remove != nil {
		s.closers = append(s.closers, remove)
	}
}

func procOf(pid int) string { return fmt.Sprintf("/proc/%d", pid) }

// close removes everything, last things first, and looks whether it is gone.
func (s *stage) close() error {
	var err error
	for _, remove := range slices.Backward(s.closers) {
		err = errors.Join(err, remove())
	}
	for _, t := range s.traces {
		if _, gone := os.Lstat(t.path); !errors.Is(gone, os.ErrNotExist) {
			err = errors.Join(err, fmt.Errorf("%s %s is still there", t.kind, t.path))
		}
	}

	return err
}

// showRemoved prints that all is removed. It is called when close has returned no error.
func (s *stage) showRemoved() {
	counts := make(map[string]int)
	for _, t := range s.traces {
		counts[t.kind]++
	}
	var made []string
	for _, kind := range slices.Sorted(maps.Keys(counts)) {
		made = append(made, plural(counts[kind], kind))
	}
	if made == nil {
		made = []string{"nothing, for nothing was made"}
	}
	s.out.seen("nothing is left behind; gone: %s", strings.Join(made, ", "))
}

func plural(n int, word string) string {
	switch {
	case n == 1:
		return "1 " + word
	case strings.HasSuffix(word, "s"):
		return fmt.Sprintf("%d %ses", n, word)
	default:
		return fmt.Sprintf("%d %ss", n, word)
	}
}

// agentLog is the end of what the agent has printed, for when things go wrong.
func (s *stage) agentLog() string {
	if s.agent == nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(s.agent.Log()), "\n")

	return "\n\nThe agent has printed last:\n" + strings.Join(lines[max(0, len(lines)-10):], "\n")
}

// waitTimeout limits waits for what takes far less.
const waitTimeout = 10 * time.Second

// pause waits for a while, unless ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// connections is how many connections the backends of web have accepted.
func (s *stage) connections() (n int) {
	for _, server := range s.servers {
		n += server.Connections()
	}

	return n
}

// answers is how many questions the backends of web have answered.
func (s *stage) answers() (n int) {
	for _, server := range s.servers {
		n += server.Answers()
	}

	return n
}

// awaitConnections waits until the backends of web have accepted so many.
func (s *stage) awaitConnections(ctx context.Context, n int) error {
	for deadline := time.Now().Add(waitTimeout); s.connections() < n; {
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("of the connections that a load makes, %d are missing", n-s.connections())
		}
	}

	return nil
}
