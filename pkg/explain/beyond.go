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

// lookBeyond sets the ways to the endpoints that the connection may get, and adds what may stop it
// there: no route, a neighbour that does not answer, a firewall, the filter of reverse paths.
func (i *inquiry) lookBeyond() error {
	if i.outcome() != Translated {
		return nil
	}
	if err := i.checkReversePath(); err != nil {
		return err
	}
	var drops []node.NetfilterRule
	if !i.isHost {
		netfilter, err := node.ReadNetfilter()
		if err != nil {
			i.missing("whether a firewall drops packets to the endpoints: %v", err)
		}
		drops = netfilter.Drops
	}
	looked := 0
	for n := range i.Endpoints {
		e := &i.Endpoints[n]
		if e.Odds == 0 || e.Reason != "" {
			continue
		}
		if looked++; looked > maxWays {
			i.missing("the ways to more than %d endpoints", maxWays)

			break
		}
		way, err := node.WayTo(e.Address.Addr())
		if err != nil {
			i.Beyond = append(i.Beyond, fmt.Sprintf("%s cannot be reached: %v", e.Address, err))

			continue
		}
		if way.Local {
			e.Way = "this node itself"

			continue
		}
		turned := e.Way != ""
		e.Way = strings.TrimPrefix(e.Way+", "+textOf(way), ", ")
		if e.Client == "" && i.isHost && !i.question.From.IsValid() {
			e.Client = way.Source.String()
		} else if e.Client == "" {
			e.Client = i.question.From.String()
		}
		if way.Neighbour == "failed" || way.Neighbour == "incomplete" {
			i.Beyond = append(i.Beyond, fmt.Sprintf("%s may be unreachable: the next hop does not answer (neighbour %s on %s)", e.Address, way.Neighbour, way.Device))
		}
		for _, rule := range drops {
			if turned || !isOfFamily(rule, e.Address.Addr()) || !rule.Concerns(e.Address) {
				continue
			}
			if text := "a firewall may drop it: " + rule.String(); !slices.Contains(i.Beyond, text) {
				i.Beyond = append(i.Beyond, text)
			}
		}
	}

	return nil
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
	if back.Device != i.arrival.Name && !i.isPod() {
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

// isOfFamily reports whether a rule is in a table that packets to an address pass.
func isOfFamily(rule node.NetfilterRule, to netip.Addr) bool {
	v4Only := strings.HasPrefix(rule.Table, "nftables ip ") || strings.HasPrefix(rule.Table, "legacy iptables ")
	v6Only := strings.HasPrefix(rule.Table, "nftables ip6 ") || strings.HasPrefix(rule.Table, "legacy ip6tables ")

	return to.Is4() && !v6Only || to.Is6() && !v4Only
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
	case i.unwatched:
		detail = fmt.Sprintf("no program of Sluice is attached to %s", i.arrival.Name)
	case i.answer.NodesOwn:
		detail = fmt.Sprintf("%s is an address of this node, and a socket answers there", i.To)
	case reason == maps.ReasonPassNoFrontend:
		detail = fmt.Sprintf("%s/%s is no address of a Service", i.To, i.Protocol)
	default:
		_, detail, _ = strings.Cut(reason.String(), ": ")
	}
	separator := ": "
	if i.Outcome == Translated {
		separator = " "
	}
	i.Answer = string(i.Outcome) + separator + detail
	if len(i.Beyond) > 0 {
		i.Answer += "; something beyond Sluice may stop it"
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
	case i.Outcome == Translated:
		return "what the endpoint answers"
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
