package metrics

import "github.com/sluice-lb/sluice/maps"

// reasonLabels are the values of the label reason: the names of [maps.Reason] in the
// form that queries use.
var reasonLabels = map[maps.Reason]string{
	maps.ReasonTranslated:             "translated",
	maps.ReasonTranslatedUnremembered: "translated_unremembered",
	maps.ReasonPassProtocol:           "pass_protocol",
	maps.ReasonPassDisabled:           "pass_disabled",
	maps.ReasonPassNoFrontend:         "pass_no_frontend",
	maps.ReasonRejectNoBackend:        "reject_no_backend",
	maps.ReasonRejectNoPort:           "reject_no_port",
	maps.ReasonDropNoLocalBackend:     "drop_no_local_backend",
	maps.ReasonDropSourceRange:        "drop_source_range",
	maps.ReasonDropUnallocated:        "drop_unallocated",
	maps.ReasonDropBackendMissing:     "drop_backend_missing",
	maps.ReasonFlow:                   "flow",
	maps.ReasonFlowError:              "flow_error",
	maps.ReasonPassOtherTraffic:       "pass_other_traffic",
	maps.ReasonPassNoFlow:             "pass_no_flow",
	maps.ReasonPassFragment:           "pass_fragment",
	maps.ReasonPassMalformed:          "pass_malformed",
	maps.ReasonRejectLimited:          "reject_limited",
	maps.ReasonDropMasqueradeAddr:     "drop_masquerade_addr",
	maps.ReasonDropMasqueradePort:     "drop_masquerade_port",
	maps.ReasonDropFlowTable:          "drop_flow_table",
	maps.ReasonDropRedirect:           "drop_redirect",
	maps.ReasonDropRewrite:            "drop_rewrite",
}

// reasonLabel returns the label of a reason, "unknown" for one of a newer
// datapath.
func reasonLabel(r maps.Reason) string {
	if label, ok := reasonLabels[r]; ok {
		return label
	}

	return "unknown"
}

// translated reports whether a new flow with this reason has got a backend.
func translated(r maps.Reason) bool {
	return r == maps.ReasonTranslated || r == maps.ReasonTranslatedUnremembered
}
