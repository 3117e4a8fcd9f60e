package decision

import (
	"fmt"
	"slices"
	"testing"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/heavy"
)

// Heavy Services are decided one at a time, in the order in which they changed. One that changes
// meanwhile is decided again; a decision about one that goes, or becomes light, does not count.
func TestHeavyInTurn(t *testing.T) {
	h := &Heavy{}
	snapshot := func(name string, externalIPs int) lb.Snapshot {
		svc := heavy.New(1, 0, externalIPs, 2).Service
		svc.Name.Name = name
		state := lb.NewState(lb.Node{})
		state.SetService(svc)
		s, _ := state.Snapshot(svc.Name)

		return s
	}
	mustAdd := func(name string, externalIPs int, want bool) {
		t.Helper()
		if h.Add(snapshot(name, externalIPs), 0) != want {
			t.Errorf("%s is heavy: %t, want %t", name, !want, want)
		}
	}
	mustBegin := func(want string) {
		t.Helper()
		if name, ok := h.Begin(); ok != (want != "") || name.Name != want {
			t.Errorf("%q is begun: %t, want %q", name.Name, ok, want)
		}
	}
	mustEnd := func(want bool) {
		t.Helper()
		if h.End() != want {
			t.Errorf("the decision counts: %t, want %t", !want, want)
		}
	}
	mustBegin("")
	for range 2 {
		mustAdd("a", HeavySize, true)
		mustAdd("b", HeavySize, true)
	}
	mustAdd("light", 2, false)
	mustBegin("a")
	mustBegin("")
	mustAdd("a", HeavySize, true)
	mustEnd(true)
	mustBegin("b")
	mustAdd("b", 2, false)
	if h.Has(snapshot("b", 2).Service.Name) || !h.Has(snapshot("a", 2).Service.Name) {
		t.Error("a Service waits that is not heavy any more, or one does not wait that has changed")
	}
	mustEnd(false)
	mustBegin("a")
	h.Forget(snapshot("a", 2).Service.Name)
	mustAdd("a", HeavySize, true)
	mustEnd(false)
	mustBegin("a")
	mustEnd(true)
	mustBegin("")
	if (*Heavy)(nil).Add(snapshot("a", HeavySize), 0) {
		t.Error("a Service is heavy where none is")
	}
}

// A heavy Service waits for one of each other namespace, however many these have.
func TestHeavyByNamespace(t *testing.T) {
	h := &Heavy{}
	add := func(namespace, name string) {
		svc := heavy.New(1, 0, HeavySize, 2).Service
		svc.Name = lb.ServiceName{Namespace: namespace, Name: name}
		state := lb.NewState(lb.Node{})
		state.SetService(svc)
		s, _ := state.Snapshot(svc.Name)
		h.Add(s, 0)
	}
	for i := range 10 {
		add("greedy", fmt.Sprint(i))
	}
	add("other", "web")
	var got []string
	for range 3 {
		name, _ := h.Begin()
		got = append(got, name.Namespace)
		h.End()
	}
	if want := []string{"greedy", "other", "greedy"}; !slices.Equal(got, want) {
		t.Errorf("decided are those of %v, want %v", got, want)
	}
}
