package remote

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
)

func TestJoin(t *testing.T) {
	refused := errors.New("refused")
	for _, test := range []struct {
		name    string
		answers []Answer
		want    string
	}{
		{
			"rows of all nodes, and of some behind the row that is before them there",
			[]Answer{
				{Node: "a", Out: "SERVICE   AGE\nx         1s\ny         2 s\nz         3s\n"},
				{Node: "b", Out: "SERVICE   AGE\nx         1s\ny         9s\nz         3s\n"},
			},
			"SEEN ON   SERVICE   AGE\nall 2     x         1s\nb         y         9s\na         y         2 s\nall 2     z         3s\n",
		},
		{
			"a row that a node has twice",
			[]Answer{{Node: "a", Out: "SERVICE   AGE\nx         1s\nx         1s\n"}},
			"SEEN ON   SERVICE   AGE\na         x         1s\n",
		},
		{
			"other columns: one below the other",
			[]Answer{{Node: "a", Out: "SERVICE   AGE\nx         1s\n"}, {Node: "b", Out: "SERVICE   IDLE\nx         1s\n"}},
			"== a\nSERVICE   AGE\nx         1s\n== b\nSERVICE   IDLE\nx         1s\n",
		},
		{
			"not a table",
			[]Answer{{Node: "a", Out: "well\n"}, {Node: "b", Out: "not well\n"}, {Node: "c", Out: "well\n"}},
			"== a, c\nwell\n== b\nnot well\n",
		},
		{
			"a table and more: not a table",
			[]Answer{{Node: "a", Out: "MAP   ENTRIES\nx     1\n\nCOUNT\n1\n"}},
			"== a\nMAP   ENTRIES\nx     1\n\nCOUNT\n1\n",
		},
		{
			"nodes without an answer",
			[]Answer{{Node: "a", Code: 2, Err: refused}, {Node: "b", Out: "well\n"}, {Node: "c", Code: 2, Err: refused}},
			"== b\nwell\na, c: NO ANSWER: refused\n",
		},
		{
			"many nodes",
			[]Answer{{Node: "a", Out: "x\n"}, {Node: "b", Out: "x\n"}, {Node: "c", Out: "x\n"}, {Node: "d", Out: "x\n"}, {Node: "e", Out: "x\n"}, {Node: "f", Out: "y\n"}},
			"== 5 nodes: a, b, c …\nx\n== f\ny\n",
		},
		{"a verb that failed and printed nothing", []Answer{{Node: "a", Code: 1, Errors: "no such Service"}}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			var out strings.Builder
			if err := Join(&out, test.answers, len(test.answers)); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, out.String()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestCodeIsTheHighest(t *testing.T) {
	if got := Code([]Answer{{Code: 0}, {Code: CodeNoAnswer}, {Code: 1}}); got != CodeNoAnswer {
		t.Errorf("the code is %d, want %d", got, CodeNoAnswer)
	}
}

func TestErrorsNameTheirNodes(t *testing.T) {
	var out strings.Builder
	JoinErrors(&out, []Answer{{Node: "a", Errors: "no agent\n\n"}, {Node: "b"}, {Node: "c", Errors: "no agent\n\n"}}, 3)
	if got, want := out.String(), "a, c: no agent\n"; got != want {
		t.Errorf("it is %q, want %q", got, want)
	}
}

func TestDecode(t *testing.T) {
	got := Decode([]Answer{
		{Node: "a", Out: "{}"},
		{Node: "b", Code: 1, Errors: "no agent\n"},
		{Node: "c", Code: CodeNoAnswer, Err: errors.New("refused")},
		{Node: "d", Out: "text"},
	})
	want := []NodeAnswer{
		{Node: "a", Answer: []byte("{}")},
		{Node: "b", ExitCode: 1, Error: "no agent"},
		{Node: "c", ExitCode: CodeNoAnswer, Error: "refused"},
		{Node: "d", ExitCode: CodeNoAnswer, Error: "the answer is not JSON"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// Outputs come in any pieces, of several nodes at the same time.
func TestLines(t *testing.T) {
	var out strings.Builder
	lines := NewLines(&out, func(node, line string) string { return fmt.Sprintf("%-4s   %s", node, line) })
	a, b := lines.Of("a"), lines.Of("b")
	for _, piece := range []struct {
		node string
		text string
	}{{"a", "TIME   WH"}, {"b", "TIME    WHAT\n1 "}, {"a", "AT\n"}, {"a", "2      x\n3      y\n"}, {"b", "     z\n"}, {"a", "TIME   WHAT\nno end"}} {
		to := a
		if piece.node == "b" {
			to = b
		}
		if n, err := to.Write([]byte(piece.text)); n != len(piece.text) || err != nil {
			t.Fatal(n, err)
		}
	}
	for range 2 { // closing again adds nothing
		if err := errors.Join(a.Close(), b.Close()); err != nil {
			t.Fatal(err)
		}
	}
	want := "NODE   TIME    WHAT\na      2      x\na      3      y\nb      1      z\na      TIME   WHAT\na      no end\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// Verbs look where the agent of the node does, and the doctor at what it does.
func TestAgentFlags(t *testing.T) {
	node := Node{"node-1", corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{
		{Name: "other", Args: []string{"--socket=/other"}},
		{Name: container, Args: []string{"agent", "--unknown", "--socket", "/run/x", "--dry-run", "--bpf-root=/bpf", "-v", "2", "--hostname-override=$(NODE_NAME)"}},
	}}}}
	if diff := cmp.Diff([]string{"--socket=/run/x", "--bpf-root=/bpf"}, node.places()); diff != "" {
		t.Errorf("places (-want +got):\n%s", diff)
	}
	set := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	set.Bool("dry-run", false, "")
	set.IntP("v", "v", 0, "")
	set.String("hostname-override", "", "")
	if diff := cmp.Diff([]string{"--dry-run=true", "--v=2", "--hostname-override=node-1"}, node.AgentFlags(set)); diff != "" {
		t.Errorf("of the set (-want +got):\n%s", diff)
	}
}

func TestKubeletsAreNamed(t *testing.T) {
	_, err := codeOf(errors.New(`Internal error occurred: error sending request: Post "https://10.0.0.1:10250/exec/kube-system/x/sluice?command=sluice": dial tcp 10.0.0.1:10250: i/o timeout`))
	if want := "the kubelet at 10.0.0.1:10250: dial tcp 10.0.0.1:10250: i/o timeout"; err.Error() != want {
		t.Errorf("it is %q, want %q", err, want)
	}
}
