// Package remote runs verbs of sluice on nodes of a cluster: in the pods of its DaemonSet, by way of the API
// server, as `kubectl exec` does. [Cluster] finds the pods and runs the verbs, [Join] makes one answer of many.
package remote

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/util/exec"
	"k8s.io/streaming/pkg/httpstream"
)

// label has the pods of the DaemonSet, in any installation, and with another value those of deploy/nodes, in which verbs
// run on nodes without the former.
const label = "app.kubernetes.io/name"

// Selector selects the pods of both.
const Selector = label + " in (sluice, sluice-nodes)"

// container is the name of the agent's container in these pods.
const container = "sluice"

// CodeNoAnswer is the exit code of a node that did not answer.
const CodeNoAnswer = 2

// Cluster runs verbs on the nodes of a cluster.
type Cluster struct {
	Config    *rest.Config
	Client    kubernetes.Interface
	Namespace string // of the DaemonSet
	// Parallel is how many nodes are asked at the same time, Timeout how long one may take.
	Parallel int
	Timeout  time.Duration
	// Input is what each verb reads, nil if they read nothing.
	Input []byte
	// MaxAnswer limits what a verb may print on one node, in bytes: a node could answer without end. Zero is no limit.
	MaxAnswer int
}

// Node is a node that has a pod of the DaemonSet.
type Node struct {
	Name string
	pod  corev1.Pod
}

// Nodes returns the nodes that have a pod of Sluice, sorted by name: all, or those with these names.
func (c *Cluster) Nodes(ctx context.Context, names ...string) ([]Node, error) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	pods, err := c.Client.CoreV1().Pods(c.Namespace).List(ctx, metav1.ListOptions{LabelSelector: Selector})
	if err != nil {
		return nil, fmt.Errorf("pods of Sluice in namespace %s: %w", c.Namespace, err)
	}
	if len(pods.Items) == 0 {
		return nil, fmt.Errorf("no pod in namespace %s has the label %s: is Sluice installed in another namespace (--sluice-namespace)? What an agent programmed stays in force without it: how to remove that is in docs/install.md", c.Namespace, Selector)
	}
	newest := make(map[string]corev1.Pod)
	for _, pod := range pods.Items {
		node := pod.Spec.NodeName
		if other, ok := newest[node]; node != "" && (!ok || isBetter(pod, other)) {
			newest[node] = pod
		}
	}
	for _, name := range names {
		if _, ok := newest[name]; !ok {
			return nil, fmt.Errorf("node %q has no pod of Sluice in namespace %s", name, c.Namespace)
		}
	}
	var nodes []Node
	for name, pod := range newest {
		if len(names) == 0 || slices.Contains(names, name) {
			nodes = append(nodes, Node{name, pod})
		}
	}
	slices.SortFunc(nodes, func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })

	return nodes, nil
}

// NodesWithout returns the names of the other nodes that an agent could run on.
func (c *Cluster) NodesWithout(ctx context.Context, pods []Node) (names []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	nodes, err := c.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: corev1.LabelOSStable + "=linux"})
	if err != nil {
		return nil, fmt.Errorf("nodes without a pod of Sluice are not known: %w", err)
	}
	for _, node := range nodes.Items {
		if !slices.ContainsFunc(pods, func(with Node) bool { return with.Name == node.Name }) {
			names = append(names, node.Name)
		}
	}

	return names, nil
}

// isBetter reports whether a pod is to be asked rather than another one of its node: one that runs, the agent's, and
// the younger of two, since the older one is being replaced.
func isBetter(pod, other corev1.Pod) bool {
	if runs := notRunning(pod) == ""; runs != (notRunning(other) == "") {
		return runs
	}
	if agent := pod.Labels[label] == "sluice"; agent != (other.Labels[label] == "sluice") {
		return agent
	}

	return other.CreationTimestamp.Before(&pod.CreationTimestamp)
}

// notRunning returns why no verb can run in a pod, or "".
func notRunning(pod corev1.Pod) string {
	if pod.DeletionTimestamp != nil {
		return "is being deleted"
	}
	for _, s := range pod.Status.ContainerStatuses {
		if w := s.State.Waiting; s.Name == container && w != nil {
			return strings.TrimSpace("is waiting: " + w.Reason + " " + w.Message)
		}
	}
	if pod.Status.Phase != corev1.PodRunning {
		return "is " + string(pod.Status.Phase)
	}

	return ""
}

// NodeOf returns any pod and its node, which has a pod of Sluice as well.
func (c *Cluster) NodeOf(ctx context.Context, namespace, name string) (Node, *corev1.Pod, error) {
	pod, err := c.Client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return Node{}, nil, fmt.Errorf("pod %s/%s: %w", namespace, name, err)
	}
	if pod.Spec.NodeName == "" {
		return Node{}, nil, fmt.Errorf("pod %s/%s is %s, and on no node yet", namespace, name, pod.Status.Phase)
	}
	nodes, err := c.Nodes(ctx, pod.Spec.NodeName)
	if err != nil {
		return Node{}, nil, fmt.Errorf("pod %s/%s: %w", namespace, name, err)
	}

	return nodes[0], pod, nil
}

// AgentFlags returns the flags of the agent in the node's pod that are in set, as --NAME=VALUE. It sets none.
func (n Node) AgentFlags(set *pflag.FlagSet) (flags []string) {
	set.ParseErrorsAllowlist.UnknownFlags = true // the agent may have others
	for _, c := range n.pod.Spec.Containers {
		if c.Name != container {
			continue
		}
		// An agent whose arguments are wrong does not run, and its logs have the reason.
		_ = set.ParseAll(c.Args, func(flag *pflag.Flag, value string) error {
			flags = append(flags, "--"+flag.Name+"="+strings.ReplaceAll(value, "$(NODE_NAME)", n.Name))

			return nil
		})
	}

	return flags
}

// places returns the flags of the agent that name the places where verbs find what it has programmed.
func (n Node) places() []string {
	set := pflag.NewFlagSet("places", pflag.ContinueOnError)
	for _, name := range []string{"bpf-root", "cgroup-root", "socket"} {
		set.String(name, "", "")
	}

	return n.AgentFlags(set)
}

// Run runs a verb on a node until it or ctx ends, with these outputs, and returns its exit code. The error is why
// the node has not answered, with [CodeNoAnswer]. It connects by WebSocket, as kubectl does, or by SPDY where the API
// server or a proxy before it does not take that.
func (c *Cluster) Run(ctx context.Context, node Node, verb []string, out, errs io.Writer) (int, error) {
	if why := notRunning(node.pod); why != "" {
		return CodeNoAnswer, fmt.Errorf("pod %s %s", node.pod.Name, why)
	}
	// Runtimes do not end a command whose client has gone, but its standard input ends. A verb that reads its input asks the
	// agent once, which has a limit of its own.
	open, closeInput := io.Pipe()
	defer closeInput.Close()
	var in io.Reader = open
	command := []string{"sluice", "--end-with-stdin"}
	if c.Input != nil {
		in, command = bytes.NewReader(c.Input), command[:1]
	}
	request := c.Client.CoreV1().RESTClient().Post().Resource("pods").SubResource("exec").
		Namespace(node.pod.Namespace).Name(node.pod.Name).
		VersionedParams(&corev1.PodExecOptions{
			Container: container, Command: slices.Concat(command, node.places(), verb),
			Stdin: true, Stdout: true, Stderr: true,
		}, scheme.ParameterCodec)
	websocket, err := remotecommand.NewWebSocketExecutor(c.Config, "GET", request.URL().String())
	if err != nil {
		return CodeNoAnswer, fmt.Errorf("exec: %w", err)
	}
	spdy, err := remotecommand.NewSPDYExecutor(c.Config, "POST", request.URL())
	if err != nil {
		return CodeNoAnswer, fmt.Errorf("exec: %w", err)
	}
	executor, err := remotecommand.NewFallbackExecutor(websocket, spdy, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
	if err != nil {
		return CodeNoAnswer, err
	}

	return codeOf(executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: in, Stdout: out, Stderr: errs}))
}

// Answer is what a verb printed on one node.
type Answer struct {
	Node        string
	Out, Errors string // the two outputs
	Code        int    // the exit code of the verb, or [CodeNoAnswer]
	// Err is why the node has not answered.
	Err error
}

// Ask runs a verb on nodes, which may differ in arguments, and returns their answers in the same order.
func (c *Cluster) Ask(ctx context.Context, nodes []Node, verb func(Node) []string) []Answer {
	answers := make([]Answer, len(nodes))
	var group errgroup.Group
	group.SetLimit(c.Parallel)
	for i, node := range nodes {
		group.Go(func() error {
			limited, cancel := context.WithTimeout(ctx, c.Timeout)
			defer cancel()
			out, errs := &answer{max: c.MaxAnswer, tooLong: cancel}, &answer{max: c.MaxAnswer, tooLong: cancel}
			code, err := c.Run(limited, node, verb(node), out, errs)
			printed, outOver := out.read()
			failed, errsOver := errs.read()
			switch {
			case outOver || errsOver:
				code, err = CodeNoAnswer, fmt.Errorf("its answer is longer than %d MiB", c.MaxAnswer>>20)
			case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
				err = fmt.Errorf("no answer after %v", c.Timeout)
			}
			answers[i] = Answer{Node: node.Name, Out: printed, Errors: failed, Code: code, Err: err}

			return nil
		})
	}
	_ = group.Wait() // errors are in the answers

	return answers
}

// answer is what a verb prints on one of its outputs, up to max bytes, unless that is 0. What prints more is ended.
type answer struct {
	max     int
	tooLong func()

	sync.Mutex // a stream may still write when it has ended
	text       bytes.Buffer
	over       bool
}

func (a *answer) Write(p []byte) (int, error) {
	a.Lock()
	defer a.Unlock()
	if a.over = a.over || a.max > 0 && a.text.Len()+len(p) > a.max; a.over {
		a.text = bytes.Buffer{}
		a.tooLong()

		return 0, errors.New("the answer is too long")
	}

	return a.text.Write(p)
}

// read returns what was printed, and whether that was too long.
func (a *answer) read() (string, bool) {
	a.Lock()
	defer a.Unlock()

	return a.text.String(), a.over
}

// requestOfKubelet is how the API server begins the error of a kubelet that it does not reach.
var requestOfKubelet = regexp.MustCompile(`^(?:Internal error occurred: )?error sending request: \w+ "https://([^/"]+)[^"]*": `)

// codeOf returns the exit code of a verb that ran, or [CodeNoAnswer] and why it did not.
func codeOf(err error) (int, error) {
	var exit exec.CodeExitError
	switch {
	case err == nil:
		return 0, nil
	case errors.As(err, &exit):
		return exit.Code, nil
	case requestOfKubelet.MatchString(err.Error()):
		return CodeNoAnswer, errors.New(requestOfKubelet.ReplaceAllString(err.Error(), "the kubelet at $1: "))
	default:
		return CodeNoAnswer, err
	}
}
