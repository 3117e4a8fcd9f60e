package kubectl

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// testUI looks at the page in a browser.
func testUI(t *testing.T, w *world) {
	w.mustConnect(t)
	browser := filepath.Join(t.TempDir(), "ui")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", browser, ".")
	build.Dir = "../ui"
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	count := func(verb string) int64 {
		n, _ := asked.LoadOrStore(verb, new(atomic.Int64))

		return n.(*atomic.Int64).Load()
	}
	services, tops := count("services"), count("top")
	url := w.mustStartUI(t)
	steps := []string{
		"see=shop/web", "see=shop/empty", "see=11 connections", "see=no backend gets new connections",
		"see=192.168.50.100", "see=10.244.1.2:8080/TCP", "see=10.244.2.2:8080/TCP",
		"see=node-1", "see=node-3: no answer: the kubelet at 127.0.0.1:",
		// The filter has the focus.
		"fill=no such thing", "gone=shop/web", "fill=192.168.50.100", "see=shop/web", "gone=shop/empty", "fill= ", "fill=shop", "see=shop/empty",
		"click=[data-service='shop/web']", "gone=shop/empty", "see=Click again", "click=[data-service='shop/web']", "see=shop/empty",
		"hidden=6s",
	}
	if file := os.Getenv("SLUICE_TEST_SCREENSHOT"); file != "" {
		steps = append(steps, "shot="+file)
	}
	if out, err := w.browse(t, browser, url, steps...); err != nil {
		t.Errorf("%v: the page shows %s", err, out)
	}

	if services, tops = count("services")-services, count("top")-tops; services == 0 || 2*services > tops+1 {
		t.Errorf("two nodes that are well were asked for services %d times, and for what differs %d times", services, tops)
	}

	refused := lab.MustCaller(t, w.lab.Nodes[0].Namespace, w.cgroups[0])
	load, err := refused.StartLoad(lab.Load{Exchange: lab.Exchange{Network: "tcp", Address: "10.96.0.2:80"}, Rate: 20})
	lab.Must(t, err)
	out, err := w.browse(t, browser, url, "see=/s refused: the Service has no usable endpoint")
	if err != nil {
		t.Errorf("%v: connections are refused, and the page shows %s", err, out)
	}
	report, err := load.Stop()
	lab.Must(t, err)
	if report.Succeeded > 0 {
		t.Errorf("%d connections to a Service without endpoints", report.Succeeded)
	}
	if out, err := w.browse(t, browser, strings.Split(url, "token=")[0], "see=has a token"); err == nil || !strings.Contains(err.Error(), "403") {
		t.Errorf("without the token: %v: %s", err, out)
	}
}

// browse does steps on the page, see the program in test/ui.
func (w *world) browse(t testing.TB, browser, url string, steps ...string) (string, error) {
	t.Helper()
	out, err := lab.Output(nil, nil, browser, append([]string{url}, steps...)...)

	return out, err
}

// mustStartUI runs `kubectl sluice ui` until the test ends, and returns the address that it prints.
func (w *world) mustStartUI(t testing.TB) string {
	t.Helper()
	command := w.command(t, "sluice", "ui", "--timeout", "5s")
	cmd := exec.Command(command.Path, command.Args[1:]...) // which ends after the test's context
	cmd.Env = command.Env
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	lab.Must(t, err)
	lab.Must(t, cmd.Start())
	t.Cleanup(func() {
		lab.Must(t, cmd.Process.Signal(unix.SIGTERM))
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		select {
		case err := <-ended:
			lab.Must(t, err)
		case <-time.After(10 * time.Second):
			t.Error("kubectl sluice ui does not end")
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	lab.Must(t, err)

	return strings.TrimSpace(line)
}
