package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/sluice-lb/sluice/pkg/pods"
	"github.com/sluice-lb/sluice/pkg/remote"
	"github.com/sluice-lb/sluice/pkg/status"
	"github.com/sluice-lb/sluice/pkg/ui"
)

// The names by which kubectl runs this program: as its plugin, and to complete the plugin's arguments.
const (
	pluginName     = "kubectl-sluice"
	completionName = "kubectl_complete-sluice"
)

// plugin is `kubectl sluice`: it has the verbs that look at a node, and runs them on the nodes of a cluster.
type plugin struct {
	rules     *clientcmd.ClientConfigLoadingRules
	overrides *clientcmd.ConfigOverrides
	cluster   remote.Cluster
	nodes     []string
}

// Lists of 100,000 Services are shorter than an answer of a verb may be, and those of 10,000 than what the page asks for.
const (
	maxAnswer     = 512 << 20
	maxAnswerOfUI = 64 << 20
)

// streamed are the verbs whose output has no end.
var streamed = []string{"monitor"}

func newPlugin() *cobra.Command {
	p := &plugin{rules: clientcmd.NewDefaultClientConfigLoadingRules(), overrides: &clientcmd.ConfigOverrides{}, cluster: remote.Cluster{MaxAnswer: maxAnswer}}
	root := &cobra.Command{
		Use:   pluginName,
		Short: "Look at Sluice on all nodes of a cluster, or on some",
		Long: "Look at Sluice on all nodes of a cluster, or on some: each verb runs in the pods of Sluice's DaemonSet, as with\n" +
			"'kubectl exec', and the answers are joined. The exit code is the highest of all nodes, and 2 at least if a node does not answer.",
		Example: "  kubectl sluice status\n" +
			"  kubectl sluice backends web --namespace shop\n" +
			"  kubectl sluice flows --node node-1,node-2",
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl sluice"},
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	flags := root.PersistentFlags()
	flags.StringSliceVar(&p.nodes, "node", nil, "ask these nodes (default: all that have a pod of Sluice)")
	flags.StringVar(&p.cluster.Namespace, "sluice-namespace", "kube-system", "namespace of Sluice's DaemonSet")
	flags.DurationVar(&p.cluster.Timeout, "timeout", 30*time.Second, "how long a node may take to answer")
	flags.IntVar(&p.cluster.Parallel, "parallel", 16, "how many nodes are asked at the same time")
	flags.StringVar(&p.rules.ExplicitPath, clientcmd.RecommendedConfigPathFlag, "", "path of the kubeconfig, as for kubectl")
	kubectl := pflag.NewFlagSet("kubectl", pflag.ContinueOnError)
	clientcmd.BindOverrideFlags(p.overrides, kubectl, clientcmd.RecommendedConfigOverrideFlags(""))
	kubectl.VisitAll(func(flag *pflag.Flag) {
		flag.Hidden = !slices.Contains([]string{"context", "namespace"}, flag.Name) // `kubectl options` has them all
		flags.AddFlag(flag)
	})
	mustComplete(root, "node", p.complete(p.nodeNames))
	mustComplete(root, "namespace", p.complete(p.namespaceNames))
	for _, verb := range newRoot().Commands() {
		if verb.Flags().Lookup("output") != nil && !verb.Hidden && verb.Name() != "agent" {
			root.AddCommand(p.command(verb))
		}
	}
	root.AddCommand(p.newUI())
	addCompletion(root, p.complete(p.serviceNames))

	return root
}

func (p *plugin) newUI() *cobra.Command {
	port := 0
	cmd := &cobra.Command{
		Use:   "ui",
		Short: "Show Services, their backends and who calls them as a live picture in a browser",
		Long: "Show Services, their backends and who calls them as a live picture in a browser of this machine.\n" +
			"It prints the address, which only works on this machine and until the command ends. Nothing leaves the machine but\n" +
			"what asks the nodes, while a browser shows the page.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := p.connect(); err != nil {
				return err
			}
			p.cluster.MaxAnswer = maxAnswerOfUI
			if _, err := p.cluster.Nodes(cmd.Context(), p.nodes...); err != nil {
				return err
			}
			server, err := ui.Listen(port, func(ctx context.Context) (ui.Picture, error) {
				nodes, err := p.cluster.Nodes(ctx, p.nodes...)
				if err != nil {
					return ui.Picture{}, err
				}

				return ui.Collect(ctx, &p.cluster, nodes), nil
			})
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), server.URL())

			return server.Run(cmd.Context())
		},
	}
	cmd.Flags().IntVar(&port, "port", 0, "port of 127.0.0.1 (default: a free one)")

	return cmd
}

// command returns the command that runs a verb on nodes, with the verb's own flags, except those that
// kubectl has as well, and the agent's, which its pod has.
func (p *plugin) command(verb *cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use: verb.Use, Short: verb.Short, Long: verb.Long,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := p.connect(); err != nil {
				return err
			}

			return p.run(cmd, verb, args)
		},
	}
	taken := pflag.NewFlagSet("", pflag.ContinueOnError)
	if verb.Name() == "doctor" {
		taken = newAgentFlagSet()
	}
	verb.Flags().VisitAll(func(flag *pflag.Flag) {
		if taken.Lookup(flag.Name) == nil {
			cmd.Flags().AddFlag(flag)
		}
	})

	return cmd
}

// connect makes the cluster of the kubeconfig.
func (p *plugin) connect() error {
	config, err := p.clientConfig().ClientConfig()
	if err != nil {
		return fmt.Errorf("kubeconfig: %w", err)
	}
	klog.SetLogger(logr.Discard())    // what client-go logs, it returns as well
	config.QPS, config.Burst = -1, -1 // one request a node, which --parallel limits
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("kubeconfig: %w", err)
	}
	if p.cluster.Parallel < 1 {
		return fmt.Errorf("--parallel %d: it is at least 1", p.cluster.Parallel)
	}
	p.cluster.Config, p.cluster.Client = config, client

	return nil
}

func (p *plugin) clientConfig() clientcmd.ClientConfig {
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(p.rules, p.overrides)
}

// run runs a verb on the nodes that are asked for, or on the node of the pod that is.
func (p *plugin) run(cmd, verb *cobra.Command, args []string) error {
	ctx := cmd.Context()
	nodes, words, err := p.resolve(cmd, args)
	if err != nil {
		return err
	}
	if err := verb.ValidateArgs(words); err != nil {
		return err
	}
	if isSet(cmd, "kill") && !isSet(cmd, "yes") {
		return fmt.Errorf("--kill: nodes cannot ask you: look at what the same without --kill lists on %d nodes, then add --yes", len(nodes))
	}
	format := cmd.Flag("output").Value.String()
	if file := cmd.Flags().Lookup("filename"); file != nil && file.Changed { // which nodes do not have
		if p.cluster.Input, err = readInput(cmd, file.Value.String()); err != nil {
			return err
		}
		if err := file.Value.Set("-"); err != nil {
			return err
		}
	}
	words = slices.Concat([]string{verb.Name()}, words, flagWords(cmd))
	interval, err := cmd.Flags().GetDuration("interval")
	if err == nil {
		p.cluster.Timeout += interval // the answer takes this long at least
	}
	switch {
	case slices.Contains(streamed, verb.Name()):
		return p.follow(cmd, nodes, append(words, "--output="+format), format == "json")
	case format == "table" && verb.Name() == "top" && len(args) == 0:
		return p.top(cmd, nodes, words, interval)
	case format == "table" && verb.Name() == "status":
		words = append(words, "--output=json")
		answers := p.cluster.Ask(ctx, nodes, func(remote.Node) []string { return words })
		drawClusterStatus(cmd.OutOrStdout(), answers, time.Now())
		if len(p.nodes) == 0 && len(args) == 0 {
			p.printNodesWithout(cmd, nodes)
		}

		return codeOfAnswers(answers)
	}
	if cmd.Flags().Lookup("once") != nil {
		words = append(words, "--once") // it would go on otherwise
	}
	asked := format
	if format == "yaml" {
		asked = "json"
	}
	agents := make(map[string][]string) // flags by node
	if verb.Name() == "doctor" {
		for _, node := range nodes {
			agents[node.Name] = doctorArgs(node.AgentFlags(newAgentFlagSet()))
		}
	}
	answers := p.cluster.Ask(ctx, nodes, func(node remote.Node) []string {
		return slices.Concat(words, []string{"--output=" + asked}, agents[node.Name])
	})
	answers, err = withPod(cmd, answers)
	if err != nil {
		return err
	}
	if asked == "json" {
		err = (&output{format}).print(cmd.OutOrStdout(), remote.Decode(answers), nil)
	} else {
		err = remote.Join(printable{cmd.OutOrStdout()}, answers, len(nodes))
		remote.JoinErrors(printable{cmd.ErrOrStderr()}, answers, len(nodes))
	}
	if err != nil {
		return err
	}

	return codeOfAnswers(answers)
}

// printNodesWithout prints which nodes have no pod of Sluice: what an agent programmed there stays in force. Nodes that are
// left out on purpose are no error.
func (p *plugin) printNodesWithout(cmd *cobra.Command, nodes []remote.Node) {
	switch names, err := p.cluster.NodesWithout(cmd.Context(), nodes); {
	case err != nil:
		fmt.Fprintln(printable{cmd.ErrOrStderr()}, err)
	case len(names) > 0:
		fmt.Fprintf(printable{cmd.OutOrStdout()}, "no pod of Sluice: %s: what an agent programmed there stays in force; with deploy/nodes, they are asked, too\n",
			remote.Names(names, len(names)+len(nodes)))
	}
}

// withPod returns the answers of the nodes that have the pod of --pod: each pod is on one node only, so that the others say
// nothing. The error is that no node has it, unless one has not answered.
func withPod(cmd *cobra.Command, answers []remote.Answer) ([]remote.Answer, error) {
	having := slices.DeleteFunc(slices.Clone(answers), func(a remote.Answer) bool {
		return a.Err == nil && a.Code != 0 && strings.Contains(a.Errors, pods.ErrNoPod.Error())
	})
	if len(having) == 0 && len(answers) > 0 {
		return nil, fmt.Errorf("--pod %s: no node that was asked has such a pod", cmd.Flag("pod").Value)
	}

	return having, nil
}

// isSet reports whether a command has a switch and it was given.
func isSet(cmd *cobra.Command, name string) bool {
	flag := cmd.Flags().Lookup(name)

	return flag != nil && flag.Value.String() == "true"
}

// codeOfAnswers returns an error with the exit code of answers, or nil.
func codeOfAnswers(answers []remote.Answer) error {
	if code := remote.Code(answers); code != 0 {
		return exitError{errors.New("not all is well on all nodes, see above"), code}
	}

	return nil
}

// flagWords returns the flags of a verb that were given, but for its format.
func flagWords(cmd *cobra.Command) (words []string) {
	cmd.LocalNonPersistentFlags().VisitAll(func(flag *pflag.Flag) {
		if flag.Name == "output" || !flag.Changed {
			return
		}
		values := []string{flag.Value.String()}
		if list, ok := flag.Value.(pflag.SliceValue); ok {
			values = list.GetSlice()
		}
		for _, value := range values {
			words = append(words, "--"+flag.Name+"="+value)
		}
	})

	return words
}

// resolve returns the nodes to ask, and the arguments of the verb there. With pod/NAME as the first argument
// it is the node of that pod, and the flag --from or --pod selects it there, if the verb has one. Names
// without a namespace are completed with the one that --namespace sets, or with that pod's.
func (p *plugin) resolve(cmd *cobra.Command, args []string) ([]remote.Node, []string, error) {
	namespace := p.overrides.Context.Namespace
	if len(args) > 0 && strings.HasPrefix(args[0], "pod/") {
		name := strings.TrimPrefix(args[0], "pod/")
		args = args[1:]
		var err error
		if namespace, _, err = p.clientConfig().Namespace(); err != nil {
			return nil, nil, fmt.Errorf("kubeconfig: %w", err)
		}
		node, pod, err := p.cluster.NodeOf(cmd.Context(), namespace, name)
		if err != nil {
			return nil, nil, err
		}
		if err := selectPod(cmd, pod); err != nil {
			return nil, nil, fmt.Errorf("pod %s/%s: %w", namespace, name, err)
		}
		if len(p.nodes) > 0 && !slices.Equal(p.nodes, []string{node.Name}) {
			return nil, nil, fmt.Errorf("pod %s/%s is on node %s: leave out --node", namespace, name, node.Name)
		}

		return []remote.Node{node}, inNamespace(cmd, namespace, args), nil
	}
	if namespace != "" && strings.Contains(cmd.Use, "[NAMESPACE/NAME]") && !names(cmd, args) {
		return nil, nil, fmt.Errorf("--namespace %s: it completes the name of a Service or pod, and there is none: without it, %s lists those of all namespaces",
			namespace, cmd.Name())
	}
	nodes, err := p.cluster.Nodes(cmd.Context(), p.nodes...)

	return nodes, inNamespace(cmd, namespace, args), err
}

// named are the flags that are names of Services or pods.
var named = []string{"to", "service", "from", "pod"}

// names reports whether arguments or flags name a Service or a pod.
func names(cmd *cobra.Command, args []string) bool {
	return len(args) > 0 || slices.ContainsFunc(named, func(name string) bool { return cmd.Flags().Changed(name) })
}

// selectPod sets the flag by which a verb looks from a pod, or at it. Nodes may not know the names of pods, but
// they know the addresses, and the UIDs by which the kubelet names their cgroups.
func selectPod(cmd *cobra.Command, pod *corev1.Pod) error {
	if cmd.Flags().Lookup("pod") != nil {
		return cmd.Flags().Set("pod", cmp.Or(pod.Annotations[corev1.MirrorPodAnnotationKey], string(pod.UID)))
	}
	if cmd.Flags().Lookup("from") == nil || pod.Spec.HostNetwork {
		return nil // without --from, it is a process of the node
	}
	to, err := netip.ParseAddrPort(protocolSuffix.ReplaceAllString(cmd.Flag("to").Value.String(), ""))
	for _, ip := range pod.Status.PodIPs {
		address, _ := netip.ParseAddr(ip.IP)
		if err != nil || address.Is4() == to.Addr().Unmap().Is4() { // a name: the first address
			return cmd.Flags().Set("from", ip.IP)
		}
	}

	return errors.New("it has no address, or none of the family of --to")
}

// inNamespace returns arguments that are names of Services with their namespace, and gives it to the flags
// that are, or are names of pods.
func inNamespace(cmd *cobra.Command, namespace string, args []string) []string {
	if namespace == "" {
		return args
	}
	for _, name := range named {
		if flag := cmd.Flags().Lookup(name); flag != nil && flag.Changed {
			_ = flag.Value.Set(withNamespace(namespace, name, flag.Value.String())) // a text, as it was
		}
	}
	args = slices.Clone(args)
	for i, arg := range args {
		args[i] = status.InNamespace(namespace, arg)
	}

	return args
}

// withNamespace returns the value of one of the named flags with a namespace, if it is a name without one.
func withNamespace(namespace, flag, value string) string {
	protocol := ""
	if flag == "to" {
		protocol = protocolSuffix.FindString(value)
	}
	name := strings.TrimSuffix(value, protocol)
	switch {
	case isAddress(name) || strings.HasPrefix(name, "localhost:"):
		return value
	case flag == "to" || flag == "service":
		return status.InNamespace(namespace, name) + protocol
	}
	if name = strings.TrimPrefix(name, "pod/"); strings.Contains(name, "/") || pods.IsUID(name) {
		return name
	}

	return namespace + "/" + name
}

// protocolSuffix is what --to may end with.
var protocolSuffix = regexp.MustCompile(`(?i)/(tcp|udp|sctp)$`)

func isAddress(text string) bool {
	_, err := netip.ParseAddr(strings.Trim(text, "[]"))
	_, withPort := netip.ParseAddrPort(text)

	return err == nil || withPort == nil
}

// follow prints what a verb prints on each node, line by line, with the name of the node. It ends with the
// command's context, or when no node answers any more.
func (p *plugin) follow(cmd *cobra.Command, nodes []remote.Node, words []string, objects bool) error {
	width := len("NODE")
	for _, node := range nodes {
		width = max(width, len(node.Name))
	}
	prefix := func(node, line string) string { return fmt.Sprintf("%-*s   %s", width, node, line) }
	if objects {
		prefix = func(node, line string) string { // adds a field to an object
			name, _ := json.Marshal(node) // a text can be encoded
			if rest, ok := strings.CutPrefix(line, "{"); ok {
				return fmt.Sprintf(`{"node":%s,%s`, name, rest)
			}

			return line
		}
	}
	out := remote.NewLines(printable{cmd.OutOrStdout()}, prefix)
	ends := make(chan remote.Answer)
	for _, node := range nodes {
		go func() {
			nodeOut := out.Of(node.Name)
			var errs bytes.Buffer
			code, err := p.cluster.Run(cmd.Context(), node, words, nodeOut, &errs)
			switch err = errors.Join(err, nodeOut.Close()); {
			case err != nil:
				fmt.Fprintf(&errs, "NO ANSWER: %v\n", err)
			case code != 0 && errs.Len() == 0:
				fmt.Fprintf(&errs, "ended with exit code %d\n", code)
			}
			ends <- remote.Answer{Node: node.Name, Errors: errs.String(), Code: code}
		}()
	}
	// Those that end at once, as all do if a name is wrong, are reported together.
	var ended, unreported []remote.Answer
	var report <-chan time.Time
	for len(ended) < len(nodes) {
		select {
		case answer := <-ends:
			ended, unreported = append(ended, answer), append(unreported, answer)
			report = cmp.Or(report, time.After(reportInterval))

			continue
		case <-report:
		}
		having, _ := withPod(cmd, unreported) // others may have it
		remote.JoinErrors(printable{cmd.ErrOrStderr()}, having, len(nodes))
		unreported, report = nil, nil
	}
	if cmd.Context().Err() != nil {
		return nil
	}
	last, _ := withPod(cmd, unreported)
	remote.JoinErrors(printable{cmd.ErrOrStderr()}, last, len(nodes))
	having, err := withPod(cmd, ended)
	if err != nil {
		return err
	}

	return codeOfAnswers(having)
}

// reportInterval is how long a verb that goes on waits, after one node has ended it, for others that do.
const reportInterval = time.Second

// newAgentFlagSet returns the flags of `sluice agent`.
func newAgentFlagSet() *pflag.FlagSet {
	set := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	newAgentFlags(set)

	return set
}

// doctorArgs returns those of an agent's flags that the doctor takes, too.
func doctorArgs(agent []string) []string {
	return slices.DeleteFunc(slices.Clone(agent), func(arg string) bool {
		name, _, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")

		return slices.Contains(otherActs, name)
	})
}

// endWithStdin ends a command's context when the standard input ends: that is how a verb that the plugin has
// started notices that the plugin has gone.
func endWithStdin(cmd *cobra.Command) {
	ctx, cancel := context.WithCancelCause(cmd.Context())
	cmd.SetContext(ctx)
	go func() {
		_, err := io.Copy(io.Discard, os.Stdin)
		cancel(cmp.Or(err, errors.New("the standard input has ended")))
	}()
}

// complete returns what completes an argument with names that the cluster has.
func (p *plugin) complete(names func(ctx context.Context) ([]string, error)) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		if p.connect() != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		found, err := names(cmd.Context())
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}

		return found, cobra.ShellCompDirectiveNoFileComp
	}
}

// mostNames is how many objects are asked for to complete a name.
const mostNames = 1000

func (p *plugin) serviceNames(ctx context.Context) (names []string, err error) {
	services, err := p.cluster.Client.CoreV1().Services(p.overrides.Context.Namespace).List(ctx, metav1.ListOptions{Limit: mostNames})
	if err != nil {
		return nil, err
	}
	for _, svc := range services.Items {
		names = append(names, svc.Namespace+"/"+svc.Name)
	}

	return names, nil
}

func (p *plugin) nodeNames(ctx context.Context) (names []string, err error) {
	nodes, err := p.cluster.Nodes(ctx)
	for _, node := range nodes {
		names = append(names, node.Name)
	}

	return names, err
}

func (p *plugin) namespaceNames(ctx context.Context) (names []string, err error) {
	namespaces, err := p.cluster.Client.CoreV1().Namespaces().List(ctx, metav1.ListOptions{Limit: mostNames})
	if err != nil {
		return nil, err
	}
	for _, n := range namespaces.Items {
		names = append(names, n.Name)
	}

	return names, nil
}
