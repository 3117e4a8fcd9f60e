package monitor

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/pods"
)

// Outcome is what an event reports.
type Outcome string

// The outcomes.
const (
	Translated Outcome = "translated" // a new flow got a backend
	Refused    Outcome = "refused"
	Lost       Outcome = "lost" // events that were not read in time

	Suspect Outcome = "suspect" // a backend gets no new flows for a while: see docs/healing.md
	Probe   Outcome = "probe"   // a suspect got a single one, and is passed over again
	Answers Outcome = "answers" // it is no suspect any more
)

// Event is one event, with names. What is not known is left out.
type Event struct {
	Time    time.Time `json:"time"`
	Outcome Outcome   `json:"outcome"`
	// Reason is a label of [maps.Reason], Why its text for operators; of a suspect, what it does.
	Reason   string `json:"reason,omitempty"`
	Why      string `json:"why,omitempty"`
	Protocol string `json:"protocol,omitempty"`
	// At a socket, the client is a process: ClientIP is the address of its pod, or what the socket
	// is bound to.
	ClientIP     netip.Addr `json:"clientIP,omitzero"`
	ClientPort   uint16     `json:"clientPort,omitempty"`
	ClientPod    string     `json:"clientPod,omitempty"` // namespace/name
	ClientPodUID string     `json:"clientPodUID,omitempty"`
	Process      string     `json:"process,omitempty"`
	PID          uint32     `json:"pid,omitempty"`
	Device       string     `json:"device,omitempty"` // at which the packet was

	Destination netip.AddrPort `json:"destination,omitzero"`
	Service     string         `json:"service,omitempty"` // namespace/name:port
	Backend     netip.AddrPort `json:"backend,omitzero"`
	BackendPod  string         `json:"backendPod,omitempty"`
	// BackendPodUID is known for pods of this node.
	BackendPodUID string `json:"backendPodUID,omitempty"`

	// Until is how long a suspect is passed over. Clients is how many of this node speak against it, as
	// far as up to 32 can be told apart.
	Until   time.Time `json:"until,omitzero"`
	Clients int       `json:"clients,omitempty"`

	// Lost is how many events were lost; zero if that is not known.
	Lost uint64 `json:"lost,omitempty"`
}

// columns are the widths of the columns of [Header] and [Event.String]; the last one has none.
const columns = "%-21s%-40s%-30s%-30s%s"

// Header is the head of a table of events.
func Header() string {
	return fmt.Sprintf(columns, "TIME UTC", "CLIENT", "DESTINATION", "SERVICE", "OUTCOME")
}

// String returns the event as a line of a table.
func (e Event) String() string {
	at, until := e.Time.UTC().Format("Jan 02 15:04:05.000"), e.Until.UTC().Format("15:04:05.000")
	switch {
	case e.Outcome == Lost && e.Lost == 0:
		return at + "  events were lost: this command was stopped for too long"
	case e.Outcome == Lost:
		return fmt.Sprintf("%s  %d events lost: there were more than could be printed", at, e.Lost)
	}
	client, destination, outcome := "-", "-", e.Why
	if e.Destination.IsValid() {
		client, destination = e.client(), e.Destination.String()+"/"+e.Protocol
	}
	backend := "a backend that is gone"
	if e.Backend.IsValid() {
		backend = e.Backend.String()
	}
	if e.BackendPod != "" {
		backend += " (" + e.BackendPod + ")"
	}
	switch e.Outcome {
	case Translated:
		outcome = backend
	case Suspect:
		client = fmt.Sprintf("%d on this node", e.Clients)
		outcome = fmt.Sprintf("%s %s: passed over until %s", backend, e.Why, until)
	case Probe:
		outcome = fmt.Sprintf("%s got a probe: passed over until %s", backend, until)
	case Answers:
		outcome = backend + " " + e.Why
	}

	return fmt.Sprintf(columns, at, client+" ", destination+" ", cmp.Or(e.Service, "-")+" ", outcome)
}

// compare orders events by their times.
func (e Event) compare(other Event) int { return e.Time.Compare(other.Time) }

// client returns who the client is, as far as that is known.
func (e Event) client() string {
	who := e.ClientPod
	if who == "" && e.ClientIP.IsValid() {
		who = e.ClientIP.String()
		if e.ClientPort != 0 {
			who = netip.AddrPortFrom(e.ClientIP, e.ClientPort).String()
		}
	}
	switch {
	case e.Device != "":
		return who + " at " + e.Device
	case who == "":
		return fmt.Sprintf("node (%s %d)", e.Process, e.PID)
	default:
		return fmt.Sprintf("%s (%s %d)", who, e.Process, e.PID)
	}
}

// Filter selects events. What it leaves empty selects all.
type Filter struct {
	Service string     // namespace/name
	Pod     string     // namespace/name, name or UID of the client or the backend
	IP      netip.Addr // of the client, the destination or the backend
	Reasons []string   // labels of [maps.Reason]
	Refused bool       // refusals only
}

func (f Filter) selects(e Event) bool {
	client, backend := pods.Pod{Name: e.ClientPod, UID: e.ClientPodUID}, pods.Pod{Name: e.BackendPod, UID: e.BackendPodUID}
	service, _, _ := strings.Cut(e.Service, ":")

	return (len(f.Reasons) == 0 || slices.Contains(f.Reasons, e.Reason)) &&
		(f.Service == "" || f.Service == service) &&
		(f.Pod == "" || client.Is(f.Pod) || backend.Is(f.Pod)) &&
		(!f.IP.IsValid() || f.IP == e.ClientIP || f.IP == e.Destination.Addr() || f.IP == e.Backend.Addr()) &&
		(!f.Refused || e.Outcome == Refused)
}

// names looks up what the numbers in events stand for.
type names struct {
	tables maps.Tables
	pod    func(cgroup uint64, addr netip.Addr) (pods.Pod, error)
	device func(index uint32) string
	booted time.Time // to which the times of events are relative
}

// event returns an event with names.
func (n names) event(e maps.MonitorEvent) (Event, error) {
	reason := maps.Reason(e.Reason)
	event := Event{
		Time:    n.at(e.Time),
		Outcome: Translated, Reason: reason.Label(), Why: reason.String(),
		Protocol:   lb.Protocol(e.Proto).String(),
		ClientPort: maps.Port(e.ClientPort),
		Process:    commandOf(e.Comm[:]), PID: e.Pid,
		Destination: netip.AddrPortFrom(e.OriginalDst.IP(), maps.Port(e.OriginalPort)),
	}
	if e.Kind == maps.MonitorRefused {
		event.Outcome = Refused
	}
	if e.Client != (maps.Addr{}) {
		event.ClientIP = e.Client.IP()
	}
	client, err := n.pod(e.CgroupId, event.ClientIP)
	if err != nil {
		return event, err
	}
	event.ClientPod, event.ClientPodUID = client.Name, client.UID
	if e.Place != maps.PlaceSocket {
		event.Device = n.device(e.Ifindex)
	}
	if b, ok := n.tables.BackendOf(e.BackendId); ok {
		if err := n.nameBackend(&event, b); err != nil {
			return event, err
		}
	}
	event.Service, err = n.service(e)

	return event, err
}

// at returns a time of the clock of programs.
func (n names) at(ns uint64) time.Time { return n.booted.Add(time.Duration(ns)) }

// nameBackend fills in the backend of an event.
func (n names) nameBackend(event *Event, b maps.Backend) error {
	event.Backend = b.AddrPort()
	pod, err := n.pod(0, event.Backend.Addr())
	event.BackendPod, event.BackendPodUID = pod.Name, pod.UID

	return err
}

// service returns the name of the Service that an event is about, with its port if there is one.
func (n names) service(e maps.MonitorEvent) (string, error) {
	id := e.ServicePortId
	if id == 0 { // a port that the ClusterIP does not have: the Service has the others
		all := maps.FrontendKeyOf(e.OriginalDst.IP(), 0, 0, maps.ScopeInternal)
		_, pool, ok, err := n.tables.FrontendOf(all)
		if err != nil || !ok {
			return "", err
		}
		id = pool.ServicePortId
	}
	port, ok, err := n.tables.ServicePorts.Lookup(id)
	if err != nil || !ok {
		return fmt.Sprintf("id %d", id), err // the Service is gone
	}

	return port.String(), nil
}

// deviceName returns the name of a device of this node; of one that is gone, its number.
func deviceName(index uint32) string {
	device, err := net.InterfaceByIndex(int(index))
	if err != nil {
		return fmt.Sprintf("device %d", index)
	}

	return device.Name
}

func commandOf(chars []int8) string {
	comm := make([]byte, len(chars))
	for i, c := range chars {
		comm[i] = byte(c)
	}

	return pods.Command(comm)
}
