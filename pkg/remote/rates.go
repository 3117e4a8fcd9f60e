package remote

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// Rates is what `sluice top -o json` answers, as far as it can be added up over nodes.
type Rates struct {
	Refused  map[string]float64 `json:"refusedPerSecond"` // by reason, also what concerns no Service
	Services []ServiceRates     `json:"services"`
}

// ServiceRates is what happens to a Service.
type ServiceRates struct {
	Service     string             `json:"service"` // namespace/name
	Live        int                `json:"live"`    // connections
	New         float64            `json:"newPerSecond"`
	Refused     map[string]float64 `json:"refusedPerSecond"` // by reason
	Sent        float64            `json:"sentPerSecond"`    // bytes
	Received    float64            `json:"receivedPerSecond"`
	Retransmits float64            `json:"retransmitsPerSecond"`
	// Nodes are those that have connections or refusals of it.
	Nodes []string `json:"nodes,omitempty"`
}

// Add adds what happens on a node.
func (r *Rates) Add(node string, other Rates) {
	r.Refused = sum(r.Refused, other.Refused)
	for _, s := range other.Services {
		i := slices.IndexFunc(r.Services, func(have ServiceRates) bool { return have.Service == s.Service })
		if i < 0 {
			s.Nodes = []string{node}
			r.Services = append(r.Services, s)

			continue
		}
		have := &r.Services[i]
		have.Live += s.Live
		have.New += s.New
		have.Sent += s.Sent
		have.Received += s.Received
		have.Retransmits += s.Retransmits
		have.Refused = sum(have.Refused, s.Refused)
		have.Nodes = append(have.Nodes, node)
	}
}

func sum(a, b map[string]float64) map[string]float64 {
	all := make(map[string]float64)
	for _, one := range []map[string]float64{a, b} {
		for key, value := range one {
			all[key] += value
		}
	}

	return all
}

// Write writes a table, with the Services that have the most new connections and refusals first, of this many nodes.
func (r *Rates) Write(w io.Writer, nodes int) error {
	slices.SortFunc(r.Services, func(a, b ServiceRates) int {
		return cmp.Or(cmp.Compare(b.New+total(b.Refused), a.New+total(a.Refused)), cmp.Compare(b.Live, a.Live), cmp.Compare(a.Service, b.Service))
	})
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	fmt.Fprintln(t, "SERVICE\tLIVE\tNEW/S\tREFUSED/S\tSENT/S\tRECEIVED/S\tRETRANSMITS/S\tNODES")
	for _, s := range r.Services {
		fmt.Fprintf(t, "%s\t%d\t%.1f\t%s\t%s\t%s\t%.1f\t%s\n", s.Service, s.Live, s.New, refusals(s.Refused), bytesText(s.Sent), bytesText(s.Received), s.Retransmits, Names(s.Nodes, nodes))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\nrefused/s: %s\n", refusals(r.Refused))

	return err
}

func total(rates map[string]float64) (all float64) {
	for _, rate := range rates {
		all += rate
	}

	return all
}

// refusals returns rates with their reasons, the highest first.
func refusals(rates map[string]float64) string {
	var reasons []string
	for reason, rate := range rates {
		if rate > 0 {
			reasons = append(reasons, reason)
		}
	}
	slices.SortFunc(reasons, func(a, b string) int { return cmp.Or(cmp.Compare(rates[b], rates[a]), cmp.Compare(a, b)) })
	for i, reason := range reasons {
		reasons[i] = fmt.Sprintf("%.1f %s", rates[reason], reason)
	}

	return cmp.Or(strings.Join(reasons, ", "), "0")
}

func bytesText(n float64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	for n >= 1000 && len(units) > 1 {
		n, units = n/1024, units[1:]
	}

	return fmt.Sprintf("%.3g %s", n, units[0])
}
