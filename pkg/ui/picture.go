package ui

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/remote"
	"github.com/sluice-lb/sluice/pkg/status"
	"github.com/sluice-lb/sluice/pkg/top"
)

// Picture is what the page shows.
type Picture struct {
	Time     time.Time `json:"time"`
	Nodes    []Node    `json:"nodes"`
	Services []Service `json:"services"`
	// Refused are counts of refusals of all nodes, by the text of the reason, since their maps were made.
	Refused map[string]uint64 `json:"refused"`
	// Rest is how long browsers wait until they ask for the next one, in milliseconds.
	Rest int64 `json:"restMilliseconds"`
}

// Node is a node, and what is wrong there.
type Node struct {
	Name    string `json:"name"`
	Problem string `json:"problem,omitempty"`
}

// Service is a Service as all nodes see it together.
type Service struct {
	Name      string    `json:"name"` // namespace/name
	Addresses []string  `json:"addresses"`
	Error     string    `json:"error,omitempty"`
	Backends  []Backend `json:"backends"`
	Callers   []Caller  `json:"callers"`
	// New and Refused, by the label of the reason, are rates per second. They are missing if no node knows rates.
	New     *float64           `json:"newPerSecond,omitempty"`
	Refused map[string]float64 `json:"refusedPerSecond,omitempty"`
}

// Backend is one endpoint of a Service.
type Backend struct {
	Address     string `json:"address"`
	Node        string `json:"node,omitempty"`
	Active      bool   `json:"active"`
	Reason      string `json:"reason,omitempty"` // why it is active on no node
	Connections int    `json:"connections"`
}

// Caller is who has connections to a Service: a pod, a process of a node, or an address.
type Caller struct {
	Name        string `json:"name"`
	Connections int    `json:"connections"`
}

// connection is what `sluice connections` and `sluice flows` have in common, and what only the former knows.
type connection struct {
	flow.Flow
	Pod     string `json:"pod"`
	Process *struct {
		Command string `json:"command"`
	} `json:"process"`
}

// verbs are those in which nodes differ. What Services there are, with all of their addresses and endpoints, is the same on
// all nodes, and one is asked for it.
var verbs = []string{"status", "flows", "connections", "top"}

// topInterval is the time in which rates are measured: with the pause that follows it, a picture is some seconds old.
const topInterval = "--interval=500ms"

// serviceTries is how many nodes are asked for Services until one answers.
const serviceTries = 3

// Collect asks nodes for the picture of this moment. A node that does not answer is in it, with the reason. A node
// runs one verb at a time, and none after one without an answer.
func Collect(ctx context.Context, cluster *remote.Cluster, nodes []remote.Node) Picture {
	answers := make(map[string][]remote.Answer)
	for _, verb := range verbs {
		answers[verb] = make([]remote.Answer, len(nodes))
	}
	ask := func(node remote.Node, verb string) remote.Answer {
		words := []string{verb, "--output=json"}
		if verb == "top" {
			words = append(words, topInterval)
		}

		return cluster.Ask(ctx, []remote.Node{node}, func(remote.Node) []string { return words })[0]
	}
	var group errgroup.Group
	group.SetLimit(cluster.Parallel)
	for i, node := range nodes {
		group.Go(func() error {
			var answer remote.Answer
			for _, verb := range verbs {
				if answer.Err == nil {
					answer = ask(node, verb)
				}
				answers[verb][i] = answer
			}

			return nil
		})
	}
	_ = group.Wait() // errors are in the answers
	var services []remote.Answer
	// Nodes that are well come first, and those that do not answer are not asked again.
	for _, code := range []int{0, 1} {
		for i, node := range nodes {
			known := len(services) > 0 && services[len(services)-1].Code == 0
			if a := answers["status"][i]; !known && len(services) < serviceTries && a.Err == nil && a.Code == code {
				services = append(services, ask(node, "services"))
			}
		}
	}

	return compose(time.Now(), services, answers)
}

// compose makes the picture of the answers of some nodes about Services, of which the last one counts, and of the answers
// of all nodes to [verbs].
func compose(now time.Time, services []remote.Answer, answers map[string][]remote.Answer) Picture {
	d := drawing{
		picture: Picture{Time: now, Nodes: []Node{}, Services: []Service{}, Refused: make(map[string]uint64)},
		known:   make(map[string]*Service), owners: make(map[netip.Addr]string), calls: make(map[string]map[string]int),
		backends: make(map[backendKey]int),
	}
	problems := make(map[string]string) // by node
	for _, a := range services {
		problems[a.Node] = d.add("services", a)
	}
	for i, a := range answers["status"] {
		node := Node{Name: a.Node, Problem: problems[a.Node]}
		for _, verb := range verbs {
			if problem := d.add(verb, answers[verb][i]); problem != "" && node.Problem == "" {
				node.Problem = problem
			}
		}
		d.picture.Nodes = append(d.picture.Nodes, node)
	}
	for service, callers := range d.calls {
		for name, count := range callers {
			if address, err := netip.ParseAddr(name); err == nil && d.owners[address] != "" {
				name = fmt.Sprintf("%s (%s)", d.owners[address], name)
			}
			d.known[service].Callers = append(d.known[service].Callers, Caller{name, count})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.known)) {
		svc := d.known[name]
		slices.SortFunc(svc.Callers, func(a, b Caller) int {
			return cmp.Or(cmp.Compare(b.Connections, a.Connections), cmp.Compare(a.Name, b.Name))
		})
		d.picture.Services = append(d.picture.Services, *svc)
	}

	return d.picture
}

// drawing is a picture that is being made.
type drawing struct {
	picture Picture
	known   map[string]*Service
	owners  map[netip.Addr]string     // the Service of which an address is a backend
	calls   map[string]map[string]int // connections by Service and caller
	// backends are the places of backends in those of their Services.
	backends map[backendKey]int
}

// add adds one answer, and returns what is wrong with the node, or "".
func (d *drawing) add(verb string, a remote.Answer) string {
	switch {
	case a.Err != nil:
		return "no answer: " + a.Err.Error()
	case a.Out == "":
		return fmt.Sprintf("%s: %s", verb, strings.TrimSpace(a.Errors))
	}
	var err error
	switch verb {
	case "status":
		var s status.Status
		if err = json.Unmarshal([]byte(a.Out), &s); err == nil {
			for reason, n := range s.Counts {
				if strings.HasPrefix(reason, "refused: ") || strings.HasPrefix(reason, "dropped: ") {
					d.picture.Refused[reason] += n
				}
			}
			for _, e := range s.Errors {
				svc := d.service(e.Service)
				svc.Error = cmp.Or(svc.Error, e.Error)
			}
			if !s.Well() {
				return "not well: see kubectl sluice status --node " + a.Node
			}
		}
	case "services":
		var services []status.Service
		if err = json.Unmarshal([]byte(a.Out), &services); err == nil {
			d.addServices(services)
		}
	case "flows", "connections":
		var connections []connection
		if err = json.Unmarshal([]byte(a.Out), &connections); err == nil {
			d.addCalls(a.Node, connections)
		}
	case "top":
		var rates top.Table
		if err = json.Unmarshal([]byte(a.Out), &rates); err == nil {
			d.addRates(rates)
		}
	}
	if err != nil {
		return fmt.Sprintf("%s: %v", verb, err)
	}

	return ""
}

// service returns a Service of the picture, which it adds if it is not there.
func (d *drawing) service(name string) *Service {
	if d.known[name] == nil {
		d.known[name] = &Service{Name: name, Addresses: []string{}, Backends: []Backend{}, Callers: []Caller{}}
	}

	return d.known[name]
}

func (d *drawing) addServices(services []status.Service) {
	for _, from := range services {
		svc := d.service(from.Name)
		svc.Error = cmp.Or(svc.Error, from.Error)
		for _, port := range from.Ports {
			for _, f := range port.Frontends {
				if text := fmt.Sprintf("%s/%s", f.Address, f.Protocol); !slices.Contains(svc.Addresses, text) {
					svc.Addresses = append(svc.Addresses, text)
				}
			}
			for _, b := range port.Backends {
				d.owners[b.Address.Addr()] = from.Name
				backend := d.backend(svc, fmt.Sprintf("%s/%s", b.Address, b.Protocol))
				if b.Active || slices.Contains(elsewhere, b.Reason) {
					backend.Active, backend.Reason = true, ""
				} else if !backend.Active {
					backend.Reason = b.Reason
				}
				backend.Node = b.Node
			}
		}
	}
}

// elsewhere are the reasons for which the node that was asked does not use a backend, and others do.
var elsewhere = []string{lb.OtherZone.String(), lb.OtherNode.String(), lb.NotLocal.String()}

// backend returns a backend of a Service, which it adds if it is not there.
func (d *drawing) backend(svc *Service, address string) *Backend {
	key := backendKey{svc.Name, address}
	i, known := d.backends[key]
	if !known {
		i, d.backends[key] = len(svc.Backends), len(svc.Backends)
		svc.Backends = append(svc.Backends, Backend{Address: address})
	}

	return &svc.Backends[i]
}

type backendKey struct{ service, address string }

// addCalls counts connections by caller.
func (d *drawing) addCalls(node string, connections []connection) {
	for _, c := range connections {
		namespace, rest, named := strings.Cut(c.Service, "/")
		name, _, _ := strings.Cut(rest, ":")
		if !named {
			continue // the Service is gone, and its connection has only an id
		}
		service := d.service(namespace + "/" + name).Name
		caller := cmp.Or(c.Pod, c.Client.Addr().Unmap().String())
		if c.Pod == "" && c.Process != nil {
			caller = fmt.Sprintf("%s on %s", c.Process.Command, node)
		}
		if d.calls[service] == nil {
			d.calls[service] = make(map[string]int)
		}
		d.calls[service][caller]++
	}
}

func (d *drawing) addRates(rates top.Table) {
	for _, from := range rates.Services {
		svc := d.service(from.Service)
		if svc.New == nil {
			svc.New, svc.Refused = new(float64), make(map[string]float64)
		}
		*svc.New += from.New
		for _, b := range from.Backends {
			address := fmt.Sprintf("%s/%s", b.Backend, b.Protocol)
			if _, is := d.backends[backendKey{svc.Name, address}]; is { // or it is no endpoint any more
				d.backend(svc, address).Connections += b.Live
			}
		}
		for reason, rate := range from.Refused {
			svc.Refused[reason] += rate
		}
	}
}
