package health

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// ServicesConfig is what [Services] need to know.
type ServicesConfig struct {
	// Healthy says whether the proxy is, see [Proxy.Healthy].
	Healthy func() bool
	// Failed is told when a port cannot be listened on, again only if it is for
	// another reason. Nil is nobody.
	Failed func(service lb.ServiceName, address netip.AddrPort, err error)
	// Listen is [net.Listen], unless it is set.
	Listen func(network, address string) (net.Listener, error)

	retry time.Duration // zero: portRetry
}

// portRetry is how long after a failure a port is tried again: whoever has it
// may go, and an address may be a moment late.
const portRetry = time.Second

// Check is what load balancers ask one Service for.
type Check struct {
	Port uint16 // healthCheckNodePort
	// Ready is how many local endpoints are, for each family that the Service
	// has, zero included.
	Ready map[lb.Family]int
}

// Services answer at the health check node ports of Services: there, a load
// balancer that keeps clients' addresses (externalTrafficPolicy Local) finds
// out which nodes have endpoints. All methods but Run return at once, and any
// goroutine may call them.
type Services struct {
	cfg         ServicesConfig
	changed     chan struct{}
	connections Connections // of all ports: there may be thousands

	mu     sync.Mutex
	checks map[lb.ServiceName]Check
	addrs  []netip.Addr
	open   map[port]*http.Server
}

// port is one socket of one Service.
type port struct {
	service lb.ServiceName
	address netip.AddrPort
}

// family is that of the endpoints which are counted.
func (p port) family() lb.Family { return lb.FamilyOf(p.address.Addr()) }

// NewServices returns one that knows no Service and no address.
func NewServices(cfg ServicesConfig) *Services {
	if cfg.Listen == nil {
		cfg.Listen = net.Listen
	}
	if cfg.Failed == nil {
		cfg.Failed = func(lb.ServiceName, netip.AddrPort, error) {}
	}
	if cfg.retry == 0 {
		cfg.retry = portRetry
	}

	return &Services{
		cfg:     cfg,
		changed: make(chan struct{}, 1),
		checks:  make(map[lb.ServiceName]Check),
		open:    make(map[port]*http.Server),
	}
}

// Set has one Service answered for, or answers otherwise. The Check is not to be
// changed afterwards.
func (s *Services) Set(service lb.ServiceName, check Check) {
	s.mu.Lock()
	s.checks[service] = check
	s.mu.Unlock()
	s.wake()
}

// Delete has a Service answered for no more. Connections to it are cut.
func (s *Services) Delete(service lb.ServiceName) {
	s.mu.Lock()
	delete(s.checks, service)
	s.mu.Unlock()
	s.wake()
}

// SetAddresses says where to listen: at these addresses of the node. The
// unspecified address of a family stands for all of them.
func (s *Services) SetAddresses(addrs []netip.Addr) {
	s.mu.Lock()
	s.addrs = slices.Clone(addrs)
	s.mu.Unlock()
	s.wake()
}

func (s *Services) wake() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// Run listens where it has been told to until ctx ends, then returns nil.
func (s *Services) Run(ctx context.Context) error {
	defer s.closeExcept(nil)
	failures := make(map[port]string)
	retry := time.NewTimer(0)
	defer retry.Stop()

	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.changed:
		case <-retry.C:
		}
		wanted := s.wanted()
		// First those that are not wanted: their numbers may be wanted elsewhere.
		s.closeExcept(wanted)
		maps.DeleteFunc(failures, func(p port, _ string) bool { return !wanted[p] })
		s.listenAll(wanted, failures)
		if len(failures) > 0 {
			retry.Reset(s.cfg.retry)
		}
	}
}

// wanted are the ports that should be open.
func (s *Services) wanted() map[port]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	wanted := make(map[port]bool)
	for service, check := range s.checks {
		for _, addr := range s.addrs {
			if _, has := check.Ready[lb.FamilyOf(addr)]; has {
				wanted[port{service, netip.AddrPortFrom(addr, check.Port)}] = true
			}
		}
	}

	return wanted
}

func (s *Services) closeExcept(wanted map[port]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for p, server := range s.open {
		if !wanted[p] {
			_ = server.Close() // it ends whatever this says
			delete(s.open, p)
		}
	}
}

func (s *Services) isOpen(p port) bool {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.open[p] != nil
}

// listenAll opens the ports that are not open, and notes those that fail.
func (s *Services) listenAll(wanted map[port]bool, failures map[port]string) {
	for p := range wanted {
		if s.isOpen(p) {
			continue
		}
		err := s.listen(p)
		switch {
		case err == nil:
			delete(failures, p)
		case failures[p] != err.Error():
			failures[p] = err.Error()
			s.cfg.Failed(p.service, p.address, err)
		}
	}
}

func (s *Services) listen(p port) error {
	network := "tcp6"
	if p.address.Addr().Is4() {
		network = "tcp4"
	}
	listener, err := s.cfg.Listen(network, p.address.String())
	if err != nil {
		return err
	}
	server := NewHTTPServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { s.answer(w, p) }), &s.connections)
	s.mu.Lock()
	s.open[p] = server
	s.mu.Unlock()
	go func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			s.ended(p, server)
		}
	}()

	return nil
}

// ended has a port opened anew whose server came to an end.
func (s *Services) ended(p port, server *http.Server) {
	s.mu.Lock()
	if s.open[p] == server {
		delete(s.open, p)
	}
	s.mu.Unlock()
	s.wake()
}

func (s *Services) answer(w http.ResponseWriter, p port) {
	s.mu.Lock()
	count := s.checks[p.service].Ready[p.family()]
	s.mu.Unlock()
	healthy := s.cfg.Healthy()

	setHeaders(w.Header())
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(count))
	w.WriteHeader(statusOf(count > 0 && healthy))
	_, _ = fmt.Fprintf(w, serviceBody, p.service.Namespace, p.service.Name, count, healthy)
}

// serviceBody is kube-proxy's, byte by byte.
const serviceBody = "{\n\t\"service\": {\n\t\t\"namespace\": %q,\n\t\t\"name\": %q\n\t},\n" +
	"\t\"localEndpoints\": %d,\n\t\"serviceProxyHealthy\": %t\n}"
