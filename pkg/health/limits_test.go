package health

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/lab"
)

const request = "GET / HTTP/1.1\r\nHost: a\r\n\r\n"

// ask asks on a connection that stays open.
func ask(conn net.Conn) error {
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if _, err := io.WriteString(conn, request); err != nil {
		return err
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, response.Body)

	return errors.Join(err, response.Body.Close())
}

// mustDialFrom opens a connection of a client with an address.
func mustDialFrom(t *testing.T, ns *lab.Namespace, from, to string) net.Conn {
	t.Helper()
	var conn net.Conn
	dialer := net.Dialer{Timeout: timeout, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(from), 0))}
	err := ns.Do(func() (err error) {
		conn, err = dialer.Dial("tcp", to)

		return err
	})
	lab.Must(t, err)
	t.Cleanup(func() { conn.Close() })

	return conn
}

// mustHold opens connections of one client, asks on each, and keeps them.
func mustHold(t *testing.T, ns *lab.Namespace, count int, to string) []net.Conn {
	t.Helper()
	var held []net.Conn
	for range count {
		conn := mustDialFrom(t, ns, "127.0.0.1", to)
		if err := ask(conn); err != nil {
			t.Fatalf("connection %d: %v", len(held), err)
		}
		held = append(held, conn)
	}

	return held
}

// stayOpen are those connections that the server has not closed.
func stayOpen(t *testing.T, conns []net.Conn) (open int) {
	t.Helper()
	for _, conn := range conns {
		raw, err := conn.(*net.TCPConn).SyscallConn()
		lab.Must(t, err)
		err = raw.Control(func(fd uintptr) {
			_, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
			if errors.Is(err, unix.EAGAIN) {
				open++
			}
		})
		lab.Must(t, err)
	}

	return open
}

// mustBeBounded waits until no more connections are open than may be.
func mustBeBounded(t *testing.T, held []net.Conn) {
	t.Helper()
	lab.Eventually(t, "few connections stay open", func() error {
		if open := stayOpen(t, held); open > maxConnections {
			return fmt.Errorf("%d connections of %d stay open, want %d at most", open, len(held), maxConnections)
		}

		return nil
	})
}

// A client that holds more connections than there may be loses its own. Another
// keeps its connection, and new requests are answered at once.
func TestServerBoundsConnections(t *testing.T) {
	ns := mustServe(t)
	other := mustDialFrom(t, ns, "127.0.0.2", testAddress)
	lab.Must(t, ask(other))
	held := mustHold(t, ns, 4*maxConnections, testAddress)
	begin := time.Now()
	if code, _, _, err := get(ns, "GET", testAddress, "/"); err != nil || code != http.StatusOK {
		t.Errorf("a new request: %d, %v", code, err)
	}
	if took := time.Since(begin); took > requestTimeout {
		t.Errorf("a new request was answered after %v, want at once", took)
	}
	mustBeBounded(t, held)
	if err := ask(held[len(held)-1]); err != nil {
		t.Errorf("the newest connection was closed: %v", err)
	}
	if err := ask(other); err != nil {
		t.Errorf("another client's connection was closed: %v", err)
	}
}

// A client that opens connections and sends nothing makes no other client wait, however
// many they are.
func TestServerAnswersBesideSilentConnections(t *testing.T) {
	ns := mustServe(t)
	for range 6 * maxConnections {
		mustDialFrom(t, ns, "127.0.0.1", testAddress)
	}
	begin := time.Now()
	if err := ask(mustDialFrom(t, ns, "127.0.0.2", testAddress)); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took > requestTimeout {
		t.Errorf("a request was answered after %v, want at once", took)
	}
}

// All health check node ports together have the connections of one.
func TestServicesBoundConnections(t *testing.T) {
	c := mustCheck(t)
	c.listenOn(addrs("0.0.0.0"))
	c.set(web, ready(30000, 1, 0))
	c.set(lb.ServiceName{Namespace: "ns1", Name: "svc2"}, ready(30001, 2, 0))
	c.mustCount(t, "127.0.0.1:30000", 1)
	c.mustCount(t, "127.0.0.1:30001", 2)
	held := mustHold(t, c.ns, maxConnections-50, "127.0.0.1:30000")
	held = append(held, mustHold(t, c.ns, maxConnections-50, "127.0.0.1:30001")...)
	mustBeBounded(t, held)
	c.mustCount(t, "127.0.0.1:30000", 1)
	c.mustCount(t, "127.0.0.1:30001", 2)
}

// A client that does not send its request to the end is cut.
func TestServerCutsSlowClients(t *testing.T) {
	ns := mustServe(t)
	begin := time.Now()
	var group sync.WaitGroup
	for name, text := range map[string]string{
		"nothing":          "",
		"half a header":    "GET / HTTP/1.1\r\nHost:",
		"no promised body": "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n",
	} {
		conn := mustDialFrom(t, ns, "127.0.0.1", testAddress)
		group.Go(func() {
			_, err := io.WriteString(conn, text)
			err = errors.Join(err, conn.SetReadDeadline(begin.Add(timeout/2)))
			_, readErr := io.Copy(io.Discard, conn)
			var timeout net.Error
			if errors.As(readErr, &timeout) && timeout.Timeout() {
				err = errors.Join(err, readErr)
			}
			if err != nil {
				t.Errorf("a client that sends %s keeps its connection: %v", name, err)
			}
		})
	}
	group.Wait()
}

// pipes is a listener without a kernel, so that the time is a test's.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	if conn, ok := <-p; ok {
		return conn, nil
	}

	return nil, net.ErrClosed
}

func (p pipes) Close() error   { return nil }
func (p pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }

// mustServePipe serves one connection until the test ends.
func mustServePipe(t *testing.T, handler http.HandlerFunc) net.Conn {
	t.Helper()
	client, connected := net.Pipe()
	listener := make(pipes, 1)
	listener <- connected
	server := NewHTTPServer(handler, new(Connections))
	ended := make(chan struct{})
	go func() {
		_ = server.Serve(listener) // the end of the test ends it
		close(ended)
	}()
	t.Cleanup(func() {
		close(listener)
		<-ended
		server.Close()
		client.Close()
	})

	return client
}

func TestTimeouts(t *testing.T) {
	for _, test := range []struct {
		name   string
		client func(conn net.Conn) // returns when the connection is closed
		want   time.Duration
	}{
		{"a client that sends nothing", func(conn net.Conn) {
			_, _ = io.Copy(io.Discard, conn)
		}, requestTimeout},
		{"a header without end", func(conn net.Conn) {
			_, err := io.WriteString(conn, "GET / HTTP/1.1\r\n")
			for err == nil {
				time.Sleep(100 * time.Millisecond)
				_, err = io.WriteString(conn, "A: b\r\n")
			}
		}, requestTimeout},
		{"a body that does not come", func(conn net.Conn) {
			_, _ = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")
			_, _ = io.Copy(io.Discard, conn)
		}, requestTimeout},
		{"a client that asks no more", func(conn net.Conn) {
			_, _ = io.WriteString(conn, request)
			_, _ = io.Copy(io.Discard, conn)
		}, idleTimeout},
		{"a client that does not read", func(conn net.Conn) {
			_, err := io.WriteString(conn, request)
			for err == nil {
				_, err = io.WriteString(conn, request) // blocks until the other end reads
			}
		}, answerTimeout},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				conn := mustServePipe(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") })
				begin := time.Now()
				test.client(conn)
				if took := time.Since(begin).Round(time.Second); took != test.want {
					t.Errorf("it is cut after %v, want %v", took, test.want)
				}
			})
		})
	}
}

// A profile takes longer than a request may, and is not cut short.
func TestAnswersMayTakeLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := mustServePipe(t, func(w http.ResponseWriter, r *http.Request) {
			select {
			case <-time.After(10 * requestTimeout):
				fmt.Fprint(w, "hello")
			case <-r.Context().Done():
			}
		})
		_, err := io.WriteString(conn, request)
		lab.Must(t, err)
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		lab.Must(t, err)
		if body, err := io.ReadAll(response.Body); string(body) != "hello" {
			t.Errorf("the answer is %q, %v, want hello", body, err)
		}
	})
}

func TestHeadersAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := mustServePipe(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") })
		go func() {
			_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nA: "+strings.Repeat("b", 2*maxHeaderBytes)+"\r\n\r\n") // it is not read to its end
		}()
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || response.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
			t.Errorf("the answer is %+v, %v, want %d", response, err, http.StatusRequestHeaderFieldsTooLarge)
		}
		_, _ = io.Copy(io.Discard, conn) // until it is closed
	})
}
