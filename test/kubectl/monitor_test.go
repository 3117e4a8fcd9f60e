package kubectl

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// testMonitor follows refusals on two nodes, and kills the plugin: nothing of it may go on on the nodes.
func testMonitor(t *testing.T, w *world) {
	for i, node := range w.lab.Nodes {
		load, err := lab.MustCaller(t, node.Pods[1].Namespace, w.cgroups[i]).StartLoad(
			lab.Load{Exchange: lab.Exchange{Network: "tcp", Address: "10.96.0.2:80"}, Rate: 5})
		lab.Must(t, err)
		t.Cleanup(func() {
			_, err := load.Stop()
			lab.Must(t, err)
		})
	}
	table := w.mustFollow(t, "monitor", "--refused")
	objects := w.mustFollow(t, "monitor", "--refused", "--service", "empty", "--namespace", "shop", "--output", "json")
	// One without anything to print would not notice that its output is closed.
	quiet := w.mustFollow(t, "monitor", "--refused", "--service", "shop/web")
	for i, node := range w.lab.Nodes {
		lab.Eventually(t, "the table has refusals of "+node.Name, func() error {
			return table.has(func(line string) bool {
				return strings.HasPrefix(line, node.Name+"   ") && strings.Contains(line, "shop/empty") && strings.Contains(line, "10.96.0.2:80")
			})
		})
		lab.Eventually(t, "the objects have refusals of "+node.Name, func() error {
			return objects.has(func(line string) bool {
				var event struct{ Node, Service string }

				return json.Unmarshal([]byte(line), &event) == nil && event.Node == node.Name && strings.HasPrefix(event.Service, "shop/empty")
			})
		})
		lab.Eventually(t, "all three run on "+node.Name, func() error { return w.processes(i, 4) })
	}
	lab.Eventually(t, "the node that does not answer is named", func() error {
		return table.has(func(line string) bool { return strings.HasPrefix(line, "node-3: NO ANSWER: the kubelet at ") })
	})
	headers := 0
	for _, line := range table.all() {
		if strings.HasPrefix(line, "NODE     TIME ") {
			headers++
		}
	}
	if headers != 1 {
		t.Errorf("the header is there %d times, want once", headers)
	}
	lab.Must(t, table.cmd.Process.Kill(), objects.cmd.Process.Kill(), quiet.cmd.Process.Kill())
	for i := range w.lab.Nodes {
		lab.Eventually(t, "nothing goes on when the plugins have been killed", func() error { return w.processes(i, 1) })
	}
}

// processes returns an error unless so many processes run on a node, its agent among them.
func (w *world) processes(node, want int) error {
	pids, err := w.agents[node].AgentCgroup().Processes()
	if err == nil && len(pids) != want {
		err = fmt.Errorf("the processes %v run, want %d", pids, want)
	}

	return err
}

// followed is a verb that goes on, and the lines of both its outputs so far.
type followed struct {
	cmd *exec.Cmd

	mu    sync.Mutex
	lines []string
}

func (w *world) mustFollow(t testing.TB, args ...string) *followed {
	t.Helper()
	f := &followed{cmd: w.command(t, append([]string{"sluice"}, args...)...)}
	out, err := f.cmd.StdoutPipe()
	lab.Must(t, err)
	f.cmd.Stderr = f.cmd.Stdout
	lab.Must(t, f.cmd.Start())
	t.Cleanup(func() {
		_ = f.cmd.Process.Kill() // or it has ended
		_ = f.cmd.Wait()
	})
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			f.mu.Lock()
			f.lines = append(f.lines, lines.Text())
			f.mu.Unlock()
		}
	}()

	return f
}

func (f *followed) all() []string {
	f.mu.Lock()
	defer f.mu.Unlock()

	return f.lines
}

// has returns an error unless a line is right.
func (f *followed) has(right func(string) bool) error {
	all := f.all()
	for _, line := range all {
		if right(line) {
			return nil
		}
	}

	return fmt.Errorf("it has printed:\n%s", strings.Join(all, "\n"))
}
