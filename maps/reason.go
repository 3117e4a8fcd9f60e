package maps

import "fmt"

// Reason is the outcome of a hook for a packet or a system call, and why.
type Reason uint32

// The reasons.
const (
	ReasonNext                   = Reason(abiReasonREASON_NEXT)
	ReasonTranslated             = Reason(abiReasonREASON_TRANSLATED)
	ReasonTranslatedUnremembered = Reason(abiReasonREASON_TRANSLATED_UNREMEMBERED)
	ReasonPassProtocol           = Reason(abiReasonREASON_PASS_PROTOCOL)
	ReasonPassNoFrontend         = Reason(abiReasonREASON_PASS_NO_FRONTEND)
	ReasonPassDisabled           = Reason(abiReasonREASON_PASS_DISABLED)
	ReasonRejectNoBackend        = Reason(abiReasonREASON_REJECT_NO_BACKEND)
	ReasonRejectNoPort           = Reason(abiReasonREASON_REJECT_NO_PORT)
	ReasonDropNoLocalBackend     = Reason(abiReasonREASON_DROP_NO_LOCAL_BACKEND)
	ReasonDropSourceRange        = Reason(abiReasonREASON_DROP_SOURCE_RANGE)
	ReasonDropUnallocated        = Reason(abiReasonREASON_DROP_UNALLOCATED)
	ReasonDropBackendMissing     = Reason(abiReasonREASON_DROP_BACKEND_MISSING)
	ReasonFlow                   = Reason(abiReasonREASON_FLOW)
	ReasonFlowError              = Reason(abiReasonREASON_FLOW_ERROR)
	ReasonPassOtherTraffic       = Reason(abiReasonREASON_PASS_OTHER_TRAFFIC)
	ReasonPassNoFlow             = Reason(abiReasonREASON_PASS_NO_FLOW)
	ReasonPassFragment           = Reason(abiReasonREASON_PASS_FRAGMENT)
	ReasonPassMalformed          = Reason(abiReasonREASON_PASS_MALFORMED)
	ReasonRejectLimited          = Reason(abiReasonREASON_REJECT_LIMITED)
	ReasonDropMasqueradeAddr     = Reason(abiReasonREASON_DROP_MASQUERADE_ADDR)
	ReasonDropMasqueradePort     = Reason(abiReasonREASON_DROP_MASQUERADE_PORT)
	ReasonDropFlowTable          = Reason(abiReasonREASON_DROP_FLOW_TABLE)
	ReasonDropRedirect           = Reason(abiReasonREASON_DROP_REDIRECT)
	ReasonDropRewrite            = Reason(abiReasonREASON_DROP_REWRITE)
	ReasonDropTupleTaken         = Reason(abiReasonREASON_DROP_TUPLE_TAKEN)
	ReasonDropAbandoned          = Reason(abiReasonREASON_DROP_ABANDONED)
	ReasonRejectNoFlow           = Reason(abiReasonREASON_REJECT_NO_FLOW)
	ReasonDropNoFlow             = Reason(abiReasonREASON_DROP_NO_FLOW)
	ReasonDropSource             = Reason(abiReasonREASON_DROP_SOURCE)
	reasonCount                  = Reason(abiReasonREASON_COUNT)
)

// reasons are the label of each reason, which is its name in types.h, and a text for operators.
var reasons = [reasonCount]struct{ label, text string }{
	ReasonTranslated:             {"translated", "sent to a backend"},
	ReasonTranslatedUnremembered: {"translated_unremembered", "sent to a backend, but the socket has no room for its original destination"},
	ReasonPassProtocol:           {"pass_protocol", "passed: neither TCP nor UDP"},
	ReasonPassNoFrontend:         {"pass_no_frontend", "passed: not the address of a Service"},
	ReasonPassDisabled:           {"pass_disabled", "passed: left to a device, because the socket's pod or the Service has opted out, the Service has source ranges, the socket is behind a pod or the address is the pod's own, a socket of the node answers at the address, --udp excludes it, or it is a connect() of UDP without a usable endpoint"},
	ReasonRejectNoBackend:        {"reject_no_backend", "refused: the Service has no usable endpoint"},
	ReasonRejectNoPort:           {"reject_no_port", "refused: the ClusterIP has no such port"},
	ReasonDropNoLocalBackend:     {"drop_no_local_backend", "dropped: traffic policy Local, and no usable endpoint on this node"},
	ReasonDropSourceRange:        {"drop_source_range", "dropped: the source is not in loadBalancerSourceRanges"},
	ReasonDropUnallocated:        {"drop_unallocated", "dropped: the address is in a ServiceCIDR, but belongs to no Service"},
	ReasonDropBackendMissing:     {"drop_backend_missing", "dropped: the slot names a backend that does not exist"},
	ReasonFlow:                   {"flow", "translated: a packet of a known flow"},
	ReasonFlowError:              {"flow_error", "translated: an ICMP error about a known flow"},
	ReasonPassOtherTraffic:       {"pass_other_traffic", "passed: other traffic, neither to an address of a Service nor of a flow"},
	ReasonPassNoFlow:             {"pass_no_flow", "passed: not the first packet of a flow, and of none that is known"},
	ReasonPassFragment:           {"pass_fragment", "passed: a fragment whose first fragment was not seen"},
	ReasonPassMalformed:          {"pass_malformed", "passed: the headers are truncated, or too many"},
	ReasonRejectLimited:          {"reject_limited", "dropped: the rate limit of ICMP errors and resets is reached"},
	ReasonDropMasqueradeAddr:     {"drop_masquerade_addr", "dropped: this node has no address to masquerade with on the route to the backend"},
	ReasonDropMasqueradePort:     {"drop_masquerade_port", "dropped: no free port to masquerade with was found"},
	ReasonDropFlowTable:          {"drop_flow_table", "dropped: the flow table has no room"},
	ReasonDropRedirect:           {"drop_redirect", "dropped: an ICMP redirect that would make the client bypass this node"},
	ReasonDropRewrite:            {"drop_rewrite", "dropped: the packet could not be written"},
	ReasonDropAbandoned:          {"drop_abandoned", "dropped: a late answer of a backend that was given up, or an ICMP error about it, as another one gets the connection"},
	ReasonRejectNoFlow:           {"reject_no_flow", "refused: reset, as it is of no connection to the Service that is known, and begins none"},
	ReasonDropNoFlow:             {"drop_no_flow", "dropped: of no connection to the Service that is known, and itself a reset, an ICMP error, a later fragment, or one that only the stack could handle, which gets no answer"},
	ReasonDropSource:             {"drop_source", "dropped: its source is no client's: the address of a Service, of a group or of all hosts, unspecified, or loopback"},
	ReasonDropTupleTaken:         {"drop_tuple_taken", "dropped: a flow of a client behind another kind of device has the same addresses and ports"},
}

// Reasons returns every reason that is counted, in the order of their numbers.
func Reasons() []Reason {
	all := make([]Reason, 0, reasonCount-1)
	for r := ReasonNext + 1; r < reasonCount; r++ {
		all = append(all, r)
	}

	return all
}

// Translated reports whether a new flow with this reason has got a backend.
func (r Reason) Translated() bool {
	return r == ReasonTranslated || r == ReasonTranslatedUnremembered
}

// Refuses reports whether the client is refused: its packet or its call is rejected or dropped.
func (r Reason) Refuses() bool {
	return r >= ReasonRejectNoBackend && r <= ReasonDropBackendMissing || r >= ReasonRejectLimited && r < reasonCount
}

// Label returns the reason as a value of a metric's label, "unknown" for one of a later build.
func (r Reason) Label() string {
	if r == ReasonNext || r >= reasonCount {
		return "unknown"
	}

	return reasons[r].label
}

// String returns what happened, and why, for operators.
func (r Reason) String() string {
	if r == ReasonNext || r >= reasonCount {
		return fmt.Sprintf("reason %d", uint32(r))
	}

	return reasons[r].text
}
