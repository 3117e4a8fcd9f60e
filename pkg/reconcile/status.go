package reconcile

import (
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// Failure is a write that failed. It is tried again.
type Failure struct {
	What string // "backend 10.0.1.7:8080", "frontend 10.96.0.1:80/TCP internal"
	Err  error  // wraps maps.ErrFull if the map it names is full
}

func (f Failure) Error() string { return f.What + ": " + f.Err.Error() }

func (f Failure) Unwrap() error { return f.Err }

// Loss is a frontend that the Service claims and another Service owns. It is assigned to this
// Service as soon as the owner gives it up.
type Loss struct {
	Frontend lb.FrontendKey
	Owner    lb.ServiceName
}

// Overlap is a frontend of a Service at a load balancer's address or an external IP that precedes what another
// Service has: the other's node port, as the address is one of this node, or the port of the other's ClusterIP,
// which the other does not use. Clients of that reach this Service, as with kube-proxy.
type Overlap struct {
	Frontend lb.FrontendKey
	Other    lb.ServiceName
	NodePort bool // else it is the other's ClusterIP
}

// Status is the state of one Service in the maps.
type Status struct {
	Service lb.ServiceName
	// Programmed reports whether the maps are as the Service wants, except for Lost. Its former
	// state may still be in the maps until it is retired.
	Programmed bool
	Failures   []Failure // the first ones
	Retry      time.Time // when failures are tried again; zero if there are none
	Lost       []Loss
	Overlaps   []Overlap
	// Holder has the most of what there is no room for, if Failures are for lack of room.
	Holder Holder
}

// Holder is the namespace whose Services have the most of something.
type Holder struct {
	Namespace string
	Of        string // "frontends", with those at addresses that drain and that a Service has left, or "source ranges"
}

// Status returns the state of a Service, and false if it is not Set.
func (r *Reconciler) Status(name lb.ServiceName) (Status, bool) {
	svc := r.services[name]
	if svc == nil || !svc.wanted {
		return Status{}, false
	}

	return r.status(svc, r.adopts(noPause), r.holders(noPause), noPause), true
}

// Programmed reports whether the maps are as a Service wants, as in its Status, or the Service is
// not Set. Its cost does not depend on the size of the Service.
func (r *Reconciler) Programmed(name lb.ServiceName) bool {
	svc := r.services[name]

	return svc == nil || !svc.wanted || svc.programmed()
}

// Statuses yields the status of every Service that is Set, and of deleted Services that could not
// be retired yet, in no order.
func (r *Reconciler) Statuses() iter.Seq[Status] {
	return func(yield func(Status) bool) {
		for s := range r.StatusesInSteps() {
			if s != nil && !yield(*s) {
				return
			}
		}
	}
}

// StatusesInSteps yields what [Reconciler.Statuses] does, and nil in between, so often that a step takes microseconds.
// What is yielded is valid until the next step. The Reconciler may be used between two steps: a Service that is Set or deleted meanwhile may be left out, and the status
// of one that changes may be of both moments.
func (r *Reconciler) StatusesInSteps() iter.Seq[*Status] {
	return func(yield func(*Status) bool) {
		goesOn := true
		pause := func() bool {
			goesOn = goesOn && yield(nil)

			return goesOn
		}
		adopts, most := r.adopts(pause), r.holders(pause)
		var s Status
		for _, svc := range r.services {
			if !goesOn {
				return
			}
			if !svc.wanted && (svc.work == nil || len(svc.failures) == 0) {
				continue
			}
			if s = r.status(svc, adopts, most, pause); !goesOn || !yield(&s) {
				return
			}
		}
	}
}

// stepSize is how many Services or frontends are looked at before a pause.
const stepSize = 256

// noPause is for callers that do not work in steps.
func noPause() bool { return true }

// adopts reports whether a Service still has what it was adopted with. It calls pause between steps, and ends if that
// returns false.
func (r *Reconciler) adopts(pause func() bool) bool {
	n := 0
	for _, svc := range r.services {
		if svc.adopted {
			return true
		}
		if n++; n%stepSize == 0 && !pause() {
			return false
		}
	}

	return false
}

// holders are the namespaces whose Services have the most.
type holders struct{ ofFrontends, ofRanges string }

// holders returns them, if some Service waits for room. It calls pause between steps, and ends if that returns false.
func (r *Reconciler) holders(pause func() bool) (most holders) {
	if r.blocked.count() == 0 {
		return most
	}
	n, frontends, ranges := 0, make(map[string]int), make(map[string]int)
	add := func(namespace string, count, rangeCount int) bool {
		frontends[namespace] += count
		ranges[namespace] += rangeCount
		n++

		return n%stepSize != 0 || pause()
	}
	for name, svc := range r.services {
		if !add(name.Namespace, len(svc.plan.frontends), svc.plan.ranges) {
			return most
		}
	}
	for name, addrs := range r.addrs.drains {
		if !add(name.Namespace, addrs, 0) {
			return most
		}
	}

	return holders{largest(frontends), largest(ranges)}
}

// largest returns the namespace with the highest count, the first one of several, and "" if there is none.
func largest(counts map[string]int) (most string) {
	delete(counts, nameless.Namespace)
	for namespace, count := range counts {
		if count > counts[most] || count == counts[most] && namespace < most {
			most = namespace
		}
	}

	return most
}

// status returns the status of one Service. It looks up the owners of frontends that the Service
// does not own, and of the others only if an adopted Service may hold them. It calls pause between steps, and ends if that
// returns false.
func (r *Reconciler) status(svc *service, adopts bool, most holders, pause func() bool) Status {
	s := Status{Service: svc.name, Programmed: svc.programmed()}
	if svc.work != nil {
		s.Failures = svc.failures
		switch {
		case svc.lacksRanges:
			s.Holder = Holder{most.ofRanges, "source ranges"}
		case svc.blocked:
			s.Holder = Holder{most.ofFrontends, "frontends"}
		}
		if svc.dirty {
			s.Retry = svc.retry.at
		}
	}
	goesOn := true
	for i := 0; goesOn && i < len(svc.plan.frontends); i++ { // the plan may change during a pause
		f := &svc.plan.frontends[i]
		if f.owned {
			s.Overlaps = append(s.Overlaps, r.overlaps(svc, f)...)
		}
		if !f.owned || adopts {
			owner := r.claims.Owner(f.key)
			if adopter := r.adopter(f.key); adopter != nil {
				owner = adopter.plan.claimant
			}
			if owner != nil && owner.Name != svc.name {
				s.Lost = append(s.Lost, Loss{Frontend: modelKey(f.key), Owner: owner.Name})
			}
		}
		if i%stepSize == stepSize-1 {
			goesOn = pause()
		}
	}

	return s
}

// OwnerOf returns the Service that has a frontend, or nil, and whether it would lose it to another one that claims it with an
// address of this kind.
func (r *Reconciler) OwnerOf(key lb.FrontendKey, kind lb.Kind) (owner *lb.Claimant, yields bool) {
	return r.claims.Owner(keyOf(key)), r.claims.Yields(keyOf(key), kind)
}

// overlaps returns what other Services have at a frontend that svc owns.
func (r *Reconciler) overlaps(svc *service, f *plannedFrontend) []Overlap {
	if kind := lb.Kind(f.kind); kind != lb.KindLoadBalancer && kind != lb.KindExternalIP {
		return nil
	}
	var found []Overlap
	look := func(key maps.FrontendKey, nodePort bool) {
		if owner := r.claims.Owner(key); owner != nil && owner.Name != svc.name {
			found = append(found, Overlap{Frontend: modelKey(f.key), Other: owner.Name, NodePort: nodePort})
		}
	}
	if r.addrs.have[f.key.Addr].Flags&maps.AddrNodePort != 0 {
		look(nodePortOf(f.key), true)
	}
	look(catchAllOf(f.key), false)

	return found
}

// Fill is how full a map is.
type Fill struct {
	Used     int
	Capacity int // zero: unknown
}

// Counters are numbers over all maps.
type Counters struct {
	Writes map[string]Writes
	Fill   map[string]Fill
}

// Counters returns the numbers of writes since New, and how full the maps are, by names of the
// maps.
func (r *Reconciler) Counters() Counters {
	c := Counters{Writes: make(map[string]Writes), Fill: make(map[string]Fill)}
	for _, m := range r.maps {
		c.Writes[m.Name()], c.Fill[m.Name()] = m.counters()
	}

	return c
}

// Written returns a number that changes whenever ids of service ports or backends are assigned or
// removed.
func (r *Reconciler) Written() uint64 {
	ports, backends := r.servicePorts.writes, r.backends.writes

	return ports.Puts + ports.Deletes + backends.Puts + backends.Deletes
}

// GoneBackend is a backend of a UDP service port that is not in the maps any more.
type GoneBackend struct {
	ServicePortID uint32
	BackendID     uint32
	Addr          netip.AddrPort
}

// GoneFrontend is a UDP frontend that no longer leads to this service port. Its backends may still
// be reached through other frontends.
type GoneFrontend struct {
	ServicePortID uint32
	Key           lb.FrontendKey
}

// Gone lists backends and frontends to which UDP sockets must not stay connected.
type Gone struct {
	Backends  []GoneBackend
	Frontends []GoneFrontend
}

// Gone returns what went away since the last call. No program that starts now can find it. Call it
// after every Apply.
func (r *Reconciler) Gone() Gone {
	gone := r.gone
	r.gone = Gone{}

	return gone
}

// maxFailures is how many failures of one Service are kept: if a map is full, every entry of the
// Service may fail.
const maxFailures = 10

// fail records a failed write, once for each thing written.
func (svc *service) fail(what string, err error) {
	svc.failed = true
	again := slices.ContainsFunc(svc.failures, func(f Failure) bool { return f.What == what })
	if !again && len(svc.failures) < maxFailures {
		svc.failures = append(svc.failures, Failure{What: what, Err: err})
	}
	svc.blocked = svc.blocked || errors.Is(err, maps.ErrFull)
}

// failFrontend is fail for a frontend. There may be ten thousands: those beyond maxFailures get no text.
func (svc *service) failFrontend(key maps.FrontendKey, err error) {
	what := ""
	if len(svc.failures) < maxFailures {
		what = "frontend " + modelKey(key).String()
	}
	svc.fail(what, err)
}

// errorOf returns failures as one error that names the Service.
func (svc *service) errorOf(failed []Failure) error {
	if len(failed) == 0 {
		return nil
	}
	errs := make([]error, len(failed))
	for i, f := range failed {
		errs[i] = f
	}

	return fmt.Errorf("service %s: %w", svc.name, errors.Join(errs...))
}
