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
	reasonCount                  = Reason(abiReasonREASON_COUNT)
)

// reasonTexts are for operators: what happened, and why.
var reasonTexts = [reasonCount]string{
	ReasonNext:                   "not decided",
	ReasonTranslated:             "sent to a backend",
	ReasonTranslatedUnremembered: "sent to a backend, but the socket has no room for its original destination",
	ReasonPassProtocol:           "passed: neither TCP nor UDP",
	ReasonPassNoFrontend:         "passed: not the address of a Service",
	ReasonPassDisabled:           "passed: UDP is not translated at the socket",
	ReasonRejectNoBackend:        "refused: the Service has no usable endpoint",
	ReasonRejectNoPort:           "refused: the ClusterIP has no such port",
	ReasonDropNoLocalBackend:     "dropped: traffic policy Local, and no usable endpoint on this node",
	ReasonDropSourceRange:        "dropped: the source is not in loadBalancerSourceRanges",
	ReasonDropUnallocated:        "dropped: the address is in a ServiceCIDR, but belongs to no Service",
	ReasonDropBackendMissing:     "dropped: the slot names a backend that does not exist",
	ReasonFlow:                   "translated: a packet of a known flow",
	ReasonFlowError:              "translated: an ICMP error about a known flow",
	ReasonPassOtherTraffic:       "passed: other traffic, neither to an address of a Service nor of a flow",
	ReasonPassNoFlow:             "passed: not the first packet of a flow, and of none that is known",
	ReasonPassFragment:           "passed: a fragment whose first fragment was not seen",
	ReasonPassMalformed:          "passed: the headers are truncated, or too many",
	ReasonRejectLimited:          "dropped: the rate limit of ICMP errors to the client is reached",
	ReasonDropMasqueradeAddr:     "dropped: this node has no address to masquerade with on the route to the backend",
	ReasonDropMasqueradePort:     "dropped: no free port to masquerade with was found",
	ReasonDropFlowTable:          "dropped: the flow table has no room, or another client has the flow",
	ReasonDropRedirect:           "dropped: an ICMP redirect that would make the client bypass this node",
	ReasonDropRewrite:            "dropped: the packet could not be written",
}

// Reasons returns every reason that is counted, in the order of their numbers.
func Reasons() []Reason {
	all := make([]Reason, 0, reasonCount-1)
	for r := ReasonNext + 1; r < reasonCount; r++ {
		all = append(all, r)
	}

	return all
}

func (r Reason) String() string {
	if r >= reasonCount {
		return fmt.Sprintf("reason %d", uint32(r))
	}

	return reasonTexts[r]
}
