package remote

import (
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
)

// Join writes the answers of a verb as one text, of nodes of which so many were asked. Answers that are one table each,
// with the same columns, become one table with a column of nodes, in which rows that several nodes have appear once.
// Other answers follow each other, each below the names of the nodes that gave it. Nodes that did not answer come last.
func Join(w io.Writer, answers []Answer, asked int) error {
	var answered, silent []Answer
	for _, a := range answers {
		if a.Err != nil {
			silent = append(silent, a)
		} else {
			answered = append(answered, a)
		}
	}
	if rows, nodes := rowsOf(answered); rows != nil {
		table := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
		for i, row := range rows {
			node := "SEEN ON" // tables of backends have a column NODE
			if i > 0 {
				node = Names(nodes[row], asked)
			}
			fmt.Fprintf(table, "%s\t%s\n", node, row)
		}
		if err := table.Flush(); err != nil {
			return err
		}
	} else {
		for _, same := range group(answered, func(a Answer) string { return a.Out }) {
			if same[0].Out != "" { // it failed, and printed why on the other output
				fmt.Fprintf(w, "== %s\n%s", names(same, asked), same[0].Out)
			}
		}
	}
	for _, same := range group(silent, func(a Answer) string { return a.Err.Error() }) {
		if _, err := fmt.Fprintf(w, "%s: NO ANSWER: %v\n", names(same, asked), same[0].Err); err != nil {
			return err
		}
	}

	return nil
}

// JoinErrors writes what verbs printed on their second output, each line once, with the nodes that printed it. So many
// nodes were asked.
func JoinErrors(w io.Writer, answers []Answer, asked int) {
	printed := slices.DeleteFunc(slices.Clone(answers), func(a Answer) bool { return strings.TrimSpace(a.Errors) == "" })
	for _, same := range group(printed, func(a Answer) string { return a.Errors }) {
		for line := range strings.Lines(strings.TrimSpace(same[0].Errors)) {
			fmt.Fprintf(w, "%s: %s\n", names(same, asked), strings.TrimSpace(line))
		}
	}
}

// NodeAnswer is the answer of one node in the formats json and yaml.
type NodeAnswer struct {
	Node string `json:"node"`
	// Answer is what the verb prints with -o json.
	Answer json.RawMessage `json:"answer,omitempty"`
	// ExitCode is that of the verb. Error is what it printed if it failed, or why there is no answer.
	ExitCode int    `json:"exitCode"`
	Error    string `json:"error,omitempty"`
}

// Decode returns the answers of a verb that ran with -o json.
func Decode(answers []Answer) []NodeAnswer {
	decoded := make([]NodeAnswer, 0, len(answers))
	for _, a := range answers {
		d := NodeAnswer{Node: a.Node, ExitCode: a.Code, Error: strings.TrimSpace(a.Errors)}
		switch {
		case a.Err != nil:
			d.Error = a.Err.Error()
		case json.Valid([]byte(a.Out)):
			d.Answer = json.RawMessage(a.Out)
		case a.Code == 0:
			d.ExitCode, d.Error = CodeNoAnswer, "the answer is not JSON"
		}
		decoded = append(decoded, d)
	}

	return decoded
}

// Code returns the exit code for answers: the highest, so that a node without an answer is not overlooked.
func Code(answers []Answer) int {
	code := 0
	for _, a := range answers {
		code = max(code, a.Code)
	}

	return code
}

// group returns answers with the same key together, in the order of the first of each.
func group(answers []Answer, key func(Answer) string) [][]Answer {
	var groups [][]Answer
	index := make(map[string]int)
	for _, a := range answers {
		i, ok := index[key(a)]
		if !ok {
			i = len(groups)
			index[key(a)] = i
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], a)
	}

	return groups
}

func names(answers []Answer, all int) string {
	var list []string
	for _, a := range answers {
		list = append(list, a.Node)
	}

	return Names(list, all)
}

// spelledOut is how many nodes a text names before it counts.
const spelledOut = 4

// Names returns the names of nodes in a text, or "all N" if they are all there are.
func Names(nodes []string, all int) string {
	switch {
	case len(nodes) == all && all > 1:
		return fmt.Sprintf("all %d", all)
	case len(nodes) > spelledOut:
		return fmt.Sprintf("%d nodes: %s …", len(nodes), strings.Join(nodes[:spelledOut-1], ", "))
	default:
		return strings.Join(nodes, ", ")
	}
}

var (
	// The tables of all verbs have three spaces between columns, and no cell that is empty.
	betweenCells = regexp.MustCompile(` {3,}`)
	headerCells  = regexp.MustCompile(`^[A-Z][A-Z0-9 /%-]*(\t[A-Z][A-Z0-9 /%-]*)*$`)
)

// rowsOf returns the rows of answers if each of them is one table, with the same header, and which nodes have each. The
// first is the header; they are as the nodes print them, but with one tab between cells. A row that only some nodes have
// is behind the one that is before it there.
func rowsOf(answers []Answer) (rows []string, nodes map[string][]string) {
	nodes = make(map[string][]string)
	for _, a := range answers {
		seen := make(map[string]bool) // a node may print the same row twice
		before, at := "", 0           // the row before this one, and where it is if that is known
		for i, line := range strings.Split(strings.TrimRight(a.Out, "\n"), "\n") {
			row := betweenCells.ReplaceAllString(strings.TrimRight(line, " "), "\t")
			header := row // of the first table
			if len(rows) > 0 {
				header = rows[0]
			}
			if i == 0 && (!headerCells.MatchString(row) || row != header) || strings.Count(row, "\t") != strings.Count(header, "\t") {
				return nil, nil
			}
			if len(nodes[row]) == 0 {
				if at == 0 {
					at = slices.Index(rows, before) + 1
				}
				rows = slices.Insert(rows, at, row)
				at++
			} else {
				at = 0
			}
			before = row
			if !seen[row] {
				seen[row] = true
				nodes[row] = append(nodes[row], a.Node)
			}
		}
	}

	return rows, nodes
}
