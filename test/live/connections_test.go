package live

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/sluice-lb/sluice/pkg/connections"
	"github.com/sluice-lb/sluice/test/lab"
)

// connections returns what `sluice connections` lists.
func (w *world) connections(t *testing.T, args ...string) []connections.Connection {
	t.Helper()
	out, notes, err := w.run(t, append([]string{"connections", "-o", "json", "--pod-logs", w.podLogs}, args...)...)
	if err != nil {
		t.Fatalf("%v: %s", err, notes)
	}
	var all []connections.Connection
	lab.Must(t, json.Unmarshal([]byte(out), &all))

	return all
}

// brief returns a connection in one line, without what differs between runs.
func brief(c connections.Connection) string {
	process := "no process"
	if c.Process != nil {
		process = c.Process.Command
	}

	return fmt.Sprintf("%s %s %s of %s -> %s -> %s %s", c.Service, c.Protocol, c.Pod, process, c.OriginalDst, c.Backend, c.State)
}

func briefs(all []connections.Connection) []string {
	var lines []string
	for _, c := range all {
		lines = append(lines, brief(c))
	}

	return lines
}

// Each kind of socket is listed with its Service, backend, pod and process, in every network namespace and
// with a dead agent; and no socket that was not translated.
func TestConnections(t *testing.T) {
	w := mustWorld(t)
	pod, host := w.pod(t), w.host(t)
	red, green := w.node.Pods[1], w.node.Pods[2]

	begin := time.Now()
	sql := mustDial(t, pod, "tcp4", "10.96.0.1:5432")
	mustExchange(t, sql, "size 5000\n")
	cache := mustDial(t, host, "tcp6", "[fd00:10:96::2]:6379")
	mustExchange(t, cache, "who\n")
	mapped := mustDial(t, pod, "tcp6", "[::ffff:10.96.0.2]:6379")
	mustExchange(t, mapped, "who\n")
	stats := mustDial(t, pod, "udp4", "10.96.0.1:8125")
	mustExchange(t, stats, "who\n")
	loose, err := pod.Socket("udp4")
	lab.Must(t, err, loose.SendTo("who\n", "10.96.0.1:8125"))
	_, _, err = loose.Recv()
	lab.Must(t, err)
	mustExchange(t, mustDial(t, pod, "tcp4", red.At(8080)[0]), "who\n") // to the backend itself
	closed := mustDial(t, pod, "tcp4", "10.96.0.1:5432")                // ended
	lab.Must(t, closed.Close())
	moved := mustDial(t, pod, "udp4", "10.96.0.1:8125") // connected to another address since
	lab.Must(t, moved.Connect(green.At(8080)[0]))

	redAt, green4, green6 := red.IPv4.String()+":8080", green.IPv4.String()+":8080", "["+green.IPv6.String()+"]:8080"
	want := []string{
		"shop/cache TCP shop/web-0 of exe -> 10.96.0.2:6379 -> " + green4 + " established",
		"shop/cache TCP  of exe -> [fd00:10:96::2]:6379 -> " + green6 + " established",
		"shop/db:sql TCP shop/web-0 of exe -> 10.96.0.1:5432 -> " + redAt + " established",
		"shop/db:stats UDP shop/web-0 of exe -> 10.96.0.1:8125 -> " + redAt + " unconnected",
		"shop/db:stats UDP shop/web-0 of exe -> 10.96.0.1:8125 -> " + redAt + " connected",
	}
	lab.Must(t, w.agent.Kill())
	isOver := func(c connections.Connection) bool {
		return strings.HasPrefix(string(c.State), "fin-wait") || c.State == "closing"
	}
	var all []connections.Connection
	for _, c := range w.connections(t) {
		if !isOver(c) { // the closed one, until its backend has closed it, too
			all = append(all, c)
		}
	}
	if diff := cmp.Diff(want, briefs(all)); diff != "" {
		t.Fatalf("(-want +got):\n%s", diff)
	}

	c := all[2]
	if c.Process.PID != pod.PID() || c.PodUID != webUID || c.Client.Addr() != w.web.IPv4 {
		t.Errorf("process %d, pod %s, client %s, want %d, %s, %s", c.Process.PID, c.PodUID, c.Client, pod.PID(), webUID, w.web.IPv4)
	}
	cookie, err := sql.Cookie()
	lab.Must(t, err)
	if c.Cookie != cookie {
		t.Errorf("cookie %d, want %d", c.Cookie, cookie)
	}
	if c.TCP.BytesSent != uint64(len("size 5000\n")) || c.TCP.BytesReceived < 5000 || c.TCP.BytesReceived > 5001 || c.TCP.RTTMicroseconds == 0 || c.TCP.Retransmits != 0 {
		t.Errorf("of TCP: %+v", *c.TCP)
	}

	if c.AgeSeconds == nil || time.Duration(*c.AgeSeconds)*time.Second > time.Since(begin) || all[3].AgeSeconds != nil {
		t.Errorf("ages of %v and %v s, %v after the first connect", c.AgeSeconds, all[3].AgeSeconds, time.Since(begin))
	}

	t.Run("one line in a table", func(t *testing.T) {
		out, _, err := w.run(t, "connections", "db", "--state", "established", "--pod-logs", w.podLogs)
		lab.Must(t, err)
		line := fmt.Sprintf("shop/db:sql TCP %s shop/web-0 exe[%d] 10.96.0.1:5432 %s established AGE 10 B 5000 B 0 RTT %d", c.Client, pod.PID(), redAt, cookie)
		want := "SERVICE PROTOCOL CLIENT POD PROCESS DESTINATION BACKEND STATE AGE SENT RECEIVED RETRANSMITS RTT COOKIE\n" + line + "\n"
		out = regexp.MustCompile(` +`).ReplaceAllString(out, " ")
		out = regexp.MustCompile(`established \d+s`).ReplaceAllString(out, "established AGE")
		out = regexp.MustCompile(`[\d.]+[µm]s`).ReplaceAllString(out, "RTT")
		out = strings.Replace(out, " 5001 B ", " 5000 B ", 1)
		if diff := cmp.Diff(want, out); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
	t.Run("the same in YAML", func(t *testing.T) {
		out, _, err := w.run(t, "connections", "-o", "yaml", "--pod-logs", w.podLogs, "--cookie", fmt.Sprint(cookie))
		lab.Must(t, err)
		var one []connections.Connection
		lab.Must(t, yaml.Unmarshal([]byte(out), &one))
		if len(one) != 1 || brief(one[0]) != want[2] {
			t.Errorf("%q", briefs(one))
		}
	})
	for _, test := range []struct {
		args string
		want []string
	}{
		{"--service cache", want[:2]},
		{"shop/db", want[2:]},
		{"--pod web-0 --state established", []string{want[0], want[2]}},
		{"--pod shop/web-0 --service cache", want[:1]},
		{"--pod " + webUID + " --state unconnected", want[3:4]},
		{"--backend " + green.IPv6.String(), want[1:2]},
		{"--backend " + redAt + " --state connected", want[4:]},
		{"--client " + c.Client.String(), want[2:3]},
		{"--sort received --state established --pod web-0", []string{want[2], want[0]}},
		{"--sort age --state established", []string{want[2], want[1], want[0]}},
	} {
		t.Run("filtered by "+test.args, func(t *testing.T) {
			if diff := cmp.Diff(test.want, briefs(w.connections(t, strings.Fields(test.args)...))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	for args, want := range map[string]string{
		"--service nosuch":                  `no Service is called "nosuch"`,
		"--pod web --pod-logs " + w.podLogs: `pod "web": this node has no such pod`,
		"--state estblished":                `state "estblished": it is one of established, syn-sent, `,
		"--backend red":                     `backend "red": it is neither ADDRESS nor ADDRESS:PORT`,
		"--sort size":                       `--sort "size": it is one of age, backend, pod, received, `,
		"-o xml":                            `--output "xml": it is table, json or yaml`,
	} {
		if _, notes, err := w.run(t, append([]string{"connections"}, strings.Fields(args)...)...); err == nil || !strings.Contains(notes, want) {
			t.Errorf("%s: %v, %q, want %q", args, err, notes, want)
		}
	}
}

// A UDP socket stores four destinations in itself; the others are listed, too.
func TestConnectionsOfOneSocket(t *testing.T) {
	w := mustWorld(t)
	loose, err := w.pod(t).Socket("udp4")
	lab.Must(t, err)
	for port := 9001; port <= 9006; port++ {
		lab.Must(t, loose.SendTo("who\n", fmt.Sprintf("10.96.0.4:%d", port)))
	}
	var at []string
	for _, c := range w.connections(t, "logs") {
		at = append(at, c.Service+" "+c.OriginalDst.String())
		if c.State != connections.Unconnected || c.IdleSeconds == nil || *c.IdleSeconds > 60 || c.Pod != "shop/web-0" {
			t.Errorf("%+v", c)
		}
	}
	var want []string
	for i := 1; i <= 6; i++ {
		want = append(want, fmt.Sprintf("shop/logs:p%d 10.96.0.4:900%[1]d", i))
	}
	if diff := cmp.Diff(want, at); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Only the connections that are named end, and only if the answer is yes; both ends notice.
func TestKill(t *testing.T) {
	w := mustWorld(t)
	pod := w.pod(t)
	red := w.node.Pods[1]
	dial := func(network, to string) *lab.Socket {
		s := mustDial(t, pod, network, to)
		mustExchange(t, s, "who\n")

		return s
	}
	sql, other, stats := dial("tcp4", "10.96.0.1:5432"), dial("tcp4", "10.96.0.1:5432"), dial("udp4", "10.96.0.1:8125")
	cache, cache6 := dial("tcp6", "[::ffff:10.96.0.2]:6379"), dial("tcp6", "[fd00:10:96::2]:6379")
	direct := dial("tcp4", red.At(8080)[0])
	loose, err := pod.Socket("udp4")
	lab.Must(t, err, loose.SendTo("who\n", "10.96.0.1:8125"))
	cookieOf := func(s *lab.Socket) string {
		cookie, err := s.Cookie()
		lab.Must(t, err)

		return fmt.Sprint(cookie)
	}
	mustLive := func(sockets ...*lab.Socket) {
		t.Helper()
		for _, s := range sockets {
			mustExchange(t, s, "who\n")
		}
	}
	mustBeEnded := func(s *lab.Socket) {
		t.Helper()
		if _, _, err := s.Recv(); lab.Errno(err) != unix.ECONNABORTED {
			t.Errorf("receive: %v, want %v", err, unix.ECONNABORTED)
		}
	}

	for _, test := range []struct {
		name, args, want string
	}{
		{"nothing is named", "--kill --yes", "all connections of the node would end"},
		{"the socket was not translated", "--kill --cookie " + cookieOf(direct), "there is no such connection; Sluice ends none that it has not translated"},
		{"the socket is not connected", "--kill --yes --cookie " + cookieOf(loose), "an unconnected UDP socket has no connection to end"},
		{"no one answers", "--kill --cookie " + cookieOf(sql), "End 1 connection? [y/N] sluice: --kill: nothing was ended"},
	} {
		t.Run("refused if "+test.name, func(t *testing.T) {
			if _, notes, err := w.run(t, append([]string{"connections"}, strings.Fields(test.args)...)...); err == nil || !strings.Contains(notes, test.want) {
				t.Errorf("%v, %q, want %q", err, notes, test.want)
			}
		})
	}
	t.Run("none, if the socket was not translated", func(t *testing.T) {
		if _, notes, err := w.run(t, "connections", "--kill", "--yes", "--cookie", cookieOf(direct)); err != nil || notes != "0 connections ended\n" {
			t.Errorf("%v, %q", err, notes)
		}
	})
	mustLive(sql, other, stats, cache, cache6, direct)

	t.Run("one that is answered with yes", func(t *testing.T) {
		cmd := exec.Command(w.agent.Binary(), "--bpf-root", w.agent.BPFRoot(), "--cgroup-root", w.cgroup.Path(),
			"connections", "--kill", "--cookie", cookieOf(sql))
		cmd.Stdin = strings.NewReader("y\n")
		var notes strings.Builder
		cmd.Stderr = &notes
		lab.Must(t, lab.Start(w.node.Namespace, w.agent.AgentCgroup(), cmd), cmd.Wait())
		if want := "End 1 connection? [y/N] 1 connection ended\n"; notes.String() != want {
			t.Errorf("it prints %q, want %q", &notes, want)
		}
		mustBeEnded(sql)
		mustLive(other, stats, cache, cache6, direct)
	})
	t.Run("those of a Service", func(t *testing.T) {
		_, notes, err := w.run(t, "connections", "shop/db", "--kill", "--yes")
		lab.Must(t, err)
		if want := "left alone: socket " + cookieOf(loose) + " to 10.96.0.1:8125: an unconnected UDP socket has no connection to end\n2 connections ended\n"; notes != want {
			t.Errorf("it prints %q, want %q", notes, want)
		}
		mustBeEnded(other)
		mustBeEnded(stats)
		mustLive(cache, cache6, direct)
		lab.Must(t, other.Close(), loose.SendTo("who\n", "10.96.0.1:8125"))
	})
	t.Run("those of either family", func(t *testing.T) {
		_, notes, err := w.run(t, "connections", "cache", "--kill", "--yes")
		lab.Must(t, err)
		if want := "2 connections ended\n"; notes != want {
			t.Errorf("it prints %q, want %q", notes, want)
		}
		mustBeEnded(cache)
		mustBeEnded(cache6)
		mustLive(direct)
	})
	lab.EventuallyIn(t, 5*time.Second, "no connection is left", func() bool {
		return len(w.connections(t, "--state", "established")) == 0
	})
}
