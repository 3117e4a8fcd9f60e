package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/sluice-lb/sluice/pkg/remote"
	"github.com/sluice-lb/sluice/pkg/status"
)

// nodeStatus is the status of one node, or why there is none.
type nodeStatus struct {
	node string
	status.Status
	failed string
}

// drawClusterStatus prints a table with the status of each node, what is wrong on them, and in what they differ.
func drawClusterStatus(w io.Writer, answers []remote.Answer, now time.Time) {
	var all, known []nodeStatus
	for _, a := range answers {
		s := nodeStatus{node: a.Node}
		if a.Err != nil {
			s.failed = "NO ANSWER: " + a.Err.Error()
		} else if err := json.Unmarshal([]byte(a.Out), &s.Status); err != nil {
			s.failed = strings.TrimSpace(a.Errors)
		} else {
			known = append(known, s)
		}
		all = append(all, s)
	}
	t := &table{tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)}
	t.row("NODE", "AGENT", "UP", "SERVICES", "HOOKS", "DEVICES", "FLOWS", "STATE")
	for _, s := range all {
		if s.failed != "" {
			t.row(s.node, "", "", "", "", "", "", s.failed)
			continue
		}
		agent, up, services := "not running", "", ""
		if s.Running {
			agent, up, services = s.Version, now.Sub(s.Started).Round(time.Second).String(), strconv.Itoa(s.Services)
		}
		unattached := func(d status.Device) bool { return d.Attached == "" }
		t.row(s.node, agent, up, services, strconv.Itoa(len(s.Hooks)), strconv.Itoa(len(slices.DeleteFunc(slices.Clone(s.Devices), unattached))),
			fmt.Sprintf("%d %%", s.Flows.Flows.Percent()), s.state())
	}
	t.note("")
	drawWrong(t, known, len(all))
	for _, f := range []struct {
		name string
		of   func(nodeStatus) string
	}{
		{"version", func(s nodeStatus) string { return s.Version }},
		{"Services", func(s nodeStatus) string { return strconv.Itoa(s.Services) }},
		{"cgroup root", func(s nodeStatus) string { return s.CgroupRoot }},
		{"pins", func(s nodeStatus) string { return s.BPFRoot }},
		{"hooks", func(s nodeStatus) string { return strconv.Itoa(len(s.Hooks)) }},
		{"flow table", func(s nodeStatus) string { return fmt.Sprintf("%d entries", s.Flows.Flows.Capacity) }},
		{"forwarding", func(s nodeStatus) string {
			if s.ThroughStack != "" {
				return "stack, because " + s.ThroughStack
			}
			return "past the stack"
		}},
	} {
		if text := differences(known, f.of); text != "" {
			t.note("differs: " + f.name + ": " + text)
		}
	}
}

// drawWrong prints what is wrong, once for all nodes on which it is.
func drawWrong(t *table, nodes []nodeStatus, all int) {
	var order []string
	having := make(map[string][]string)
	for _, s := range nodes {
		for _, wrong := range s.wrong() {
			if len(having[wrong]) == 0 {
				order = append(order, wrong)
			}
			having[wrong] = append(having[wrong], s.node)
		}
	}
	for _, wrong := range order {
		t.note(remote.Names(having[wrong], all) + ": " + wrong)
	}
}

// differences returns the values that nodes with an agent have, if they are not all the same.
func differences(nodes []nodeStatus, of func(nodeStatus) string) string {
	var values []string
	having := make(map[string][]string)
	for _, s := range nodes {
		if !s.Running {
			continue
		}
		value := of(s)
		if len(having[value]) == 0 {
			values = append(values, value)
		}
		having[value] = append(having[value], s.node)
	}
	if len(values) < 2 {
		return ""
	}
	// The exception is last.
	slices.SortStableFunc(values, func(a, b string) int { return len(having[b]) - len(having[a]) })
	for i, value := range values {
		values[i] = value + " on " + remote.Names(having[value], len(nodes))
	}

	return strings.Join(values, "; ")
}

// state is one word for a table.
func (s nodeStatus) state() string {
	switch {
	case !s.Running:
		return "NO AGENT: what is programmed stays in force"
	case !s.Synced:
		return "waiting for Services"
	case !s.Well():
		return "NOT WELL, see below"
	default:
		return "ok"
	}
}

// wrong returns what keeps a node from being well, and what was left out there.
func (s nodeStatus) wrong() (texts []string) {
	add := func(text string) {
		if text != "" {
			texts = append(texts, text)
		}
	}
	add(s.Effective)
	add(s.Unpinned)
	if s.NotCovered != "" {
		add("not covered: " + s.NotCovered)
	}
	for _, hook := range s.Hooks {
		if hook.Problem != "" {
			add("hook " + hook.Name + ": " + hook.Problem)
		}
	}
	for _, device := range s.Devices {
		if device.Problem != "" {
			add("device " + device.Name + ": " + device.Problem)
		}
	}
	add(s.Flows.Emergency)
	add(s.Flows.Flood)
	for _, e := range s.Errors {
		add("Service " + e.Service + ": " + e.Error)
	}

	return texts
}
