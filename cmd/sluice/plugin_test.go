package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/sluice-lb/sluice/pkg/pods"
	"github.com/sluice-lb/sluice/pkg/remote"
	"github.com/sluice-lb/sluice/test/lab"
)

// Answers of real agents are in test/kubectl; these have what agents seldom answer.
func TestClusterStatus(t *testing.T) {
	var out strings.Builder
	answer := func(node, more string) remote.Answer {
		return remote.Answer{Node: node, Out: `{"running":true,"synced":true,"version":"v1","started":"2026-01-02T03:00:00Z",
			"services":3,"hooks":[{}],"devices":[{"attached":"tcx"},{"name":"lo"}],"flows":{"flows":{"entries":1,"capacity":10}}` + more + `}`}
	}
	drawClusterStatus(&out, []remote.Answer{
		answer("a", ""), answer("b", ""),
		answer("c", `,"version":"v2","throughStack":"a firewall drops","errors":[{"service":"shop/web","error":"no room"}]`),
		answer("d", `,"errors":[{"service":"shop/web","error":"no room"}]`),
		answer("e", `,"synced":false`),
		{Node: "f", Out: `{"running":false,"hooks":[{"name":"connect4","problem":"not attached"}],"devices":[{"name":"lo"}]}`, Code: 1},
		{Node: "g", Out: `{"running":false,"maps":[{"name":"addrs"}],"lastRan":"2026-01-02T03:30:00Z"}`, Code: 1},
		{Node: "h", Code: 2, Err: errors.New("refused")},
		{Node: "i", Code: 1, Errors: "sluice: no BTF\n"},
		{Node: "j", Out: `{"running":false,"hooks":[{}]}`, Code: 1},
		{Node: "k", Out: `{"running":false,"devices":[{"attached":"tcx"}]}`, Code: 1},
		{Node: "l", Out: `{"running":false,"mapFolders":["/sys/fs/bpf/sluice/v3"]}`, Code: 1},
	}, time.Date(2026, 1, 2, 4, 0, 0, 0, time.UTC))
	want := `NODE   AGENT         UP       SERVICES   HOOKS   DEVICES   FLOWS   STATE
a      v1            1h0m0s   3          1       1         10 %    ok
b      v1            1h0m0s   3          1       1         10 %    ok
c      v2            1h0m0s   3          1       1         10 %    NOT WELL, see below
d      v1            1h0m0s   3          1       1         10 %    NOT WELL, see below
e      v1            1h0m0s   3          1       1         10 %    waiting for Services
f      not running   -        -          1       0         0 %     no agent, and nothing is programmed
g      not running   -        -          0       0         0 %     NO AGENT: programs without an agent since 2026-01-02T03:30:00Z (30m0s)
h      -             -        -          -       -         -       NO ANSWER: refused
i      -             -        -          -       -         -       sluice: no BTF
j      not running   -        -          1       0         0 %     NO AGENT: programs without an agent
k      not running   -        -          0       1         0 %     NO AGENT: programs without an agent
l      not running   -        -          0       0         0 %     NO AGENT: programs without an agent

c, d: Service shop/web: no room
f: hook connect4: not attached
differs: version: v1 on a, b, d, e; v2 on c
differs: forwarding: past the stack on a, b, d, e; stack, because a firewall drops on c
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestClusterTop(t *testing.T) {
	var out strings.Builder
	err := drawClusterTop(&out, []remote.Answer{
		{Node: "a", Out: `{"at":"2026-01-02T03:04:05Z","seconds":2,"quiet":3,"refusedPerSecond":{"reject_no_backend":3},"services":[
			{"service":"shop/web","live":3,"newPerSecond":1.5,"handshake":{"p50Seconds":0.001,"p99Seconds":0.5},"unansweredPerSecond":1,"refusedPerSecond":{},"sentPerSecond":2048,"receivedPerSecond":10,"retransmitsPerSecond":0.5},
			{"service":"shop/empty","live":0,"refusedPerSecond":{"reject_no_backend":3}}]}`},
		{Node: "b", Out: `{"at":"2026-01-02T03:04:04Z","seconds":2,"quiet":4,"refusedPerSecond":{"reject_no_backend":1,"drop_source_range":2},"services":[
			{"service":"shop/web","live":4,"newPerSecond":0.5,"handshake":{"p50Seconds":0.002,"p99Seconds":0.1},"refusedPerSecond":{"drop_source_range":0.4},"sentPerSecond":0,"receivedPerSecond":10}]}`},
		{Node: "c", Code: 2, Err: errors.New("refused")},
		{Node: "d", Code: 1, Errors: `sluice: nothing is programmed`},
		{Node: "e", Code: 2, Err: errors.New("refused")},
	}, "live")
	lab.Must(t, err)
	want := `2 of 5 nodes
03:04:05  7 live, 2.0 new/s, 6.0 refused/s, most of them reject_no_backend; quiet Services: 3
SERVICE      LIVE   NEW/S   REFUSED/S               SENT/S    RECEIVED/S   HANDSHAKE P50 P99   UNANSWERED/S   RETRANS/S   NODES
shop/web     7      2.0     0.4 drop_source_range   2.0 KiB   20 B         2ms 500ms           1.0            0.5         a, b
shop/empty   0      0       3.0 reject_no_backend   0 B       0 B          -                   0              0           a
d: sluice: nothing is programmed
c, e: NO ANSWER: refused
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if err := drawClusterTop(&out, nil, "size"); err == nil || !strings.Contains(err.Error(), "--sort") {
		t.Errorf("by size: %v", err)
	}
}

// Rounds follow each other after the interval, also if no node can be asked.
func TestClusterTopWaits(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	p := &plugin{cluster: remote.Cluster{Client: fake.NewClientset(), Namespace: "kube-system", Parallel: 1, Timeout: time.Second}}
	cmd, _, err := newPlugin().Find([]string{"top"})
	lab.Must(t, err)
	var out, errs strings.Builder
	cmd.SetOut(&out)
	cmd.SetErr(&errs)
	cmd.SetContext(ctx)
	lab.Must(t, p.top(cmd, []remote.Node{{Name: "a"}}, []string{"top"}, minInterval))
	if rounds := strings.Count(out.String(), "0 of 1 nodes"); rounds < 2 || rounds > 11 || !strings.Contains(errs.String(), "no pod in namespace kube-system") {
		t.Errorf("%d rounds: %s%s", rounds, out.String(), errs.String())
	}
}

// The plugin has the verbs that look at a node, and no flag of theirs in another sense.
func TestPluginHasTheVerbs(t *testing.T) {
	var names []string
	for _, cmd := range newPlugin().Commands() {
		names = append(names, cmd.Name())
	}
	for _, verb := range newRoot().Commands() {
		looks := !slices.Contains([]string{"agent", "cleanup", "man"}, verb.Name()) && !verb.Hidden
		if has := slices.Contains(names, verb.Name()); has != looks {
			t.Errorf("kubectl sluice has %s: %t, want %t", verb.Name(), has, looks)
		}
	}
}

func TestArgumentsForNodes(t *testing.T) {
	verb := &cobra.Command{Use: "explain"}
	var to, service, from, pod string
	var list []string
	var yes bool
	verb.Flags().StringVar(&to, "to", "", "")
	verb.Flags().StringVar(&service, "service", "", "")
	verb.Flags().StringVar(&from, "from", "", "")
	verb.Flags().StringVar(&pod, "pod", "", "")
	verb.Flags().StringSliceVar(&list, "reason", nil, "")
	verb.Flags().BoolVar(&yes, "refused", false, "")
	verb.Flags().StringP("output", "o", "table", "")
	for _, test := range []struct {
		args, namespace string
		want            string
	}{
		{"web", "", "web"},
		{"web", "shop", "shop/web"},
		{"other/web", "shop", "other/web"},
		{"--to db:5432 -o json --refused", "shop", "--refused=true --to=shop/db:5432"},
		{"--to 10.0.0.1:53/udp --reason a,b", "shop", "--reason=a --reason=b --to=10.0.0.1:53/udp"},
		{"--to dns:dns/udp", "shop", "--to=shop/dns:dns/udp"},
		{"--to 10.0.0.1:53", "shop", "--to=10.0.0.1:53"},
		{"--to [fd00::1]:53 --service web", "shop", "--service=shop/web --to=[fd00::1]:53"},
		{"--pod web-0 --from web-1", "shop", "--from=shop/web-1 --pod=shop/web-0"},
		{"--pod other/web-0 --from fd00::1", "shop", "--from=fd00::1 --pod=other/web-0"},
		{"--from [fd00::1] --to web/udp", "shop", "--from=[fd00::1] --to=shop/web/udp"},
		{"--to db.other.svc:80", "shop", "--to=db.other.svc:80"},
		{"db.other.svc.cluster.local", "shop", "db.other.svc.cluster.local"},
		{"svc/web", "shop", "shop/web"},
		{"--to svc/web:80", "shop", "--to=shop/web:80"},
		{"--service service/web --to svc/other/web:http", "shop", "--service=shop/web --to=svc/other/web:http"},
		{"--to web:80/TCP", "shop", "--to=shop/web:80/TCP"},
		{"--to 10.0.0.1:53/UDP", "shop", "--to=10.0.0.1:53/UDP"},
		{"--to localhost:80", "shop", "--to=localhost:80"},
		{"--from pod/web-1 --pod web.v1", "shop", "--from=shop/web-1 --pod=shop/web.v1"},
		{"--pod 0f1e2d3c-0000-4000-8000-0123456789ab", "shop", "--pod=0f1e2d3c-0000-4000-8000-0123456789ab"},
	} {
		t.Run(test.args, func(t *testing.T) {
			cmd := (&plugin{}).command(verb)
			to, service, from, pod, list, yes = "", "", "", "", nil, false
			cmd.RunE = func(cmd *cobra.Command, args []string) error {
				words := append(inNamespace(cmd, test.namespace, args), flagWords(cmd)...)
				if got := strings.Join(words, " "); got != test.want {
					t.Errorf("the arguments are %s, want %s", got, test.want)
				}

				return nil
			}
			cmd.Flags().VisitAll(func(flag *pflag.Flag) { flag.Changed = false })
			cmd.SetArgs(strings.Fields(test.args))
			lab.Must(t, cmd.Execute())
		})
	}
}

// A pod is on one node: that the others do not have it is told only if no node has it.
func TestNodesWithPod(t *testing.T) {
	absent := func(node string) remote.Answer {
		return remote.Answer{Node: node, Code: 1, Errors: fmt.Sprintf("sluice: %v\n", pods.Pods{}.Check("shop/web-0"))}
	}
	has, silent := remote.Answer{Node: "b", Out: "[]"}, remote.Answer{Node: "c", Code: 2, Err: errors.New("refused")}
	unnamed := remote.Answer{Node: "d", Code: 1, Errors: "sluice: " + pods.ErrNoNames.Error()}
	for _, test := range []struct {
		name    string
		answers []remote.Answer
		want    string // the nodes that are left, or the error
	}{
		{"one has it", []remote.Answer{absent("a"), has, absent("e")}, "b"},
		{"one does not answer", []remote.Answer{absent("a"), silent}, "c"},
		{"one does not know names", []remote.Answer{absent("a"), unnamed}, "d"},
		{"none has it", []remote.Answer{absent("a"), absent("e")}, "--pod shop/web-0: no node that was asked has such a pod"},
	} {
		t.Run(test.name, func(t *testing.T) {
			cmd := &cobra.Command{}
			cmd.Flags().String("pod", "shop/web-0", "")
			answers, err := withPod(cmd, test.answers)
			var got []string
			for _, a := range answers {
				got = append(got, a.Node)
			}
			if err != nil {
				got = append(got, err.Error())
			}
			if diff := cmp.Diff([]string{test.want}, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// A namespace without a name in it restricts nothing, so that it is refused: the list would be taken for that of the
// namespace.
func TestNamespaceWithoutName(t *testing.T) {
	pod := func(node string) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "sluice-" + node, Labels: map[string]string{"app.kubernetes.io/name": "sluice"}},
			Spec:       corev1.PodSpec{NodeName: node},
		}
	}
	for args, want := range map[string]string{
		"services":                     "--namespace shop: it completes the name of a Service or pod, and there is none: without it, services lists those of all namespaces",
		"connections --state last-ack": "--namespace shop: it completes the name of a Service or pod, and there is none: without it, connections lists those of all namespaces",
		"services web":                 "",
		"connections --pod web-0":      "",
		"status":                       "",
		"explain --to web:http":        "",
		"monitor --service shop/web":   "",
	} {
		p := &plugin{overrides: &clientcmd.ConfigOverrides{}, cluster: remote.Cluster{Client: fake.NewClientset(pod("a")), Namespace: "kube-system", Timeout: time.Second}}
		p.overrides.Context.Namespace = "shop"
		words := strings.Fields(args)
		verb, _, err := newPlugin().Find(words[:1])
		lab.Must(t, err)
		lab.Must(t, verb.ParseFlags(words[1:]))
		verb.SetContext(t.Context())
		_, _, err = p.resolve(verb, verb.Flags().Args())
		if got := fmt.Sprint(err); got != want && (err != nil || want != "") {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}

// Nodes may not know the names of pods, so verbs get what they know in any case.
func TestSelectPod(t *testing.T) {
	dual := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{UID: "0f1e2d3c"},
		Status:     corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.244.1.2"}, {IP: "fd00::2"}}},
	}
	static, onNode := dual, dual
	static.Annotations = map[string]string{"kubernetes.io/config.mirror": "a1b2"}
	onNode.Spec.HostNetwork = true
	for _, test := range []struct {
		name, verb, to string
		pod            corev1.Pod
		want           string
	}{
		{"a UID", "connections", "", dual, "--pod=0f1e2d3c"},
		{"the hash of a static pod", "monitor", "", static, "--pod=a1b2"},
		{"its first address for a Service", "explain", "shop/web:80/udp", dual, "--from=10.244.1.2 --to=shop/web:80/udp"},
		{"its address of the family", "explain", "[fd00:96::1]:53/udp", dual, "--from=fd00::2 --to=[fd00:96::1]:53/udp"},
		{"the node", "explain", "10.96.0.1:80", onNode, "--to=10.96.0.1:80"},
		{"of no such family", "explain", "10.96.0.1:80", corev1.Pod{}, "it has no address, or none of the family of --to"},
		{"without such a flag", "services", "", dual, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			root := newPlugin()
			cmd, _, err := root.Find([]string{test.verb})
			lab.Must(t, err)
			if test.to != "" {
				err = cmd.Flags().Set("to", test.to)
			}
			if err = errors.Join(err, selectPod(cmd, &test.pod)); err != nil {
				if err.Error() != test.want {
					t.Error(err)
				}

				return
			}
			if got := strings.Join(flagWords(cmd), " "); got != test.want {
				t.Errorf("the flags are %s, want %s", got, test.want)
			}
		})
	}
}

func TestDoctorArgs(t *testing.T) {
	got := doctorArgs([]string{"--config=/var/lib/kube-proxy/config.conf", "--dry-run=true", "--hostname-override=node-1"})
	want := []string{"--config=/var/lib/kube-proxy/config.conf", "--hostname-override=node-1"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// The name by which the program is called decides what it is.
func TestNames(t *testing.T) {
	for path, want := range map[string]string{
		"/usr/local/bin/kubectl-sluice":          "kubectl-sluice",
		"/usr/local/bin/kubectl_complete-sluice": "kubectl-sluice",
		"sluice":                                 "sluice",
		os.Args[0]:                               "sluice",
	} {
		if got := commandOf([]string{path}).Name(); got != want {
			t.Errorf("%s is %s, want %s", path, got, want)
		}
	}
}
