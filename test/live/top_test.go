package live

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/pkg/top"
	"github.com/sluice-lb/sluice/test/lab"
)

// busy has a process of the pod connect to db, where it receives 1,000 bytes, and be refused by empty, some
// fifty times a second, and receive 2,000 bytes as often on one connection to cache, until the test ends.
func (w *world) busy(t *testing.T) {
	t.Helper()
	pod := w.pod(t)
	cache := mustDial(t, pod, "tcp4", "10.96.0.2:6379")
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(10 * time.Millisecond):
			}
			if err := turn(pod, cache); err != nil {
				stopped <- err

				return
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		lab.Must(t, <-stopped)
	})
}

// turn is what [world.busy] does once.
func turn(pod *lab.Caller, cache *lab.Socket) error {
	refused, err := pod.Socket("tcp4")
	if err != nil {
		return err
	}
	_ = refused.Connect("10.96.0.3:80")
	db, err := pod.Socket("tcp4")
	if err != nil {
		return err
	}
	ask := func(s *lab.Socket, text string) error {
		if err := s.Send(text); err != nil {
			return err
		}
		_, _, err := s.Recv()

		return err
	}

	return errors.Join(refused.Close(), db.Connect("10.96.0.1:5432"), ask(db, "size 1000\n"), db.Close(), ask(cache, "size 2000\n"))
}

// The rates are those of real connections, by Service and by backend, with a dead agent.
func TestTop(t *testing.T) {
	w := mustWorld(t)
	w.busy(t)
	lab.Must(t, w.agent.Kill())
	out, notes, err := w.run(t, "top", "-o", "json", "--interval", "1s", "--sort", "received")
	if err != nil {
		t.Fatalf("%v: %s", err, notes)
	}
	var table top.Table
	lab.Must(t, json.Unmarshal([]byte(out), &table))
	var names []string
	for _, s := range table.Services {
		names = append(names, s.Service)
	}
	if slices.Sort(names[1:]); !slices.Equal(names, []string{"shop/cache", "shop/db", "shop/empty"}) || table.Quiet != 1 {
		t.Fatalf("Services are %v, %d quiet, want cache first, and logs to be quiet\n%s", names, table.Quiet, out)
	}
	service := func(name string) top.Service {
		return table.Services[slices.IndexFunc(table.Services, func(s top.Service) bool { return s.Service == name })]
	}
	cache, db, empty := service("shop/cache"), service("shop/db"), service("shop/empty")
	turns := empty.Refused["reject_no_backend"] // each second
	near := func(what string, got, want float64) {
		if got < 0.7*want || got > 1.4*want {
			t.Errorf("%s: %v, want some %v", what, got, want)
		}
	}
	if turns < 5 {
		t.Fatalf("%v turns a second: the test does nothing\n%s", turns, out)
	}
	near("new connections to db", db.New, turns)
	near("bytes from db", db.Received, 1000*turns)
	near("bytes to db", db.Sent, float64(len("size 1000\n")+1)*turns) // a SYN counts as a byte
	if h := db.Handshake; h == nil || h.P50Seconds <= 0 || h.P99Seconds < h.P50Seconds || h.P99Seconds > 1 {
		t.Errorf("handshakes with db took %+v", h)
	}
	near("refusals on the node", table.Refused["reject_no_backend"], turns)
	near("bytes from cache", cache.Received, 2000*turns)
	near("bytes to cache", cache.Sent, float64(len("size 2000\n"))*turns)
	if cache.Live != 1 || cache.New != 0 || len(cache.Backends) != 2 || empty.New != 0 || len(db.Refused) != 0 {
		t.Errorf("cache %+v\nempty %+v\ndb %+v", cache, empty, db)
	}
	green := w.node.Pods[2].IPv4.String() + ":8080"
	i := slices.IndexFunc(cache.Backends, func(b top.Backend) bool { return b.Backend.String() == green })
	if i < 0 || cache.Backends[i].Live != 1 || cache.Backends[i].RTTMicroseconds == 0 {
		t.Fatalf("backends of cache are %+v", cache.Backends)
	}
	near("bytes from green", cache.Backends[i].Received, 2000*turns)

	t.Run("printed as tables where there is no terminal", func(t *testing.T) {
		cmd := exec.Command("timeout", "--signal=INT", "2", w.agent.Binary(), "--bpf-root", w.agent.BPFRoot(), "top", "--interval", "500ms")
		var out strings.Builder
		cmd.Stdout = &out
		lab.Must(t, lab.Start(w.node.Namespace, w.agent.AgentCgroup(), cmd))
		_ = cmd.Wait() // timeout has a code of its own
		pattern := `(?m)^\d\d:\d\d:\d\d  \d+ live, \d+ new/s, \d+ refused/s, most of them reject_no_backend; quiet Services: 1
SERVICE +LIVE +NEW/S +REFUSED/S +SENT/S +RECEIVED/S +HANDSHAKE P50 P99 +UNANSWERED/S +RETRANS/S
shop/cache +1 +0 +0 +\S+ \S+ +[\d.]+ KiB +- +0 +0
shop/db +\d+ +\d+ +0 +\S+ \S+ +[\d.]+ KiB +[\d.]+[µm]s [\d.]+[µm]s +0 +0
shop/empty +0 +0 +\d+ reject_no_backend +0 B +0 B +- +0 +0

`
		if n := len(regexp.MustCompile(pattern).FindAllString(out.String(), -1)); n < 2 {
			t.Errorf("%d tables match\n%s\nit prints\n%s", n, pattern, &out)
		}
	})
	t.Run("of one Service, by backend", func(t *testing.T) {
		out, _, err := w.run(t, "top", "cache", "--once", "--interval", "500ms")
		lab.Must(t, err)
		pattern := `^\d\d:\d\d:\d\d  shop/cache  1 live, 0 new/s
BACKEND +PORT +PROTOCOL +LIVE +SENT/S +RECEIVED/S +RETRANS/S +RTT
10.244.1.4:8080 +shop/cache +TCP +1 +\S+ \S+ +[\d.]+ KiB +0 +[\d.]+[µm]s
\[fd00:10:244:1::4\]:8080 +shop/cache +TCP +0 +0 B +0 B +0 +-
$`
		if !regexp.MustCompile(pattern).MatchString(out) {
			t.Errorf("it prints\n%s\nwant\n%s", out, pattern)
		}
	})
	for args, want := range map[string]string{
		"--sort size":    `--sort "size": it is one of service, live, new, `,
		"--interval 1ms": "--interval 1ms: it is 100ms or more",
		"nosuch":         `no Service is called "nosuch"`,
		"-o xml":         `--output "xml": it is table, json or yaml`,
	} {
		if _, notes, err := w.run(t, append([]string{"top"}, strings.Fields(args)...)...); err == nil || !strings.Contains(notes, want) {
			t.Errorf("%s: %v, %q, want %q", args, err, notes, want)
		}
	}
}

// terminal is a session of tmux, whose server ends with the test.
type terminal struct{ socket string }

func (term *terminal) tmux(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command("tmux", append([]string{"-u", "-S", term.socket}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("tmux %v: %v: %s", args, err, out)
	}

	return string(out)
}

// until waits until the screen matches, and returns it.
func (term *terminal) until(t *testing.T, pattern string) string {
	t.Helper()
	wanted := regexp.MustCompile(pattern)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		seen := term.tmux(t, "capture-pane", "-p", "-t", "top")
		if wanted.MatchString(seen) {
			return seen
		}
		if time.Now().After(deadline) {
			t.Fatalf("the screen does not match\n%s\nit is\n%s", pattern, seen)
		}
	}
}

// In a terminal, keys sort the table, open a Service and end the program, which leaves the terminal as it was.
func TestTopInTerminal(t *testing.T) {
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Fatal("needs tmux: test/setup.sh test")
	}
	w := mustWorld(t)
	w.busy(t)
	term := &terminal{filepath.Join(t.TempDir(), "tmux")}
	server := exec.Command("tmux", "-u", "-S", term.socket, "-f", "/dev/null", "new-session", "-d", "-s", "top", "-x", "150", "-y", "14", "sh")
	server.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "TERM=xterm-256color")
	lab.Must(t, lab.Start(w.node.Namespace, w.agent.AgentCgroup(), server), server.Wait())
	t.Cleanup(func() { term.tmux(t, "kill-server") })
	term.until(t, "^#")
	term.tmux(t, "send-keys", "-t", "top", fmt.Sprintf("%s --bpf-root %s top --interval 300ms", w.agent.Binary(), w.agent.BPFRoot()), "Enter")

	seen := term.until(t, `^\d\d:\d\d:\d\d  \d+ live, \d+ new/s, \d+ refused/s, most of them reject_no_backend; quiet Services: 1

  SERVICE▼ +LIVE +NEW/S +REFUSED/S +SENT/S +RECEIVED/S +HANDSHAKE P50 P99 +UNANSWERED/S +RETRANS/S
▶ shop/cache +1 +0 +▁+ +0 +\d.* KiB +- +0 +0
  shop/db +\d+ +\d+ +[▁▂▃▄▅▆▇█]*█[▁▂▃▄▅▆▇█]* +0 +\S+ \S+ +[\d.]+ KiB +[\d.]+[µm]s [\d.]+[µm]s +0 +0
  shop/empty +0 +0 +▁+ +\d+ reject_no_backend +0 B +0 B +- +0 +0
`)
	t.Logf("\n%s", seen)
	term.tmux(t, "send-keys", "-t", "top", "a")
	term.until(t, `new/s.*reject_no_backend\n(.*\n)*  shop/logs +0 +0 `)
	term.tmux(t, "send-keys", "-t", "top", "a", "Right", "Right")
	term.until(t, `NEW/S▼(.*\n)  shop/db .*\n▶ shop/cache .*\n  shop/empty `)
	term.tmux(t, "send-keys", "-t", "top", "Down", "Up", "Up", "Enter")
	seen = term.until(t, `^\d\d:\d\d:\d\d  shop/db  \d+ live, \d+ new/s +[▁▂▃▄▅▆▇█]+

  BACKEND +PORT +PROTOCOL +LIVE +SENT/S +RECEIVED/S +RETRANS/S +RTT
  10.244.1.3:8080 +shop/db:sql +TCP +\d+ `)
	t.Logf("\n%s", seen)
	term.tmux(t, "send-keys", "-t", "top", "Escape")
	term.until(t, `NEW/S▼(.*\n)▶ shop/db `)
	term.tmux(t, "resize-window", "-t", "top", "-x", "60", "-y", "6")
	term.until(t, `(?m)^▶ shop/db [^\n]{0,51}\n\n?(.*\n)?↑↓ choose`)
	term.tmux(t, "send-keys", "-t", "top", "q")
	term.until(t, `s\n#\n*$`) // the end of its line, which is wrapped now, and the prompt
}
