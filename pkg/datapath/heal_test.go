package datapath

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// newHealing returns a world that heals.
func newHealing(t testing.TB) *world {
	t.Helper()
	w := newWorld(t, func(c *Config) { c.Heal, c.Handshakes = true, false })
	w.needsTracing(t)

	return w
}

// drop returns a ruleset that drops packets to the port of servers.
func drop(table, hook string) string {
	return fmt.Sprintf(`table inet %s {
		chain c {
			type filter hook %s priority 0;
			meta l4proto { tcp, udp } th dport %d drop
		}
	}`, table, hook, serverPort)
}

// silence drops what a pod receives at the port of servers, until the result is called.
func silence(t testing.TB, pod *lab.Pod) (end func()) {
	t.Helper()
	lab.Must(t, pod.Netfilter(drop("silence", "input")))

	return func() {
		t.Helper()
		lab.Must(t, pod.Netfilter("delete table inet silence"))
	}
}

// health returns what programs know of a backend.
func (w *world) health(id uint32) maps.BackendHealth {
	h, _ := w.Maps().HealthOf(id)

	return h
}

// mustRun runs a load to its end.
func mustRun(t testing.TB, client *lab.Caller, x lab.Exchange, rate int, d time.Duration) lab.LoadReport {
	t.Helper()
	x.Timeout = 400 * time.Millisecond
	load, err := client.StartLoad(lab.Load{Exchange: x, Rate: rate, Duration: d})
	lab.Must(t, err)
	report, err := load.Wait()
	lab.Must(t, err)

	return report
}

// A backend that stops to answer gets no new connections after a moment, and is used again when it
// answers, from sockets of each kind.
func TestHealSilent(t *testing.T) {
	w := newHealing(t)
	client := w.pod(t)
	for i, x := range []lab.Exchange{{Network: "tcp4"}, {Network: "tcp6"}, {Network: "udp4"}, {Network: "udp4", Unconnected: true}} {
		t.Run(fmt.Sprintf("%s, unconnected %v", x.Network, x.Unconnected), func(t *testing.T) {
			to, at := w.all4(), fmt.Sprintf("10.96.1.%d:80", i+1)
			if x.Network == "tcp6" {
				to, at = w.all6(), "[fd00:96::1]:80"
			}
			s, x := w.add(t, service{proto: x.Network[:3], at: []string{at}, to: to}), x
			x.Address = at
			if report := mustRun(t, client, x, 200, 500*time.Millisecond); len(report.Failures) > 0 {
				t.Fatalf("%d failures before, such as %v", len(report.Failures), report.Failures[0])
			}
			answer := silence(t, w.answers[2])
			blue := s.backends[2]
			mustRun(t, client, x, 200, 1500*time.Millisecond)
			if h := w.health(blue); !h.IsSuspect() || h.Episodes != 1 {
				t.Fatalf("it is %+v", h)
			}
			before := w.health(blue).PassedOver
			report := mustRun(t, client, x, 200, time.Second)
			if n := len(report.Failures); n > 2 { // probes
				t.Errorf("%d of %d failed, such as %v", n, report.Started, report.Failures[0])
			}
			if n := w.health(blue).PassedOver - before; n < 30 {
				t.Errorf("it was passed over %d times", n)
			}
			answer()
			for range 10 {
				if report = mustRun(t, client, x, 100, 500*time.Millisecond); report.Answers["blue"] > 5 {
					break
				}
			}
			if h := w.health(blue); h.IsSuspect() || report.Answers["blue"] <= 5 {
				t.Errorf("after it answers again, it is %+v, and answers are by %v", h, report.Answers)
			}
			for _, id := range s.backends[:2] {
				if h := w.health(id); h.Episodes != 0 {
					t.Errorf("one that works is %+v", h)
				}
			}
		})
	}
}

// Connected UDP sockets that stay open show no answers, so they speak against a backend only if it has
// answered others lately.
func TestHealOpenDatagramSockets(t *testing.T) {
	w := newHealing(t)
	client := w.pod(t)
	const at = "10.96.1.1:80"
	s := w.add(t, service{proto: "udp", at: []string{at}, to: w.all4()[:1]})
	for age, counts := range map[time.Duration]bool{time.Second: true, 20 * time.Second: false} {
		h := maps.BackendHealth{Id: s.backends[0], Answered: now() - uint64(age)}
		lab.Must(t, w.Maps().Health.Put(maps.Index(h.Id), h))
		for range 5 {
			lab.Must(t, mustSocket(t, client, "udp4").Connect(at))
		}
		if h := w.health(h.Id); h.Evidence > 0 != counts {
			t.Errorf("answered %v ago: %+v", age, h)
		}
	}
}

// A UDP socket that connects again, after it has received something, shows nothing of its new
// backend: neither a silence, nor an answer when it is closed.
func TestHealReconnectedSocket(t *testing.T) {
	w := newHealing(t)
	client := w.pod(t)
	w.add(t, service{proto: "udp", at: []string{"10.96.1.1:80"}, to: w.all4()[:1]})
	other := w.add(t, service{proto: "udp", at: []string{"10.96.1.2:80"}, to: w.all4()[1:2]})
	for name, again := range map[string]bool{"connected once": false, "connected again": true} {
		t.Run(name, func(t *testing.T) {
			socket := mustSocket(t, client, "udp4")
			if again {
				lab.Must(t, socket.Connect("10.96.1.1:80"), socket.Send("who\n"))
				_, _, err := socket.Recv()
				lab.Must(t, err)
			}
			was := maps.BackendHealth{Id: other.backends[0], Answered: now() - uint64(time.Second)}
			lab.Must(t, w.Maps().Health.Put(maps.Index(was.Id), was))
			lab.Must(t, socket.Connect("10.96.1.2:80"))
			if h := w.health(was.Id); h.Evidence > 0 == again {
				t.Errorf("after connect(), it is %+v", h)
			}
			if !again {
				lab.Must(t, socket.Send("who\n"))
				_, _, err := socket.Recv()
				lab.Must(t, err)
			}
			lab.Must(t, socket.Close())
			if h := w.health(was.Id); h.Answered > was.Answered == again {
				t.Errorf("after close(), it is %+v", h)
			}
		})
	}
}

// What an application can do to its own socket clears no suspicion.
func TestHealFeignedAnswers(t *testing.T) {
	w := newHealing(t)
	client := w.pod(t)
	w.add(t, service{proto: "udp", at: []string{"10.96.1.2:53"}, to: w.all4()[1:2]})
	const at = "10.96.1.1:80"
	silence(t, w.answers[2])
	suspects := make(map[string]uint32)
	for _, proto := range []string{"udp", "tcp"} {
		suspects[proto+"4"] = w.add(t, service{proto: proto, at: []string{at}, to: w.all4()[2:]}).backends[0]
	}
	// A datagram of its own socket.
	tell := func(socket *lab.Socket) error {
		local, err := socket.Local()
		if err != nil {
			return err
		}
		other := mustSocket(t, client, "udp4")
		to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), local.Port())
		if err := other.SendTo("me\n", to.String()); err != nil {
			return err
		}
		_, _, err = socket.Recv()

		return errors.Join(err, other.Close())
	}
	option := func(level, name, value int) func(*lab.Socket) error {
		return func(socket *lab.Socket) error { return socket.SetOption(level, name, value) }
	}
	incomingCPU := option(unix.SOL_SOCKET, unix.SO_INCOMING_CPU, 0)
	for _, test := range []struct {
		name, network string
		before, after []func(*lab.Socket) error
	}{
		{"CPU of datagrams, before it connects", "udp4", []func(*lab.Socket) error{incomingCPU}, nil},
		{"CPU of datagrams", "udp4", nil, []func(*lab.Socket) error{incomingCPU}},
		{"memory", "udp4", nil, []func(*lab.Socket) error{incomingCPU, option(unix.SOL_SOCKET, unix.SO_RESERVE_MEM, 1<<16)}},
		{"a datagram of its own, before it connects", "udp4", []func(*lab.Socket) error{
			func(s *lab.Socket) error { return s.Bind("0.0.0.0:0") }, tell,
		}, []func(*lab.Socket) error{incomingCPU}},
		{"a datagram of its own, when it is connected no more", "udp4", []func(*lab.Socket) error{
			func(s *lab.Socket) error { return s.Bind("0.0.0.0:5005") },
		}, []func(*lab.Socket) error{(*lab.Socket).Disconnect, tell, incomingCPU}},
		{"repair", "tcp4", []func(*lab.Socket) error{option(unix.IPPROTO_TCP, unix.TCP_REPAIR, 1)}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			id := suspects[test.network]
			ago := func(d time.Duration) uint64 { return now() - uint64(d) }
			was := maps.BackendHealth{Id: id, Answered: ago(5 * time.Second), Suspected: ago(time.Second), Until: ago(time.Millisecond)}
			lab.Must(t, w.Maps().Health.Put(maps.Index(id), was))
			socket := mustSocket(t, client, test.network)
			for _, do := range test.before {
				lab.Must(t, do(socket))
			}
			lab.Must(t, socket.Connect(at))
			for _, do := range test.after {
				err := do(socket)
				if errors.Is(err, unix.EOPNOTSUPP) {
					t.Skip("no memory can be reserved here: the kernel does not count that of sockets by cgroup")
				}
				lab.Must(t, err)
			}
			lab.Must(t, socket.Close())
			if h := w.health(id); !h.IsSuspect() || h.Answered != was.Answered {
				t.Errorf("it was %+v, and is %+v", was, h)
			}
		})
	}
}

// Connections that their clients give up before a backend may answer speak against none, and neither do those of
// which no packet is sent.
func TestHealAbandoned(t *testing.T) {
	w := newHealing(t)
	client := w.pod(t)
	const at, none = "10.96.1.1:80", "10.96.1.9:80"
	silence(t, w.answers[2])
	ids := make(map[string]uint32)
	for _, proto := range []string{"tcp", "udp"} {
		ids[proto+"4"] = w.add(t, service{proto: proto, at: []string{at}, to: w.all4()[2:]}).backends[0]
	}
	nothing := func(*lab.Socket) error { return nil }
	for _, test := range []struct {
		name, network string
		before, after func(*lab.Socket) error
		kept          time.Duration
		fails         error
		counts        bool
	}{
		{"at once", "tcp4", nothing, nothing, 0, unix.ETIMEDOUT, false},
		{"at once", "udp4", nothing, nothing, 0, nil, false},
		{"later", "tcp4", nothing, nothing, 100 * time.Millisecond, unix.ETIMEDOUT, true},
		{"later", "udp4", nothing, nothing, 100 * time.Millisecond, nil, true},
		{"for another peer", "udp4", nothing, func(s *lab.Socket) error { return s.Connect(none) }, 0, nil, false},
		{"from an address that leads nowhere", "tcp4", func(s *lab.Socket) error { return s.Bind("127.0.0.1:0") }, nothing, 0, unix.EINVAL, false},
		{"by one hop, on which they end", "tcp4", func(s *lab.Socket) error { return s.SetOption(unix.IPPROTO_IP, unix.IP_TTL, 1) }, nothing, 20 * time.Millisecond, unix.ETIMEDOUT, false},
		{"with answers from one hop only", "tcp4", func(s *lab.Socket) error { return s.SetOption(unix.IPPROTO_IP, unix.IP_MINTTL, 255) }, nothing, 20 * time.Millisecond, unix.ETIMEDOUT, false},
		{"in repair", "tcp4", func(s *lab.Socket) error { return s.SetOption(unix.IPPROTO_TCP, unix.TCP_REPAIR, 1) }, nothing, 0, nil, false},
	} {
		t.Run(test.network+" "+test.name, func(t *testing.T) {
			id := ids[test.network]
			lab.Must(t, w.Maps().Health.Put(maps.Index(id), maps.BackendHealth{Id: id, Answered: now() - uint64(time.Second)}))
			const rounds = 5
			slow := 0 // rounds that the machine has held up
			for range rounds {
				socket := mustSocket(t, client, test.network)
				lab.Must(t, socket.SetTimeout(time.Millisecond), test.before(socket))
				began := time.Now()
				if err := socket.Connect(at); !errors.Is(err, test.fails) {
					t.Fatalf("connect: %v, want %v", err, test.fails)
				}
				time.Sleep(test.kept)
				lab.Must(t, test.after(socket), socket.Close())
				if time.Since(began) > test.kept+10*time.Millisecond {
					slow++
				}
			}
			if h := w.health(id); !test.counts && int(h.Evidence) > slow || h.Refusals > 0 || test.counts && h.Evidence != rounds {
				t.Errorf("it is %+v, %d of %d connections were kept", h, slow, rounds)
			}
		})
	}
}

// A connection whose SYNs are sent again soon takes no less time to fail than one to no Service, which
// has the kernel's timeouts, and not much more.
func TestConnectFailsNoSooner(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Heal, c.Resteer = true, true })
	w.needsTracing(t)
	const at = "10.96.1.1:80"
	s := w.add(t, service{proto: "tcp", at: []string{at}, to: w.all4()[2:]})
	mustRun(t, w.pod(t), lab.Exchange{Network: "tcp4", Address: at}, 100, 300*time.Millisecond)
	silence(t, w.answers[2])
	// begin begins a connection that may send its SYN again so often, and returns how long it takes.
	begin := func(to string, syns int) (took chan time.Duration) {
		socket := mustSocket(t, w.pod(t), "tcp4") // a caller makes one call at a time
		lab.Must(t, socket.SetTimeout(time.Minute), socket.SetOption(unix.IPPROTO_TCP, unix.TCP_SYNCNT, syns))
		took = make(chan time.Duration, 1)
		go func() {
			began := time.Now()
			if err := socket.Connect(to); !errors.Is(err, unix.ETIMEDOUT) {
				t.Errorf("connect to %s: %v", to, err)
			}
			took <- time.Since(began)
		}()

		return took
	}
	type pair struct{ ours, kernels chan time.Duration }
	var pairs []pair
	for _, syns := range []int{1, 3} {
		pairs = append(pairs, pair{begin(at, syns), begin(w.v4(2), syns)})
	}
	for _, p := range pairs {
		ours, kernels := <-p.ours, <-p.kernels
		t.Logf("it took %v, and %v by the kernel's timeouts", ours, kernels)
		if ours < kernels-100*time.Millisecond || ours > kernels*5/3 {
			t.Errorf("it took %v, and %v by the kernel's timeouts", ours, kernels)
		}
	}
	if n := w.stats(t, s.id)[maps.StatSYNRetransmits]; n < 2*5 {
		t.Errorf("the SYNs were sent again %d times, want once more for each of four halvings", n)
	}
}

// The datagrams of a socket leave a backend that does not answer, if flows are re-steered.
func TestDatagramsLeaveSuspect(t *testing.T) {
	for _, resteer := range []bool{true, false} {
		t.Run(fmt.Sprintf("re-steered: %t", resteer), func(t *testing.T) {
			w := newWorld(t, func(c *Config) { c.Heal, c.Resteer, c.Handshakes = true, resteer, false })
			w.needsTracing(t)
			client := w.pod(t)
			const at = "10.96.1.1:80"
			s := w.add(t, service{proto: "udp", at: []string{at}, to: w.all4()})
			socket, err := client.Socket("udp4")
			lab.Must(t, err)
			lab.Must(t, socket.SetTimeout(400*time.Millisecond))
			ask := func() (string, error) {
				lab.Must(t, socket.SendTo("who\n", at))
				text, from, err := socket.Recv()
				if err != nil {
					return "", err
				}
				if from.String() != at {
					t.Errorf("the answer comes from %v", from)
				}

				return mustAnswer(t, strings.TrimSpace(text)).Name, nil
			}
			first, err := ask()
			lab.Must(t, err)
			n := slices.Index(colours, first)
			silence(t, w.answers[n])
			mustRun(t, client, lab.Exchange{Network: "udp4", Address: at, Unconnected: true}, 200, 1500*time.Millisecond)
			if h := w.health(s.backends[n]); !h.IsSuspect() {
				t.Fatalf("%s is %+v", first, h)
			}
			other, err := ask()
			for tries := 0; err != nil && tries < 2; tries++ { // which may be a probe
				other, err = ask()
			}
			if resteer != (err == nil) || other == first {
				t.Errorf("%s answered first, and then %q, %v", first, other, err)
			}
		})
	}
}

// A backend that refuses is noticed after a few connections.
func TestHealRefuses(t *testing.T) {
	w := newHealing(t)
	client := w.pod(t)
	s := w.add(t, service{proto: "tcp", at: []string{"10.96.0.1:80"}, to: w.all4()})
	x := lab.Exchange{Network: "tcp4", Address: "10.96.0.1:80"}
	mustRun(t, client, x, 100, 300*time.Millisecond)
	lab.Must(t, w.servers[1].Close())
	report := mustRun(t, client, x, 100, 900*time.Millisecond)
	if h := w.health(s.backends[1]); !h.IsSuspect() || maps.HealthCause(h.Cause) != maps.HealthRefused {
		t.Errorf("it is %+v", h)
	}
	if n := len(report.Failures); n == 0 || n > 12 {
		t.Errorf("%d of %d failed", n, report.Started)
	}
	for _, f := range report.Failures {
		if f.Errno != unix.ECONNREFUSED {
			t.Errorf("failed: %v", f)
		}
	}
}

// A further subflow of Multipath TCP, which is for the server of the first one, shows nothing of the backend that
// refuses it. Here the server announces the address of a Service.
func TestHealSubflow(t *testing.T) {
	w := newHealing(t)
	const vip, announced = "10.96.0.1:80", "10.96.0.2"
	server, refuses := w.answers[0], w.answers[1]
	err := errors.Join(w.client.Multipath(), server.Multipath(netip.MustParseAddr(announced)))
	if errors.Is(err, unix.ENOENT) {
		t.Skip("this kernel has no Multipath TCP")
	}
	lab.Must(t, err)
	const port = "9090"
	var listener net.Listener
	lab.MustDo(t, server.Namespace, func() error {
		var config net.ListenConfig
		config.SetMultipathTCP(true)
		listener, err = config.Listen(t.Context(), "tcp4", ":"+port)

		return err
	})
	defer listener.Close()
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			time.Sleep(300 * time.Millisecond) // for the further subflow
			fmt.Fprintf(conn, "red %s saw %s\n", conn.LocalAddr(), conn.RemoteAddr())
			_, _ = io.Copy(io.Discard, conn) // until the client has closed
			conn.Close()
		}
	}()
	at := func(pod *lab.Pod) string { return net.JoinHostPort(pod.IPv4.String(), port) }
	w.add(t, service{proto: "tcp", at: []string{vip}, to: []string{at(server)}})
	s := w.add(t, service{proto: "tcp", at: []string{net.JoinHostPort(announced, port)}, to: []string{at(refuses)}})
	lab.Must(t, w.Maps().Health.Put(maps.Index(s.backends[0]), maps.BackendHealth{Id: s.backends[0], Answered: 1}))
	for range 3 {
		counts := w.counted(t, func() {
			if got := w.play(t, w.client.Namespace, "multipath", vip); got != "red, peer "+at(server) {
				t.Errorf("the client got %q", got)
			}
		})
		if n := counts[maps.ReasonTranslated]; n != 2 {
			t.Errorf("%d subflows were translated", n)
		}
	}
	if h := w.health(s.backends[0]); h.Refusals != 0 || h.Evidence != 0 {
		t.Errorf("the backend that has refused further subflows is %+v", h)
	}
	if got := w.play(t, w.client.Namespace, "multipath", net.JoinHostPort(announced, port)); got != "ECONNREFUSED" {
		t.Errorf("a first subflow: %q", got)
	}
	if h := w.health(s.backends[0]); h.Refusals != 1 {
		t.Errorf("the backend that has refused a first subflow is %+v", h)
	}
}

// A client that reaches nothing makes no suspect, of three backends or of two.
func TestHealBrokenClient(t *testing.T) {
	for _, backends := range []int{3, 2} {
		t.Run(fmt.Sprintf("with %d backends", backends), func(t *testing.T) {
			w := newHealing(t)
			s := w.add(t, service{proto: "tcp", at: []string{"10.96.0.1:80"}, to: w.all4()[:backends]})
			x := lab.Exchange{Network: "tcp4", Address: "10.96.0.1:80"}
			pod := w.answers[2]
			broken := lab.MustCaller(t, pod.Namespace, w.cgroup)
			lab.Must(t, pod.Netfilter(drop("broken", "output")))
			load, err := broken.StartLoad(lab.Load{Exchange: x, Rate: 200, Duration: 2 * time.Second})
			lab.Must(t, err)
			report := mustRun(t, w.pod(t), x, 30, 2*time.Second)
			failing, err := load.Wait()
			lab.Must(t, err)
			if failing.Succeeded > 0 || len(report.Failures) > 0 {
				t.Errorf("the broken client succeeds %d times, the other one fails %d times", failing.Succeeded, len(report.Failures))
			}
			for _, id := range s.backends {
				if h := w.health(id); h.Episodes > 0 {
					t.Errorf("a backend became a suspect: %+v", h)
				}
			}
		})
	}
}

// The only backend of a Service is never passed over, nor are backends that all stop to answer, nor
// those of a Service that wants no healing.
func TestHealNotPassedOver(t *testing.T) {
	w := newHealing(t)
	client := w.pod(t)
	one := w.add(t, service{proto: "tcp", at: []string{"10.96.0.1:80"}, to: w.all4()[2:]})
	off := w.add(t, service{proto: "tcp", at: []string{"10.96.0.2:80"}, to: w.all4(), flags: maps.PoolNoEject})
	for _, at := range []string{"10.96.0.1:80", "10.96.0.2:80"} {
		mustRun(t, client, lab.Exchange{Network: "tcp4", Address: at}, 100, 300*time.Millisecond)
	}
	silence(t, w.answers[2])
	mustRun(t, client, lab.Exchange{Network: "tcp4", Address: "10.96.0.1:80"}, 200, time.Second)
	report := mustRun(t, client, lab.Exchange{Network: "tcp4", Address: "10.96.0.2:80"}, 200, 1500*time.Millisecond)
	if n := len(report.Failures); n < 60 {
		t.Errorf("without healing, %d of %d failed", n, report.Started)
	}
	for _, id := range []uint32{one.backends[0], off.backends[2]} {
		if h := w.health(id); h.PassedOver > 0 {
			t.Errorf("it was passed over: %+v", h)
		}
	}
}
