package health

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// ServicesConfig configures [Services].
type ServicesConfig struct {
	// Healthy reports whether the proxy is healthy, see [Proxy.Healthy].
	Healthy func() bool
	// Failed is called when a port cannot be listened on, and again if the reason
	// changes. It may be nil.
	Failed func(service lb.ServiceName, address netip.AddrPort, err error)
	// Listen is [net.Listen], unless it is set.
	Listen func(network, address string) (net.Listener, error)

	retry time.Duration // zero: portRetry
}

// portRetry is how long after a failure a port is tried again: another program may release
// it, and an address may be assigned a moment late.
const portRetry = time.Second

// Check is the health check of one Service.
type Check struct {
	Port uint16 // healthCheckNodePort
	// Ready is the number of ready local endpoints, for each family that the
	// Service has, zero included.
	Ready map[lb.Family]int
}

// CheckOf returns the health check of a Service, nil if it has none. Load balancers that
// keep client addresses use it to find the nodes that have endpoints.
func CheckOf(svc *lb.Service, res lb.Resolution) *Check {
	if svc == nil || svc.Type != lb.LoadBalancer || svc.ExternalPolicy != lb.Local || svc.HealthCheckNodePort == 0 {
		return nil
	}
	check := &Check{Port: svc.HealthCheckNodePort, Ready: make(map[lb.Family]int)}
	for _, f := range res.Frontends {
		family := lb.FamilyOf(f.Key.Addr)
		if _, has := check.Ready[family]; !has && f.Kind == lb.KindClusterIP {
			check.Ready[family] = res.LocalReady(family)
		}
	}

	return check
}

// Services answers at the health check node ports of Services, by which load balancers
// that keep client addresses (externalTrafficPolicy Local) find the nodes that have
// endpoints. A check is planned when a Service is decided, and published when it is programmed.
// All methods except Run return at once, and any goroutine may call them.
type Services struct {
	cfg         ServicesConfig
	changed     chan struct{}
	connections Connections // of all ports together: there may be thousands of ports

	mu           sync.Mutex
	checks       map[lb.ServiceName]Check  // as published
	planned      map[lb.ServiceName]*Check // and not published yet; nil: there is none any more
	addrs        []netip.Addr
	plannedAddrs []netip.Addr // nil: unchanged
	open         map[port]*http.Server
}

// port is one socket of one Service.
type port struct {
	service lb.ServiceName
	address netip.AddrPort
}

// NewServices returns Services without Services and addresses.
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
		planned: make(map[lb.ServiceName]*Check),
		open:    make(map[port]*http.Server),
	}
}

// PlanAddresses sets the addresses of the node to listen on from the next Publish on. The unspecified address
// of a family stands for all of them. The caller must not change addrs afterwards.
func (s *Services) PlanAddresses(addrs []netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.plannedAddrs = addrs
}

// Plan sets the check of a Service, nil for none, from the Publish on with which the Service is in force. The
// caller must not change check afterwards.
func (s *Services) Plan(service lb.ServiceName, check *Check) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, published := s.checks[service]; published || check != nil {
		s.planned[service] = check
	} else {
		delete(s.planned, service) // it ends before it was published
	}
}

// Publish makes the planned checks of those Services effective that are in force, and closes the connections of
// checks that are gone.
func (s *Services) Publish(inForce func(lb.ServiceName) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.plannedAddrs != nil {
		s.addrs, s.plannedAddrs = s.plannedAddrs, nil
		s.wake()
	}
	for service, check := range s.planned {
		if !inForce(service) {
			continue
		}
		delete(s.planned, service)
		if check == nil {
			delete(s.checks, service)
		} else {
			s.checks[service] = *check
		}
		s.wake()
	}
}

func (s *Services) wake() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// Run listens on the ports of all checks until ctx ends, then returns nil.
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
		// Unwanted ports are closed first: another Service may want their numbers.
		s.closeExcept(wanted)
		maps.DeleteFunc(failures, func(p port, _ string) bool { return !wanted[p] })
		s.listenAll(wanted, failures)
		if len(failures) > 0 {
			retry.Reset(s.cfg.retry)
		}
	}
}

// wanted returns the ports that should be open.
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
			_ = server.Close() // it ends despite an error
			delete(s.open, p)
		}
	}
}

// listenAll opens the ports that are not open, and records failures. If the server of one ends, Run opens it again.
func (s *Services) listenAll(wanted map[port]bool, failures map[port]string) {
	for p := range wanted {
		s.mu.Lock()
		isOpen := s.open[p] != nil
		s.mu.Unlock()
		if isOpen {
			continue
		}
		network := "tcp6"
		if p.address.Addr().Is4() {
			network = "tcp4"
		}
		listener, err := s.cfg.Listen(network, p.address.String())
		if err != nil {
			if failures[p] != err.Error() {
				failures[p] = err.Error()
				s.cfg.Failed(p.service, p.address, err)
			}

			continue
		}
		delete(failures, p)
		server := NewHTTPServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { s.answer(w, p) }), &s.connections)
		s.mu.Lock()
		s.open[p] = server
		s.mu.Unlock()
		go func() {
			if err := server.Serve(listener); errors.Is(err, http.ErrServerClosed) {
				return
			}
			s.mu.Lock()
			if s.open[p] == server {
				delete(s.open, p)
			}
			s.mu.Unlock()
			s.wake()
		}()
	}
}

func (s *Services) answer(w http.ResponseWriter, p port) {
	s.mu.Lock()
	count := s.checks[p.service].Ready[lb.FamilyOf(p.address.Addr())]
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
