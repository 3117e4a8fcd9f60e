package health

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/lab"
)

var web = lb.ServiceName{Namespace: "ns1", Name: "svc1"}

// checker is a Services in a namespace whose lo has two addresses of each family
// that can be connected to.
type checker struct {
	*Services
	ns      *lab.Namespace
	sick    atomic.Bool
	mu      sync.Mutex
	failed  []string
	failure chan struct{} // readable after each failure
	listens atomic.Int64  // tries
}

func mustCheck(t *testing.T) *checker {
	t.Helper()
	c := &checker{ns: lab.MustNamespace(t, "health"), failure: make(chan struct{}, 100)}
	for _, address := range []string{"10.0.0.1/32", "10.0.0.2/32", "fd00::1/128", "fd00::2/128"} {
		lab.Must(t, c.ns.AddAddress("lo", netip.MustParsePrefix(address)))
	}
	c.Services = NewServices(ServicesConfig{
		Healthy: func() bool { return !c.sick.Load() },
		Failed: func(service lb.ServiceName, address netip.AddrPort, err error) {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.failed = append(c.failed, fmt.Sprint(service, " ", address, " ", errors.Is(err, syscall.EADDRINUSE)))
			c.failure <- struct{}{}
		},
		Listen: func(network, address string) (net.Listener, error) {
			c.listens.Add(1)

			return c.ns.Listen(network, address)
		},
		retry: 5 * time.Millisecond,
	})
	lab.MustRun(t, c.Run)

	return c
}

// set sets a check at once, remove removes it, and listenOn sets the addresses.
func (c *checker) set(service lb.ServiceName, check Check) {
	c.Plan(service, &check)
	c.publish()
}

func (c *checker) remove(service lb.ServiceName) {
	c.Plan(service, nil)
	c.publish()
}

func (c *checker) listenOn(addrs []netip.Addr) {
	c.PlanAddresses(append([]netip.Addr{}, addrs...))
	c.publish()
}

func (c *checker) publish() { c.Publish(func(lb.ServiceName) bool { return true }) }

func addrs(texts ...string) []netip.Addr {
	var all []netip.Addr
	for _, text := range texts {
		all = append(all, netip.MustParseAddr(text))
	}

	return all
}

// ready is a Check with so many endpoints.
func ready(port uint16, v4, v6 int) Check {
	return Check{Port: port, Ready: map[lb.Family]int{lb.IPv4: v4, lb.IPv6: v6}}
}

// mustCount waits until an address answers with a count.
func (c *checker) mustCount(t *testing.T, address string, count int) {
	t.Helper()
	lab.Eventually(t, address+" answers with its count", func() error {
		_, _, header, err := get(c.ns, "GET", address, "/")
		if got := header.Get("X-Load-Balancing-Endpoint-Weight"); err == nil && got != fmt.Sprint(count) {
			err = fmt.Errorf("%s counts %q, want %d", address, got, count)
		}

		return err
	})
}

// mustRefuse waits until no socket listens on the addresses.
func (c *checker) mustRefuse(t *testing.T, addresses ...string) {
	t.Helper()
	for _, address := range addresses {
		lab.Eventually(t, address+" refuses", func() error {
			_, body, _, err := get(c.ns, "GET", address, "/")
			if errors.Is(err, syscall.ECONNREFUSED) {
				return nil
			}

			return fmt.Errorf("%s answers %q, %w", address, body, err)
		})
	}
}

// The answer is kube-proxy's, byte by byte, whatever is asked for.
func TestServiceAnswer(t *testing.T) {
	c := mustCheck(t)
	c.listenOn(addrs("0.0.0.0", "::"))
	for _, test := range []struct {
		name    string
		count   int
		sick    bool
		code    int
		body    string
		request string
	}{
		{"200 with endpoints", 2, false, 200, "{\n\t\"service\": {\n\t\t\"namespace\": \"ns1\",\n\t\t\"name\": \"svc1\"\n\t},\n\t\"localEndpoints\": 2,\n\t\"serviceProxyHealthy\": true\n}", "GET /"},
		{"503 without endpoints", 0, false, 503, "{\n\t\"service\": {\n\t\t\"namespace\": \"ns1\",\n\t\t\"name\": \"svc1\"\n\t},\n\t\"localEndpoints\": 0,\n\t\"serviceProxyHealthy\": true\n}", "GET /"},
		{"503 of a sick proxy, with the true count", 3, true, 503, "{\n\t\"service\": {\n\t\t\"namespace\": \"ns1\",\n\t\t\"name\": \"svc1\"\n\t},\n\t\"localEndpoints\": 3,\n\t\"serviceProxyHealthy\": false\n}", "GET /"},
		{"503 of a sick proxy without endpoints", 0, true, 503, "{\n\t\"service\": {\n\t\t\"namespace\": \"ns1\",\n\t\t\"name\": \"svc1\"\n\t},\n\t\"localEndpoints\": 0,\n\t\"serviceProxyHealthy\": false\n}", "GET /healthz"},
		{"the same for another path and method", 1, false, 200, "{\n\t\"service\": {\n\t\t\"namespace\": \"ns1\",\n\t\t\"name\": \"svc1\"\n\t},\n\t\"localEndpoints\": 1,\n\t\"serviceProxyHealthy\": true\n}", "POST /a//../b?c=d"},
		{"without a body for HEAD", 1, false, 200, "", "HEAD /"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c.sick.Store(test.sick)
			c.set(web, ready(30000, test.count, 0))
			c.mustCount(t, "10.0.0.1:30000", test.count)
			method, path, _ := strings.Cut(test.request, " ")
			code, body, header, err := get(c.ns, method, "10.0.0.1:30000", path)
			if err != nil || code != test.code || body != test.body {
				t.Errorf("it is %d, %v\n%s\nwant %d\n%s", code, err, body, test.code, test.body)
			}
			want := http.Header{
				"Content-Type":                     {"application/json"},
				"X-Content-Type-Options":           {"nosniff"},
				"X-Load-Balancing-Endpoint-Weight": {fmt.Sprint(test.count)},
			}
			for name := range want {
				if got := header.Get(name); got != want.Get(name) {
					t.Errorf("%s is %q, want %q", name, got, want.Get(name))
				}
			}
		})
	}
}

// One Service on all addresses, then on some; its port changes, a family comes,
// and it goes.
func TestServiceListens(t *testing.T) {
	c := mustCheck(t)
	c.set(web, Check{Port: 30000, Ready: map[lb.Family]int{lb.IPv4: 1}})
	c.listenOn(addrs("0.0.0.0", "::"))
	c.mustCount(t, "10.0.0.1:30000", 1)
	c.mustCount(t, "10.0.0.2:30000", 1)
	c.mustCount(t, "127.0.0.1:30000", 1)
	c.mustRefuse(t, "[fd00::1]:30000") // the Service has no such family

	c.set(web, ready(30000, 1, 4))
	c.mustCount(t, "[fd00::1]:30000", 4)
	c.mustCount(t, "[fd00::2]:30000", 4)
	c.mustCount(t, "10.0.0.1:30000", 1)

	c.listenOn(addrs("10.0.0.1", "fd00::2"))
	c.mustRefuse(t, "10.0.0.2:30000", "127.0.0.1:30000", "[fd00::1]:30000")
	c.mustCount(t, "10.0.0.1:30000", 1)
	c.mustCount(t, "[fd00::2]:30000", 4)

	c.listenOn(addrs("10.0.0.1", "10.0.0.2", "fd00::2")) // one is added
	c.mustCount(t, "10.0.0.2:30000", 1)

	c.set(web, ready(30001, 2, 4))
	c.mustCount(t, "10.0.0.1:30001", 2)
	c.mustRefuse(t, "10.0.0.1:30000", "10.0.0.2:30000", "[fd00::2]:30000")

	c.listenOn(addrs("0.0.0.0", "::")) // the same numbers, more widely
	c.mustCount(t, "127.0.0.1:30001", 2)
	c.mustCount(t, "[::1]:30001", 4)

	c.listenOn(nil)
	c.mustRefuse(t, "10.0.0.1:30001", "[fd00::2]:30001")
	c.listenOn(addrs("10.0.0.1"))
	c.mustCount(t, "10.0.0.1:30001", 2)
	c.remove(web)
	c.mustRefuse(t, "10.0.0.1:30001")
}

// A changed count changes nothing about connections; a Service that goes cuts
// them.
func TestServiceCutsConnections(t *testing.T) {
	c := mustCheck(t)
	c.listenOn(addrs("0.0.0.0"))
	c.set(web, ready(30000, 1, 0))
	c.mustCount(t, "10.0.0.1:30000", 1)
	conn, err := c.ns.Dial("tcp", "10.0.0.1:30000", timeout)
	lab.Must(t, err)
	defer conn.Close()
	ask := func() error {
		if _, err := fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: a\r\n\r\n"); err != nil {
			return err
		}
		var answer [4096]byte
		_, err := conn.Read(answer[:])

		return err
	}
	lab.Must(t, ask())
	c.set(web, ready(30000, 2, 0))
	c.mustCount(t, "10.0.0.1:30000", 2)
	if err := ask(); err != nil {
		t.Errorf("a count cut a connection: %v", err)
	}
	c.remove(web)
	c.mustRefuse(t, "10.0.0.1:30000")
	if err := ask(); err == nil {
		t.Error("the connection outlived the Service")
	}
}

// A port that another program has is reported once, not at each try, and listened on when
// it is free. The other addresses and Services do not wait for it.
func TestServicePortInUse(t *testing.T) {
	c := mustCheck(t)
	other, err := c.ns.Listen("tcp", "10.0.0.1:30000")
	lab.Must(t, err)
	c.listenOn(addrs("10.0.0.1", "10.0.0.2"))
	c.set(web, ready(30000, 1, 0))
	c.set(lb.ServiceName{Namespace: "ns1", Name: "svc2"}, ready(30001, 5, 0))
	<-c.failure
	c.mustCount(t, "10.0.0.2:30000", 1)
	c.mustCount(t, "10.0.0.1:30001", 5)
	before := c.listens.Load()
	lab.Eventually(t, "five tries", func() bool { return c.listens.Load()-before >= 5 })
	other.Close()
	c.mustCount(t, "10.0.0.1:30000", 1)

	other, err = c.ns.Listen("tcp", "10.0.0.1:30002")
	lab.Must(t, err)
	defer other.Close()
	c.set(web, ready(30002, 1, 0))
	<-c.failure // another port is another failure
	c.mu.Lock()
	defer c.mu.Unlock()
	want := fmt.Sprint([]string{"ns1/svc1 10.0.0.1:30000 true", "ns1/svc1 10.0.0.1:30002 true"})
	if got := fmt.Sprint(c.failed); got != want {
		t.Errorf("failures are %s, want %s", got, want)
	}
}

// A port passes from one Service to another.
func TestServicePortChangesHands(t *testing.T) {
	c := mustCheck(t)
	other := lb.ServiceName{Namespace: "ns1", Name: "svc2"}
	c.listenOn(addrs("0.0.0.0"))
	c.set(web, ready(30000, 1, 0))
	c.set(other, ready(30001, 2, 0))
	c.mustCount(t, "10.0.0.1:30000", 1)
	c.mustCount(t, "10.0.0.1:30001", 2)
	for range 20 {
		c.set(web, ready(30001, 1, 0))
		c.set(other, ready(30000, 2, 0))
		c.mustCount(t, "10.0.0.1:30001", 1)
		c.mustCount(t, "10.0.0.1:30000", 2)
		c.set(web, ready(30000, 1, 0))
		c.set(other, ready(30001, 2, 0))
		c.mustCount(t, "10.0.0.1:30000", 1)
		c.mustCount(t, "10.0.0.1:30001", 2)
	}
}
