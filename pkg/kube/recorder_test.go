package kube

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/lab"
)

// recorder is a Sink that records every call, and which objects are in force: those that
// were reported before the last Flush.
type recorder struct {
	mu       sync.Mutex
	calls    []string
	reported map[string]string
	inForce  map[string]string
	reports  map[string][]lb.Problem
	flushes  int
	dialed   netip.AddrPort
}

func newRecorder() *recorder {
	return &recorder{reported: map[string]string{}, inForce: map[string]string{}, reports: map[string][]lb.Problem{}}
}

func (r *recorder) set(name, value string, problems []lb.Problem) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, "set "+name+" "+value)
	for _, p := range problems {
		r.calls = append(r.calls, "  "+p.String())
	}
	r.reported[name] = value
	delete(r.reports, name[strings.LastIndexByte(name, '/')+1:])
}

func (r *recorder) delete(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, "delete "+name)
	delete(r.reported, name)
}

func (r *recorder) Flush() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.inForce = maps.Clone(r.reported)
	r.flushes++
}

func (r *recorder) SetService(s lb.Service, problems []lb.Problem) {
	var ports []string
	for _, p := range s.Ports {
		ports = append(ports, strings.TrimPrefix(fmt.Sprintf("%s:%d/%s", p.Name, p.Port, p.Protocol), ":"))
	}
	value := fmt.Sprint(s.ClusterIPs, s.Families, ports)
	if s.Algorithm != lb.DefaultAlgorithm {
		value += " by " + s.Algorithm.String()
	}
	if s.Failover != lb.NoFailover {
		value += " failover " + s.Failover.String()
	}
	if s.OptedOut {
		value += " opted out"
	}
	if s.OtherProxy {
		value += " of another proxy"
	}
	r.set("Service "+s.Name.String(), value, problems)
}

func (r *recorder) SetSlice(s Slice, problems []lb.Problem) {
	var ports, endpoints []string
	for _, p := range s.Ports {
		ports = append(ports, strings.TrimPrefix(fmt.Sprintf("%s:%d/%s", p.Name, p.Port, p.Protocol), ":"))
	}
	for _, e := range s.Endpoints {
		endpoints = append(endpoints, e.Addr.String())
	}
	r.set("EndpointSlice "+s.Name.String(), fmt.Sprint(s.Service, " ", ports, endpoints), problems)
}

func (r *recorder) SetNode(n Node, problems []lb.Problem) {
	r.set("Node "+n.Name, fmt.Sprintf("exists=%v zone=%q %v", n.Exists, n.Zone, n.PrimaryIPs), problems)
}

func (r *recorder) SetServiceCIDRs(prefixes []netip.Prefix, problems []lb.Problem) {
	r.set("ServiceCIDRs", fmt.Sprint(prefixes), problems)
}

func (r *recorder) ReportGone(kind string, gone, known int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, fmt.Sprintf("gone %s: %d of %d", kind, gone, known))
}

func (r *recorder) SetDialed(addr netip.AddrPort) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dialed = addr
}

var socketText = [...]string{SocketUndecided: "", SocketOn: "on", SocketOff: "off"}

func (r *recorder) SetPod(p Pod, problems []lb.Problem) {
	r.set("Pod "+p.Namespace+"/"+p.Name, fmt.Sprintf("uid=%q socket=%q", p.UID, socketText[p.Socket]), problems)
}

func (r *recorder) SetNamespace(n Namespace, problems []lb.Problem) {
	r.set("Namespace "+n.Name, fmt.Sprintf("socket=%q", socketText[n.Socket]), problems)
}

func (r *recorder) DeleteService(name lb.ServiceName) { r.delete("Service " + name.String()) }
func (r *recorder) DeleteSlice(name lb.SliceName)     { r.delete("EndpointSlice " + name.String()) }

func (r *recorder) Unread(source string, service lb.ServiceName, problems []lb.Problem) {
	r.mu.Lock()
	r.calls = append(r.calls, "unread "+service.String())
	r.mu.Unlock()
	r.Report(source, problems)
}

func (r *recorder) Report(source string, problems []lb.Problem) {
	r.mu.Lock()
	defer r.mu.Unlock()
	source = source[strings.LastIndexByte(source, '/')+1:]
	r.calls = append(r.calls, fmt.Sprintf("report %s: %d", source, len(problems)))
	for _, p := range problems {
		r.calls = append(r.calls, "  "+p.String())
	}
	r.reports[source] = problems
	if len(problems) == 0 {
		delete(r.reports, source)
	}
}

// take returns the calls since the last take.
func (r *recorder) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	calls := r.calls
	r.calls = nil
	return calls
}

// names returns the names of the objects in force.
func (r *recorder) names() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Sorted(maps.Keys(r.inForce))
}

func (r *recorder) value(name string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.inForce[name]
}

func (r *recorder) problems(source string) []lb.Problem {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.reports[source]
}

// mustHave waits until exactly these objects are in force.
func mustHave(t *testing.T, r *recorder, want ...string) {
	t.Helper()
	slices.Sort(want)
	lab.Eventually(t, "what is in force", func() error {
		if diff := cmp.Diff(want, r.names()); diff != "" {
			return fmt.Errorf("(-want +got):\n%s", diff)
		}

		return nil
	})
}

// mustBecome waits until an object is in force with a value.
func mustBecome(t *testing.T, r *recorder, name, want string) {
	t.Helper()
	lab.Eventually(t, fmt.Sprintf("%s is %q", name, want), func() bool { return r.value(name) == want })
}

// mustClose waits until a channel is closed.
func mustClose(t *testing.T, what string, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(10 * time.Second):
		t.Fatalf("%s does not happen", what)
	}
}
