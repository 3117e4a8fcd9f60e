package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/pkg/datapath"
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
	t := newTable(w)
	t.row("NODE", "AGENT", "UP", "SERVICES", "HOOKS", "DEVICES", "FLOWS", "STATE")
	for _, s := range all {
		if s.failed != "" {
			t.row(s.node, "", "", "", "", "", "", s.failed)
			continue
		}
		agent, up, services := "not running", "", ""
		if s.Hung != "" {
			agent = "hangs"
		}
		if s.Running {
			agent, up, services = s.Version, now.Sub(s.Started).Round(time.Second).String(), strconv.Itoa(s.Services)
		}
		unattached := func(d datapath.DeviceState) bool { return d.Attached == "" }
		t.row(s.node, agent, up, services, strconv.Itoa(len(s.Hooks)), strconv.Itoa(len(slices.DeleteFunc(slices.Clone(s.Devices), unattached))),
			fmt.Sprintf("%d %%", s.Flows.Flows.Percent()), s.state(now))
	}
	t.note("")
	// What is wrong is printed once for all nodes on which it is.
	wrongs, on := having(known, nodeStatus.wrong)
	for _, wrong := range wrongs {
		t.note(remote.Names(on[wrong], len(all)) + ": " + wrong)
	}
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

// having returns texts of nodes, in the order in which they first appear, and which nodes have each.
func having(nodes []nodeStatus, of func(nodeStatus) []string) (texts []string, names map[string][]string) {
	names = make(map[string][]string)
	for _, s := range nodes {
		for _, text := range of(s) {
			if len(names[text]) == 0 {
				texts = append(texts, text)
			}
			names[text] = append(names[text], s.node)
		}
	}

	return texts, names
}

// differences returns the values that nodes with an agent have, if they are not all the same.
func differences(nodes []nodeStatus, of func(nodeStatus) string) string {
	values, names := having(nodes, func(s nodeStatus) []string {
		if !s.Running {
			return nil
		}

		return []string{of(s)}
	})
	if len(values) < 2 {
		return ""
	}
	// The exception is last.
	slices.SortStableFunc(values, func(a, b string) int { return len(names[b]) - len(names[a]) })
	for i, value := range values {
		values[i] = value + " on " + remote.Names(names[value], len(nodes))
	}

	return strings.Join(values, "; ")
}

// state is one word for a table.
func (s nodeStatus) state(now time.Time) string {
	switch {
	case s.Hung != "":
		return "THE AGENT DOES NOT ANSWER: what is programmed stays in force"
	case !s.Running && s.NothingProgrammed():
		return "no agent, and nothing is programmed"
	case !s.Running:
		return "NO AGENT: " + status.WithoutAgent(s.LastRan, now)
	case !s.Synced:
		return "waiting for Services"
	case !s.Well():
		return "NOT WELL, see below"
	default:
		return "ok"
	}
}

// wrong returns what keeps a node from being well, and what else an operator has to know of it.
func (s nodeStatus) wrong() []string {
	texts := s.Troubles()
	if s.NotCovered != "" {
		texts = append(texts, "not covered: "+s.NotCovered)
	}
	for _, limit := range s.Limits {
		texts = append(texts, "not translated: "+limit)
	}
	if s.Flows.Flood != "" {
		texts = append(texts, s.Flows.Flood)
	}

	return texts
}
