package flows

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/pkg/explain"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// explained compares what `sluice explain` tells of a flow with what has just happened to it. It
// returns "" if all is well.
func (d *driver) explained(t *testing.T, f flow, w way, want expected, seen map[string]int) string {
	t.Helper()
	protocol, known := map[corev1.Protocol]lb.Protocol{corev1.ProtocolTCP: lb.TCP, corev1.ProtocolUDP: lb.UDP, corev1.ProtocolSCTP: lb.SCTP}[f.Protocol]
	variant := strings.Contains(w.name, "sendto") || strings.Contains(w.name, "v4-mapped")
	if !known || variant || want.kernels {
		return ""
	}
	question := explain.Question{From: f.SourceIP, To: f.dest(), Protocol: protocol}
	switch {
	case w.path.from == onNode && w.From == "":
		question.From = netip.Addr{}
	case w.path.from == inPod && !w.path.socket:
		question.Device = d.world.pods[f.SourceIP].from.Device
	}
	var is explain.Explanation
	err := d.world.node.Do(func() (err error) {
		is, err = d.explainer.Explain(t.Context(), question)

		return err
	})
	if err != nil {
		return "explain: " + err.Error()
	}
	told := outcomesOf(is)
	outcomes := slices.Clone(want.outcomes)
	if want.sticky && is.Outcome == explain.Translated {
		outcomes = outcomes[:0]
		for outcome := range seen {
			outcomes = append(outcomes, outcome)
		}
	}
	slices.Sort(outcomes)
	if !slices.Equal(told, outcomes) {
		return fmt.Sprintf("explain has %q, %v, want %v", is.Answer, told, outcomes)
	}

	return ""
}

// outcomesOf returns the outcomes that an explanation tells, as a fixture has them.
func outcomesOf(is explain.Explanation) []string {
	var outcomes []string
	switch is.Outcome {
	case explain.Refused:
		return []string{reject}
	case explain.Dropped:
		return []string{drop}
	case explain.Passed:
		return []string{is.To.String()}
	}
	for _, e := range is.Endpoints {
		if e.Odds > 0 && e.Reason == "" {
			outcomes = append(outcomes, e.Address.String())
		}
	}
	slices.Sort(outcomes)

	return outcomes
}
