// Package explain finds out what a new connection gets from this node, and why. It runs the stages of
// the attached programs on the maps in force ([bpf.Probe]), asks the agent why endpoints are left
// out, and looks at what lies beyond Sluice: routes, neighbours and firewalls. It changes nothing.
//
// [Explainer.Ask] reads what an operator has typed (question.go); [Explainer.Explain] answers, with the
// endpoints and their odds (endpoints.go) and what lies beyond Sluice (beyond.go).
package explain

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/pods"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/pkg/status"
)

// Outcome is what Sluice does with a connection.
type Outcome string

// The outcomes.
const (
	Translated Outcome = "translated" // it goes to a backend
	Refused    Outcome = "refused"    // the client gets an error at once
	Dropped    Outcome = "dropped"    // at a socket, the client gets an error at once; at a device, nothing
	Passed     Outcome = "passed"     // Sluice leaves it as it is
)

// Explanation is what a new connection gets, and why.
type Explanation struct {
	// Answer is one sentence, and Gets is what the client sees of it.
	Answer  string  `json:"answer"`
	Gets    string  `json:"gets"`
	Outcome Outcome `json:"outcome"`
	// Reason is the label of the reason in metrics.
	Reason string `json:"reason"`

	To       netip.AddrPort `json:"to"`
	Protocol lb.Protocol    `json:"protocol"`
	Service  string         `json:"service,omitempty"` // namespace/name:port
	Scope    lb.Scope       `json:"scope,omitempty"`
	// Steps are what led to the answer, in their order.
	Steps     []Step     `json:"steps"`
	Endpoints []Endpoint `json:"endpoints"`
	// Beyond is what may stop the connection where Sluice has no say.
	Beyond []string `json:"beyond,omitempty"`
	// NotLooked is what was not looked at, although it may stop the connection, and Missing what could not be found out.
	NotLooked []string `json:"notLookedAt,omitempty"`
	Missing   []string `json:"missing,omitempty"`
}

// Step is one step of the decision.
type Step struct {
	Name string `json:"name"`
	Text string `json:"text"`
}

// Endpoint is an endpoint of the Service, and whether the connection may get it.
// Its reason may also be why a connection that gets it is dropped.
type Endpoint struct {
	status.Endpoint
	// Suspect is set while it does not answer clients of this node.
	Suspect *status.Suspect `json:"suspect,omitempty"`
	// Odds is the probability, in [0, 1], that the connection gets it.
	Odds        float64 `json:"odds"`
	Connections int     `json:"connections"`
	// Way is how packets get there. Client is the address that the endpoint sees.
	Way    string `json:"way,omitempty"`
	Client string `json:"client,omitempty"`
}

// Explainer explains connections of one node.
type Explainer struct {
	Config
	probes map[string]*bpf.Probe // of sockets, and of devices by their names
}

// Config says where an [Explainer] looks.
type Config struct {
	Maps    *maps.Pinned // of the node, which the caller closes after the explainer
	BPFRoot string
	Agent   *status.Client
	Pods    pods.Config
}

// New returns an Explainer. It must be used and closed in the node's network namespace.
func New(cfg Config) *Explainer {
	return &Explainer{Config: cfg, probes: make(map[string]*bpf.Probe)}
}

// Close closes what was loaded.
func (e *Explainer) Close() error {
	var errs []error
	for _, probe := range e.probes {
		errs = append(errs, probe.Close())
	}

	return errors.Join(errs...)
}

// Question is a connection that a client might open.
type Question struct {
	// From is the address of the client. It is invalid for a process of this node that is bound to
	// no address.
	From netip.Addr
	// Name is that of the client, where it is known.
	Name     string
	To       netip.AddrPort
	Protocol lb.Protocol
	// Device is the device by which packets arrive that no socket program has seen. If it is empty,
	// that follows from the address of the client.
	Device string
}

// inquiry is the explanation of one question in progress.
type inquiry struct {
	*Explainer
	Explanation
	question Question

	client        node.Namespace // of the client's socket, if it is on this node
	isHost        bool           // the client is a process of this node
	isPod         bool           // it is a pod of this node
	arrival       node.Arrival   // of its packets, if it is not
	unwatched     bool           // no program is attached there
	probe         *bpf.Probe     // where the connection is decided
	atDevice      bool
	answer        bpf.Answer
	key           lb.FrontendKey
	leftAlone     string // why no program translates the client's sockets
	stopped       bool   // no packet gets to an endpoint
	whyNoFrontend string // why Sluice leaves the destination as it is
}

// Explain returns what a connection gets. The error wraps [fs.ErrNotExist] if no program is attached to
// sockets.
func (e *Explainer) Explain(ctx context.Context, q Question) (Explanation, error) {
	i := &inquiry{Explainer: e, question: q, Explanation: Explanation{To: q.To, Protocol: q.Protocol, Endpoints: []Endpoint{}}}
	if err := i.findClient(); err != nil {
		return Explanation{}, err
	}
	if err := i.decide(); err != nil {
		return Explanation{}, err
	}
	if err := i.describeFrontend(); err != nil {
		return Explanation{}, err
	}
	if err := i.explainNoFrontend(ctx); err != nil {
		return Explanation{}, err
	}
	if err := i.listEndpoints(ctx); err != nil {
		return Explanation{}, err
	}
	if err := i.lookBeyond(); err != nil {
		return Explanation{}, err
	}
	i.conclude()

	return i.Explanation, nil
}

func (i *inquiry) step(name, format string, args ...any) {
	i.Steps = append(i.Steps, Step{name, fmt.Sprintf(format, args...)})
}

func (i *inquiry) missing(format string, args ...any) {
	i.Missing = append(i.Missing, fmt.Sprintf(format, args...))
}

func (i *inquiry) notLooked(what string) {
	if !slices.Contains(i.NotLooked, what) {
		i.NotLooked = append(i.NotLooked, what)
	}
}

// findClient finds out where the client is: on this node, in a pod of it, or behind a device.
func (i *inquiry) findClient() (err error) {
	if !i.question.From.IsValid() {
		i.isHost = true
		i.step("client", "a process of this node")

		return nil
	}
	name := i.question.From.String()
	if i.question.Name != "" {
		name = i.question.Name + ", " + name
	}
	if i.question.Device == "" {
		way, err := node.WayTo(i.question.From)
		if err != nil {
			return fmt.Errorf("client %s: %w", name, err)
		}
		if way.Local {
			i.isHost = true
			i.step("client", "%s, a process of this node that is bound to its address", name)

			return nil
		}
		if i.arrival, err = node.ArrivalOf(i.question.From); err != nil {
			return fmt.Errorf("client %s: %w", name, err)
		}
	} else if i.arrival, err = node.ArrivalAt(i.question.Device); err != nil {
		return err
	}
	probe, err := i.deviceProbe()
	if errors.Is(err, fs.ErrNotExist) {
		i.unwatched = true
		i.client, i.isPod, err = i.arrival.Namespace(i.question.From)
		if err != nil || !i.isPod {
			i.step("client", "%s, behind %s, to which no program of Sluice is attached", name, i.arrival.Name)

			return nil
		}
		i.step("client", "%s, a pod of this node, behind %s, to which no program of Sluice is attached", name, i.arrival.Name)

		return nil
	}
	if err != nil {
		return err
	}
	if i.isPod = probe.IsOfPods(); !i.isPod {
		i.step("client", "%s, not a pod of this node: its packets arrive by %s", name, i.arrival.Name)

		return nil
	}
	i.step("client", "%s, a pod of this node, behind %s", name, i.arrival.Name)
	found := false
	i.client, found, err = i.arrival.Namespace(i.question.From)
	if err == nil && !found {
		err = errors.New("its network namespace is neither in /run/netns nor that of a process in /proc")
	}
	if err != nil {
		i.missing("whether the pod has opted out: %v", err)
	}

	return nil
}

func (i *inquiry) deviceProbe() (*bpf.Probe, error) {
	return i.cachedProbe(i.arrival.Name, func() (*bpf.Probe, error) {
		attached, err := datapath.AttachedToDevice(i.BPFRoot, i.arrival.Index)
		if err != nil {
			return nil, err
		}
		defer attached.Close()

		return bpf.LoadDeviceProbe(i.Maps, attached)
	})
}

func (i *inquiry) socketProbe() (*bpf.Probe, error) {
	return i.cachedProbe("", func() (*bpf.Probe, error) {
		attached, err := datapath.AttachedToSockets(i.BPFRoot)
		if err != nil {
			return nil, fmt.Errorf("no program of Sluice is attached to sockets: %w", err)
		}
		defer attached.Close()

		return bpf.LoadSocketProbe(i.Maps, attached)
	})
}

func (e *Explainer) cachedProbe(name string, load func() (*bpf.Probe, error)) (*bpf.Probe, error) {
	if e.probes[name] == nil {
		probe, err := load()
		if err != nil {
			return nil, err
		}
		e.probes[name] = probe
	}

	return e.probes[name], nil
}

// decide asks the programs that the connection passes: those of the client's socket, and those of
// the device that its packets pass if the socket is left alone.
func (i *inquiry) decide() (err error) {
	if i.isHost || i.isPod && i.question.Device == "" {
		if i.probe, err = i.socketProbe(); err != nil {
			return err
		}
		if i.answer, err = i.dial(); err != nil {
			return err
		}
		why := ""
		switch reason := i.answer.Reason; {
		case i.answer.ServiceOptedOut:
			why = "its Service has opted out of translation at sockets"
		case i.answer.PodOptedOut:
			why = "the pod has opted out"
		case i.answer.NodesOwn:
			why = "the node has this address itself, and a socket that answers there comes first"
		case i.isPod && !i.unwatched && i.answer.HasFrontend && i.answer.Pool.Flags&maps.PoolSourceRanges != 0 && reason != maps.ReasonDropSourceRange:
			why = "its Service has source ranges, and its packets show which address it has"
		case reason == maps.ReasonPassProtocol:
			why = "sockets are translated for TCP and UDP only"
		case reason == maps.ReasonPassDisabled:
			why = "--udp excludes it"
		}
		if why == "" {
			i.step("decided", "when the socket connects")

			return nil
		}
		i.step("socket", "left alone: %s", why)
		i.leftAlone = why
		if i.isHost {
			return nil
		}
	}
	i.atDevice = true
	if i.unwatched {
		i.answer.Reason = maps.ReasonPassNoFrontend

		return nil
	}
	if i.probe, err = i.deviceProbe(); err != nil {
		return err
	}
	i.step("decided", "when its first packet arrives by %s, as device of class %s", i.arrival.Name, map[bool]string{true: "pods", false: "uplink"}[i.probe.IsOfPods()])
	i.answer, err = i.arrive(0)

	return err
}

// dial asks the probe of sockets.
func (i *inquiry) dial() (bpf.Answer, error) {
	return i.probe.Dial(bpf.Dial{
		To: i.To, Protocol: uint8(i.Protocol), Source: i.question.From, Host: i.isHost, PodUID: i.client.PodUID,
	})
}

// anyPort is the port that the client is taken to have, which nothing but a hash of the tuple depends on.
const anyPort = 40000

// arrive asks the probe of the device, for the way to a backend if that is not 0.
func (i *inquiry) arrive(backend uint32) (bpf.Answer, error) {
	return i.probe.Arrive(bpf.Packet{
		Device: i.arrival.Index, MAC: i.arrival.MAC, From: netip.AddrPortFrom(i.question.From, anyPort), To: i.To, Protocol: uint8(i.Protocol), Backend: backend,
	})
}

// describeFrontend adds the steps about the frontend and its pool.
func (i *inquiry) describeFrontend() error {
	i.Scope = lb.Scope(i.answer.Scope)
	kind, servicePortID, err := i.findFrontend()
	if err != nil || servicePortID == 0 {
		return err
	}
	pool := i.answer.Pool
	port, _, err := i.Maps.ServicePorts.Lookup(servicePortID)
	if err != nil {
		return err
	}
	i.Service = port.String()
	if i.key.Port == 0 {
		i.step("frontend", "%s is the ClusterIP of Service %s, which has no port %d/%s", i.To.Addr(), i.Service, i.To.Port(), i.Protocol)

		return nil
	}
	i.step("frontend", "%s of Service %s, as clients %s see it", kind, i.Service, map[lb.Scope]string{lb.Internal: "on this node", lb.External: "outside of this node"}[i.Scope])
	if !i.answer.HasFrontend {
		return nil
	}
	if pool.Flags&maps.PoolSourceRanges != 0 {
		verdict := "the client is among them"
		if i.answer.Reason == maps.ReasonDropSourceRange {
			verdict = "the client is not among them"
		}
		ranges, err := status.SourceRanges(i.Maps.Tables)
		if err != nil {
			return err
		}
		var texts []string
		for _, prefix := range ranges[pool.ServicePortId] {
			texts = append(texts, prefix.String())
		}
		i.step("ranges", "loadBalancerSourceRanges %s: %s", strings.Join(texts, ", "), verdict)
	}
	switch {
	case pool.AffinitySeconds == 0:
	case i.answer.Affinity > 0:
		backend, _ := i.Maps.BackendOf(i.answer.Backend)
		i.step("affinity", "the client keeps %s, for another %s without a connection", backend.AddrPort(), i.answer.Affinity.Round(time.Second))
	default:
		i.step("affinity", "the client has no backend yet; it keeps the one that it gets, for %s without a connection", time.Duration(pool.AffinitySeconds)*time.Second)
	}
	if pool.SlotCount > 1 {
		i.step("algorithm", "%s", reconcile.AlgorithmText(pool.Algorithm))
	}

	return nil
}

// findFrontend finds the frontend of the destination as the programs do: its own, a node port, or the
// catch-all of a ClusterIP. It sets key, and returns id 0 if there is none.
func (i *inquiry) findFrontend() (kind lb.Kind, servicePortID uint32, err error) {
	if i.Scope == 0 || i.answer.Reason == maps.ReasonPassNoFrontend && !i.passesThrough() {
		return 0, 0, nil
	}
	unspecified := netip.IPv4Unspecified()
	if i.To.Addr().Is6() {
		unspecified = netip.IPv6Unspecified()
	}
	for _, key := range []lb.FrontendKey{
		{Addr: i.To.Addr(), Port: i.To.Port(), Protocol: i.Protocol, Scope: i.Scope},
		{Addr: unspecified, Port: i.To.Port(), Protocol: i.Protocol, Scope: i.Scope},
		{Addr: i.To.Addr(), Scope: i.Scope},
	} {
		if i.answer.Reason == maps.ReasonRejectNoPort && key.Port != 0 {
			continue
		}
		f, pool, ok, err := i.Maps.FrontendOf(maps.FrontendKeyOf(key.Addr, key.Port, uint8(key.Protocol), uint8(key.Scope)))
		if err != nil {
			return 0, 0, err
		}
		if ok {
			i.key = key

			return lb.Kind(f.Kind), pool.ServicePortId, nil
		}
	}

	return 0, 0, nil
}

// passesThrough reports whether a Service leaves its clients outside to the routes, for lack of a usable endpoint on this node.
func (i *inquiry) passesThrough() bool {
	pool := i.answer.Pool

	return i.answer.HasFrontend && pool.Flags&maps.PoolPassIfEmpty != 0 && pool.SlotCount == 0
}

// outcome returns the class of the reason. A backend without a way to it is one of several.
func (i *inquiry) outcome() Outcome {
	switch reason := i.answer.Reason; {
	case reason == maps.ReasonDropMasqueradeAddr, reason.Translated():
		return Translated
	case !reason.Refuses():
		return Passed
	case strings.HasPrefix(reason.Label(), "reject_"):
		return Refused
	}

	return Dropped
}
