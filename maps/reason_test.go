package maps

import (
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"

	"github.com/sluice-lb/sluice/test/lab"
)

// The label of a reason is its name in types.h, and its text starts with what its class does:
// bpf/lib/reason.h has the classes.
func TestReasons(t *testing.T) {
	var enum *btf.Enum
	lab.Must(t, mustLoadAbi(t).Types.TypeByName("reason", &enum))
	texts := make(map[string]Reason)
	for _, value := range enum.Values {
		r, label := Reason(value.Value), strings.ToLower(strings.TrimPrefix(value.Name, "REASON_"))
		if r == ReasonNext || r == reasonCount {
			label = "unknown"
		} else if other, ok := texts[r.String()]; ok {
			t.Errorf("reasons %d and %d have the text %q", r, other, r)
		}
		texts[r.String()] = r
		if r.Label() != label {
			t.Errorf("reason %d has the label %q, want %q", r, r.Label(), label)
		}
		class, _, _ := strings.Cut(label, "_")
		want := map[string]string{"pass": "passed: ", "reject": "refused: ", "drop": "dropped: ", "flow": "translated: ", "translated": "sent to a backend", "unknown": "reason "}[class]
		if r == ReasonRejectLimited {
			want = "dropped: " // the client gets no error
		}
		if !strings.HasPrefix(r.String(), want) || want == "" {
			t.Errorf("%s has the text %q, want one that starts with %q", label, r, want)
		}
		if refuses := class == "reject" || class == "drop"; r.Refuses() != refuses {
			t.Errorf("%s: refuses is %v", label, r.Refuses())
		}
		// is_drop in bpf/lib/reason.h
		drops := r >= ReasonDropNoLocalBackend && r <= ReasonDropBackendMissing ||
			r >= ReasonRejectLimited && r < reasonCount && r != ReasonRejectNoFlow
		if drops != strings.HasPrefix(r.String(), "dropped: ") {
			t.Errorf("%s: programs drop it: %v; its text is %q", label, drops, r)
		}
	}
	if len(enum.Values) != len(Reasons())+2 {
		t.Errorf("%d reasons, want %d", len(Reasons()), len(enum.Values)-2)
	}
	if got := Reason(999).Label(); got != "unknown" {
		t.Errorf("a reason of a later build has the label %q", got)
	}
}

// An array that was made by a build with fewer reasons has no counts of the others.
func TestReasonCountsOfAnEarlierBuild(t *testing.T) {
	root := lab.MustBPFRoot(t)
	last := reasonCount - 1
	p, err := Create(root, Options{Capacities: map[string]uint32{NameReasons: uint32(last), NameFlows: 1024}})
	lab.Must(t, err)
	defer p.Close()
	counts, err := p.ReasonCounts()
	if _, there := counts[last]; err != nil || there || len(counts) != len(Reasons())-1 {
		t.Errorf("%d counts, error %v", len(counts), err)
	}
}
