package agent

import (
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/status"
	"github.com/sluice-lb/sluice/test/lab"
)

// operatePage has the table of what is judged, between the comments that follow.
const operatePage = "../../docs/operate.md"

// judged are the kinds of what a status shows, each with the field that has it, how it is there, whether the status is not well
// by it, and whether /readyz fails: if unready is set, by what an agent in that state answers.
var judged = []struct {
	shows   string
	field   string
	show    func(*status.Status)
	trouble bool
	unready func(a *agent) (hooks, devices []string)
	answers string // of /readyz, where the agent does not make its answer, or not at once
}{
	{shows: "no agent that runs", field: "Running", show: func(s *status.Status) { s.Running = false }, trouble: true, answers: "yes"},
	{shows: "an agent that does not answer", field: "Hung", show: func(s *status.Status) { s.Running, s.Hung = false, "slow" }, trouble: true},
	{shows: "Services and endpoints that are not all known and programmed yet", field: "Synced", show: func(s *status.Status) { s.Synced = false }, trouble: true,
		unready: func(a *agent) (hooks, devices []string) { a.known.Store(false); return nil, nil }},
	{shows: "hooks that are not effective", field: "Effective", show: func(s *status.Status) { s.Effective = "no" }, trouble: true,
		unready: func(*agent) (hooks, devices []string) { return []string{"hooks are not effective: no"}, nil }},
	{shows: "a hook whose program is not attached", field: "Hooks", show: func(s *status.Status) { s.Hooks = []datapath.HookState{{Name: "connect4", Problem: "not attached"}} }, trouble: true,
		answers: "when the next check finds that hooks are not effective"},
	{shows: "pins that are missing", field: "Unpinned", show: func(s *status.Status) { s.Unpinned = "3 pins are missing" }, trouble: true,
		unready: func(*agent) (hooks, devices []string) { return []string{"3 pins are missing"}, nil }},
	{shows: "programs that cannot be attached to a device, or that packets do not reach there", field: "Devices", show: ofDevice("unreached"), trouble: true,
		unready: func(*agent) (hooks, devices []string) { return nil, []string{"device eth0: unreached"} }},
	{shows: "a device that is not attached for another reason, or has programs of an earlier agent", field: "Devices", show: ofDevice("not attached"), trouble: true},
	{shows: "programs of another instance of Sluice", field: "Others", show: func(s *status.Status) { s.Others = []datapath.Other{{BPFRoot: "/sys/fs/bpf/other"}} }, trouble: true},
	{shows: "what could not be read", field: "Unread", show: func(s *status.Status) { s.Unread = []string{"maps: lost"} }, trouble: true},
	{shows: "a table of flows that is too small", field: "Flows", show: func(s *status.Status) { s.Flows = flow.Status{Emergency: "full"} }, trouble: true},
	{shows: "files near their limit", field: "Files", show: func(s *status.Status) { s.Files = datapath.Files{Open: 1000, Limit: 1024} }, trouble: true},
	{shows: "an API server that is silent", field: "Silence", show: func(s *status.Status) { s.Silence = map[string]time.Duration{"services": time.Hour} }, trouble: true},
	{shows: "Services that could not be programmed in full", field: "Errors", show: func(s *status.Status) { s.Errors = []status.ServiceError{{Service: "ns/web", Error: "no room"}} }, trouble: true},
	{shows: "a configuration by which connections fail", field: "Problems", show: ofConfiguration(lb.Failing), trouble: true, unready: reporting(lb.Failing)},
	{shows: "another configuration that matches nothing", field: "Problems", show: ofConfiguration(lb.Degraded), trouble: true},
	{shows: "parts of objects that are left out", field: "Problems", show: ofConfiguration(lb.LeftOut)},
	{shows: "ports of masqueraded connections that are few, or that sockets get as well", field: "PortsProblem", show: func(s *status.Status) { s.PortsProblem = "few" }},
	{shows: "a trial of the hooks that took too long", field: "Untried", show: func(s *status.Status) { s.Untried = "slow" }},
	{shows: "processes whose sockets are not covered", field: "NotCovered", show: func(s *status.Status) { s.NotCovered = "others" }},
	{shows: "features that the kernel lacks", field: "Missing", show: func(s *status.Status) { s.Missing = []string{"tcx"} }},
	{shows: "what no program translates", field: "Limits", show: func(s *status.Status) { s.Limits = []string{"SCTP of the node"} }},
	{shows: "parts of the configuration that are not known", field: "Ignored", show: func(s *status.Status) { s.Ignored = []string{"nft"} }},
	{shows: "packets to other nodes that pass the stack", field: "ThroughStack", show: func(s *status.Status) { s.ThroughStack = "a firewall" }},
	{shows: "pods that have opted out", field: "OptedOut", show: func(s *status.Status) { s.OptedOut = []status.OptedOutPod{{Pod: "ns/a", NoCgroup: true}} }},
}

// facts are the fields of a status by which nothing can be wrong.
var facts = strings.Fields("Version Node Source Started LastRan CgroupRoot BPFRoot MasqueradePorts Services Maps MapFolders Counts Writes")

func ofDevice(problem string) func(*status.Status) {
	return func(s *status.Status) { s.Devices = []datapath.DeviceState{{Name: "eth0", Problem: problem}} }
}

func ofConfiguration(effect lb.Effect) func(*status.Status) {
	return func(s *status.Status) { s.Problems = []lb.Problem{{Object: "x", Field: "f", Effect: effect}} }
}

func reporting(effect lb.Effect) func(*agent) (hooks, devices []string) {
	return func(a *agent) (hooks, devices []string) {
		a.model.report("x", []lb.Problem{{Object: "x", Field: "f", Effect: effect}})

		return nil, nil
	}
}

// Each field of a status is a fact, or has cases that say whether the status is not well by it and whether /readyz fails, in the
// words of the documentation: neither changes without the other.
func TestReadiness(t *testing.T) {
	word := map[bool]string{true: "yes", false: "-"}
	covered := slices.Clone(facts)
	table := []string{"| `sluice status` shows | is not well | `/readyz` fails |", "|---|---|---|"}
	for _, test := range judged {
		covered = append(covered, test.field)
		s := status.Status{Running: true, Synced: true}
		if test.show(&s); s.Well() == test.trouble {
			t.Errorf("%s: the status is well: %v; its troubles are %q", test.shows, s.Well(), s.Troubles())
		}
		scene := newImpairedScene(t)
		scene.known.Store(true)
		var hooks, devices []string
		if test.unready != nil {
			hooks, devices = test.unready(scene.agent)
		} else {
			scene.model.report("x", s.Problems)
		}
		reasons := scene.unready(hooks, devices)
		if (len(reasons) > 0) != (test.unready != nil) {
			t.Errorf("%s: it is not ready because of %q, want such a reason: %v", test.shows, reasons, test.unready != nil)
		}
		if len(reasons) > 0 && s.Well() {
			t.Errorf("%s: /readyz fails, and the status is well", test.shows)
		}
		answers := test.answers
		if answers == "" {
			answers = word[len(reasons) > 0]
		}
		table = append(table, fmt.Sprintf("| %s | %s | %s |", test.shows, word[!s.Well()], answers))
	}
	for _, field := range reflect.VisibleFields(reflect.TypeFor[status.Status]()) {
		if !slices.Contains(covered, field.Name) {
			t.Errorf("field %s of a status: is a node not well by it, and does /readyz fail?", field.Name)
		}
	}
	page, err := os.ReadFile(operatePage)
	lab.Must(t, err)
	_, rest, _ := strings.Cut(string(page), "<!-- the table that TestReadiness compares -->\n")
	documented, _, _ := strings.Cut(rest, "\n<!-- its end -->")
	if diff := cmp.Diff(table, strings.Split(documented, "\n")); diff != "" {
		t.Errorf("%s (-want +got):\n%s", operatePage, diff)
	}
}
