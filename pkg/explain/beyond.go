package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
)

// maxWays is the number of endpoints to which ways are looked up.
const maxWays = 64

// lookBeyond sets the ways to the endpoints that the connection may get, and adds what stops it or may stop it there:
// no route, a device that leads elsewhere or is down, a neighbour that does not answer, forwarding that is off, a firewall,
// the filter of reverse paths.
func (i *inquiry) lookBeyond() error {
	if i.outcome() != Translated {
		return nil
	}
	if err := i.checkReversePath(); err != nil {
		return err
	}
	if !i.atDevice && i.client.Mesh != "" {
		i.Beyond = append(i.Beyond, fmt.Sprintf("a mesh redirects what the pod sends (%s), and its proxy gets the endpoint's address instead of the Service's: "+
			"opt the pod out of translation at sockets", i.client.Mesh))
	}
	netfilter, err := node.ReadNetfilter()
	if err != nil {
		i.missing("whether a firewall of this node drops packets to the endpoints: %v", err)
	}
	leadsOut, err := devicesThatLeadOut()
	if err != nil {
		i.missing("whether the routes to the endpoints leave by the right devices: %v", err)
	}
	looked, stopped := 0, 0
	for n := range i.Endpoints {
		e := &i.Endpoints[n]
		if e.Odds == 0 || e.Reason != "" {
			continue
		}
		if looked++; looked > maxWays {
			i.missing("the ways to more than %d endpoints", maxWays)

			break
		}
		turned := e.Way != ""
		way, why := i.findWay(e, leadsOut)
		if why == "" && !way.Local && !i.isHost {
			why = i.forwardingOff(e.Address.Addr().Is6())
		}
		if why != "" {
			i.beyond(why)
		}
		drops := why != ""
		if !turned || way.Local {
			for _, drop := range i.judge(&netfilter, e, way) {
				drops = drops || drop.Sure
				i.beyond(drop.String())
			}
		}
		if drops {
			stopped++
		}
	}
	if looked == 0 {
		return nil
	}
	i.stopped = stopped == looked
	i.notLooked("whether the endpoint answers")
	i.notLooked("what rules at PREROUTING, POSTROUTING and ingress hooks, and programs of others at devices (tc, XDP), drop on this node")
	i.notLooked("what networks, NetworkPolicies and firewalls drop at the endpoint, its node, and between")

	return nil
}

// judge returns what of this node's firewall drops the first packet to an endpoint, or may drop it, at the hooks that it
// passes after Sluice has translated it.
func (i *inquiry) judge(netfilter *node.Netfilter, e *Endpoint, way node.Way) []node.Drop {
	p := node.Packet{Destination: e.Address, Protocol: uint8(i.Protocol), In: i.arrival.Stack, Out: way.Device}
	// Behind a device, it may be masqueraded later than there.
	if source, err := netip.ParseAddr(e.Client); err == nil && (i.isHost || source == i.question.From) {
		p.Source = source
	}
	const loopback = "lo"
	switch {
	case i.isHost && way.Local:
		p.In, p.Out = "", loopback
		drops := netfilter.Judge(node.HookOutput, p)
		p.In, p.Out = loopback, ""

		return append(drops, netfilter.Judge(node.HookInput, p)...)
	case way.Local:
		p.Out = ""

		return netfilter.Judge(node.HookInput, p)
	case i.isHost:
		p.In = ""

		return netfilter.Judge(node.HookOutput, p)
	}

	return netfilter.Judge(node.HookForward, p)
}

// beyond adds what stops the connection, or may stop it, once.
func (i *inquiry) beyond(text string) {
	if !slices.Contains(i.Beyond, text) {
		i.Beyond = append(i.Beyond, text)
	}
}

// findWay sets the way to an endpoint and what it sees as the client. It returns why packets do not get there, empty if
// nothing shows that.
func (i *inquiry) findWay(e *Endpoint, leadsOut map[string]bool) (way node.Way, why string) {
	way, err := node.WayTo(e.Address.Addr())
	if err != nil {
		return way, fmt.Sprintf("%s cannot be reached: %v", e.Address, err)
	}
	if way.Local {
		e.Way = "this node itself"

		return way, ""
	}
	e.Way = strings.TrimPrefix(e.Way+", "+textOf(way), ", ")
	if e.Client == "" && i.isHost && !i.question.From.IsValid() {
		e.Client = way.Source.String()
	} else if e.Client == "" {
		e.Client = i.question.From.String()
	}
	out, known := leadsOut[way.Device]
	switch {
	case way.Neighbour == "failed" || way.Neighbour == "incomplete":
		return way, fmt.Sprintf("%s cannot be reached: the next hop does not answer (neighbour %s on %s)", e.Address, way.Neighbour, way.Device)
	case known && e.Local && out:
		return way, fmt.Sprintf("%s is an endpoint on this node, and the route to it leaves by %s: the device of its pod is missing or down", e.Address, way.Device)
	case known && !e.Local && e.Node != "" && !out:
		i.beyond(fmt.Sprintf("%s is an endpoint on node %s, and the route to it leads to pods of this node by %s", e.Address, e.Node, way.Device))
	case e.Local:
		if at, err := node.ArrivalOf(e.Address.Addr()); err != nil {
			i.beyond(fmt.Sprintf("the pod of %s is not seen: %v", e.Address, err))
		} else if at.Down {
			return way, fmt.Sprintf("%s cannot be reached: %s, which leads to its pod, is down", e.Address, at.Name)
		}
	}
	if way.Neighbour == "none" || way.Neighbour == "stale" {
		i.notLooked("whether the next hop answers, where its neighbour is none or stale")
	}

	return way, ""
}

// forwardingOff returns why the kernel does not forward the client's packets, or "".
func (i *inquiry) forwardingOff(v6 bool) string {
	sysctl, err := node.ForwardingOff(i.arrival.Stack, v6)
	switch {
	case err != nil:
		i.missing("whether packets are forwarded: %v", err)
	case sysctl != "":
		return fmt.Sprintf("%s is 0: what arrives by %s is not forwarded", sysctl, i.arrival.Stack)
	}

	return ""
}

// devicesThatLeadOut reports of each device whether it leads to other hosts, and not to pods of this node.
func devicesThatLeadOut() (map[string]bool, error) {
	state, err := node.Read()
	if err != nil {
		return nil, err
	}
	out := make(map[string]bool)
	for _, d := range node.Decide(state.Devices, node.Rules{}) {
		if d.LeadsOut || d.Class == node.ClassPods || d.Kind == "bridge" {
			out[d.Name] = d.LeadsOut
		}
	}

	return out, nil
}

// checkReversePath adds that the packets of a client are dropped when they arrive, because this node
// would send answers by another device.
func (i *inquiry) checkReversePath() error {
	const strict = 1
	if !i.atDevice || i.arrival.RPFilter != strict || !i.question.From.Is4() {
		return nil
	}
	back, err := node.WayTo(i.question.From)
	if err != nil {
		i.Beyond = append(i.Beyond, fmt.Sprintf("rp_filter of %s drops the client's packets: %v", i.arrival.Name, err))

		return nil
	}
	if back.Device != i.arrival.Name && !i.isPod {
		i.Beyond = append(i.Beyond, fmt.Sprintf("rp_filter of %s is strict and drops the client's packets: the route to the client leaves by %s", i.arrival.Name, back.Device))
	}

	return nil
}

func textOf(way node.Way) string {
	text := "by " + way.Device
	if way.Gateway.IsValid() {
		text += " to " + way.Gateway.String()
	}
	if way.Neighbour != "" {
		text += ", neighbour " + way.Neighbour
	}

	return text
}

// conclude sets the answer.
func (i *inquiry) conclude() {
	i.Outcome, i.Reason = i.outcome(), i.answer.Reason.Label()
	detail := ""
	switch reason := i.answer.Reason; {
	case i.Outcome == Translated:
		detail = i.concludeTranslated()
	case reason == maps.ReasonRejectNoBackend || reason == maps.ReasonDropNoLocalBackend:
		detail = i.whyNone()
	case reason == maps.ReasonRejectNoPort:
		detail = fmt.Sprintf("Service %s has no port %d/%s", i.Service, i.To.Port(), i.Protocol)
	case reason == maps.ReasonDropUnallocated:
		detail = fmt.Sprintf("%s is in a ServiceCIDR, but no Service has it", i.To.Addr())
	case reason == maps.ReasonDropSourceRange:
		detail = "the client is not in the loadBalancerSourceRanges of Service " + i.Service
	case i.unwatched && i.atDevice:
		detail = fmt.Sprintf("no program of Sluice is attached to %s", i.arrival.Name)
		if i.leftAlone != "" {
			detail += ", and sockets are left alone: " + i.leftAlone
		}
	case i.answer.NodesOwn:
		detail = fmt.Sprintf("%s is an address of this node, and a socket answers there", i.To)
	case reason == maps.ReasonPassNoFrontend:
		detail = i.whyNoFrontend
	default:
		_, detail, _ = strings.Cut(reason.String(), ": ")
	}
	separator := ": "
	if i.Outcome == Translated {
		separator = " "
	}
	i.Answer = string(i.Outcome) + separator + detail
	if len(i.Beyond) > 0 {
		i.Answer += ", but " + i.Beyond[0]
	}
	if more := len(i.Beyond) - 1; more > 0 {
		i.Answer += fmt.Sprintf(" (and %d more, below)", more)
	}
	i.Gets = i.gets()
}

// concludeTranslated returns where the connection goes. If no way leads to any of the backends, it is
// dropped after all.
func (i *inquiry) concludeTranslated() string {
	var reached []Endpoint
	lost := ""
	for _, e := range i.Endpoints {
		switch {
		case e.Odds > 0 && e.Reason == "":
			reached = append(reached, e)
		case e.Odds > 0:
			lost = e.Reason
		}
	}
	i.Reason = maps.ReasonTranslated.Label()
	switch {
	case len(reached) == 0:
		i.Outcome, i.Reason = Dropped, i.answer.Reason.Label()
		_, lost, _ = strings.Cut(lost, ": ")

		return lost
	case i.answer.Affinity > 0:
		return fmt.Sprintf("to %s of Service %s, which the client keeps (session affinity)", reached[0].Address, i.Service)
	case len(reached) == 1:
		return fmt.Sprintf("to %s of Service %s", reached[0].Address, i.Service)
	}

	return fmt.Sprintf("to one of %d endpoints of Service %s", len(reached), i.Service)
}

// whyNone returns why the Service has no endpoint for the connection.
func (i *inquiry) whyNone() string {
	_, detail, _ := strings.Cut(i.answer.Reason.String(), ": ")
	detail = strings.Replace(detail, "the Service", "Service "+i.Service, 1)
	counts := make(map[string]int)
	var reasons []string
	for _, e := range i.Endpoints {
		if counts[e.Reason]++; counts[e.Reason] == 1 {
			reasons = append(reasons, e.Reason)
		}
	}
	for n, reason := range reasons {
		reasons[n] = fmt.Sprintf("%d %s", counts[reason], reason)
	}
	switch {
	case len(reasons) > 0:
		return detail + ": " + strings.Join(reasons, ", ")
	case len(i.Missing) == 0:
		return fmt.Sprintf("Service %s has no endpoints at all", i.Service)
	}

	return detail
}

// gets returns what the client sees.
func (i *inquiry) gets() string {
	switch {
	case i.stopped && i.isHost:
		return "an error, at once or after some seconds: nothing gets to an endpoint"
	case i.stopped:
		return "nothing, until it times out: nothing gets to an endpoint"
	case i.Outcome == Translated && len(i.Beyond) > 0:
		return "what the endpoint answers, unless that stops it"
	case i.Outcome == Translated:
		return "what the endpoint answers, as far as this node shows"
	case i.Outcome == Passed:
		return "what it would get without Sluice"
	case i.Outcome == Refused && i.Protocol == lb.UDP && !i.atDevice:
		return "ECONNREFUSED, at once from sendto() with an address, and after a datagram if it is connected"
	case i.Outcome == Dropped && i.Protocol == lb.UDP && !i.atDevice:
		return "EHOSTUNREACH, at once from sendto() with an address, and nothing if it is connected"
	case i.Outcome == Refused && i.atDevice:
		return "an ICMP error, port unreachable: ECONNREFUSED"
	case i.Outcome == Dropped && i.atDevice:
		return "nothing, until it times out"
	case i.Outcome == Refused || !i.probe.SetsErrno():
		return "ECONNREFUSED, at once"
	}

	return "EHOSTUNREACH, at once"
}
