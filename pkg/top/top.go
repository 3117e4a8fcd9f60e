// Package top shows what each Service does at this moment: live connections, and the rates of new ones, of
// refusals, bytes and retransmissions, in total and by backend. It compares two readings of the counts in
// the maps and of the sockets in the kernel ([Reader]), needs no agent, and changes nothing.
package top

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Table is what happened on this node between two readings, or on several, see [Table.Add].
type Table struct {
	At      time.Time `json:"at"`
	Seconds float64   `json:"seconds"` // since the reading before; 0: there was none, and no rate is known
	// Refused are refusals by reason, also those that concern no Service.
	Refused  map[string]float64 `json:"refusedPerSecond"`
	Services []Service          `json:"services"`
	// Quiet is how many Services were left out because they had no connection and no refusal.
	Quiet int `json:"quiet"`
}

// Service is what happened to one Service.
type Service struct {
	Service string             `json:"service"` // namespace/name
	Live    int                `json:"live"`    // connections
	New     float64            `json:"newPerSecond"`
	Refused map[string]float64 `json:"refusedPerSecond"` // by reason
	// Handshake is how long TCP handshakes of this node's sockets took; nil if there were none, or if they
	// are not measured.
	Handshake *Durations `json:"handshake,omitempty"`
	// Unanswered are handshakes that have failed: refused by the backend, timed out, or given up.
	Unanswered float64 `json:"unansweredPerSecond"`
	Rates
	Backends []Backend `json:"backends"` // sorted by address
	// Nodes are those of a sum that have connections or refusals of it.
	Nodes []string `json:"-"`
}

// Durations are percentiles, within a tenth of the true ones.
type Durations struct {
	P50Seconds float64 `json:"p50Seconds"`
	P99Seconds float64 `json:"p99Seconds"`
}

// Rates are what clients send and receive each second.
type Rates struct {
	// Sent and Received are bytes by clients of TCP connections and of flows of devices. Connections that
	// began and ended between two readings are in them only as far as programs count them.
	Sent     float64 `json:"sentPerSecond"`
	Received float64 `json:"receivedPerSecond"`
	// Retransmits are segments of TCP sockets of this node that clients had to send again.
	Retransmits float64 `json:"retransmitsPerSecond"`
}

// add adds other rates, or takes them away if sign is -1.
func (r *Rates) add(other Rates, sign float64) {
	r.Sent += sign * other.Sent
	r.Received += sign * other.Received
	r.Retransmits += sign * other.Retransmits
}

// Backend is what happened at one backend. Its rates are those of connections that are live.
type Backend struct {
	Backend  netip.AddrPort `json:"backend"`
	Port     string         `json:"port"` // namespace/name:port
	Protocol string         `json:"protocol"`
	Live     int            `json:"live"`
	Rates
	// RTTMicroseconds is the mean round-trip time of its TCP sockets on this node, zero if it has none.
	RTTMicroseconds uint32 `json:"rttMicroseconds"`
}

// isQuiet reports whether a Service has no connection and no refusal.
func (s *Service) isQuiet() bool {
	return s.Live == 0 && s.New == 0 && s.Unanswered == 0 && len(s.Refused) == 0 && s.Rates == (Rates{})
}

// refused returns the sum of refusals, and the reason of most of them.
func refused(byReason map[string]float64) (sum float64, most string) {
	for reason, rate := range byReason {
		sum += rate
		if rate > byReason[most] || rate == byReason[most] && reason < most {
			most = reason
		}
	}

	return sum, most
}

// column is a column of the table of Services.
type column struct {
	title string
	key   string // by which the table can be sorted, or empty
	text  func(s *Service) string
	value func(s *Service) float64 // by which it is sorted, largest first; nil: by name
}

// columns are those of the table of Services.
var columns = []column{
	{"SERVICE", "service", func(s *Service) string { return s.Service }, nil},
	{"LIVE", "live", func(s *Service) string { return fmt.Sprint(s.Live) }, func(s *Service) float64 { return float64(s.Live) }},
	{"NEW/S", "new", func(s *Service) string { return number(s.New) }, func(s *Service) float64 { return s.New }},
	{"REFUSED/S", "refused", func(s *Service) string {
		sum, most := refused(s.Refused)

		return strings.TrimSpace(number(sum) + " " + most)
	}, func(s *Service) float64 {
		sum, _ := refused(s.Refused)

		return sum
	}},
	{"SENT/S", "sent", func(s *Service) string { return size(s.Sent) }, func(s *Service) float64 { return s.Sent }},
	{"RECEIVED/S", "received", func(s *Service) string { return size(s.Received) }, func(s *Service) float64 { return s.Received }},
	{"HANDSHAKE P50 P99", "handshake", func(s *Service) string {
		if s.Handshake == nil {
			return "-"
		}

		return duration(s.Handshake.P50Seconds) + " " + duration(s.Handshake.P99Seconds)
	}, func(s *Service) float64 {
		if s.Handshake == nil {
			return 0
		}

		return s.Handshake.P99Seconds
	}},
	{"UNANSWERED/S", "unanswered", func(s *Service) string { return number(s.Unanswered) }, func(s *Service) float64 { return s.Unanswered }},
	{"RETRANS/S", "retransmits", func(s *Service) string { return number(s.Retransmits) }, func(s *Service) float64 { return s.Retransmits }},
}

// Orders returns the keys by which a table can be sorted.
func Orders() []string {
	var keys []string
	for _, c := range columns {
		keys = append(keys, c.key)
	}

	return keys
}

// Sort sorts the Services by one of [Orders], largest first where it is a number, then by name.
func (t *Table) Sort(order string) error {
	i := slices.Index(Orders(), order)
	if i < 0 {
		return fmt.Errorf("sort key %q: it is one of %s", order, strings.Join(Orders(), ", "))
	}
	slices.SortFunc(t.Services, func(a, b Service) int {
		byValue := 0
		if value := columns[i].value; value != nil {
			byValue = cmp.Compare(value(&b), value(&a))
		}

		return cmp.Or(byValue, cmp.Compare(a.Service, b.Service))
	})

	return nil
}

// Add adds what happened on another node, with its name. Percentiles cannot be added: the largest is kept. Backends are
// left out, and Quiet is right if all nodes have the same Services.
func (t *Table) Add(node string, other Table) {
	services := max(t.Quiet+len(t.Services), other.Quiet+len(other.Services))
	t.Seconds = max(t.Seconds, other.Seconds)
	if other.At.After(t.At) {
		t.At = other.At
	}
	t.Refused = sum(t.Refused, other.Refused)
	for _, s := range other.Services {
		i := slices.IndexFunc(t.Services, func(have Service) bool { return have.Service == s.Service })
		if i < 0 {
			s.Backends, s.Nodes = nil, []string{node}
			t.Services = append(t.Services, s)

			continue
		}
		have := &t.Services[i]
		have.Live += s.Live
		have.New += s.New
		have.Refused = sum(have.Refused, s.Refused)
		have.Unanswered += s.Unanswered
		have.Rates.add(s.Rates, 1)
		have.Nodes = append(have.Nodes, node)
		switch {
		case have.Handshake == nil:
			have.Handshake = s.Handshake
		case s.Handshake != nil:
			have.Handshake = &Durations{max(have.Handshake.P50Seconds, s.Handshake.P50Seconds), max(have.Handshake.P99Seconds, s.Handshake.P99Seconds)}
		}
	}
	t.Quiet = services - len(t.Services)
}

// sum returns the sums of two sets of rates by reason.
func sum(a, b map[string]float64) map[string]float64 {
	all := make(map[string]float64)
	for _, rates := range []map[string]float64{a, b} {
		for reason, rate := range rates {
			all[reason] += rate
		}
	}

	return all
}

// Write writes the table as text. Of the sum of several nodes it has a column of those that had something of each
// Service, as names returns them; else names is nil.
func (t *Table) Write(w io.Writer, names func(nodes []string) string) error {
	shown := columns
	if names != nil {
		shown = append(slices.Clone(columns), column{title: "NODES", text: func(s *Service) string { return names(s.Nodes) }})
	}
	_, err := fmt.Fprintf(w, "%s\n%s\n", t.summary(), strings.Join(t.lines(shown, t.Services), "\n"))

	return err
}

// lines returns the titles of columns, and below them the rows of Services. No rate is known before the second reading.
func (t *Table) lines(columns []column, services []Service) []string {
	lines := make([][]string, 1+len(services))
	for _, c := range columns {
		lines[0] = append(lines[0], c.title)
		for i := range services {
			cell := "-"
			if t.Seconds > 0 || !strings.Contains(c.title, "/S") {
				cell = c.text(&services[i])
			}
			lines[i+1] = append(lines[i+1], cell)
		}
	}

	return align(lines)
}

// WriteBackends writes the backends of each Service as text.
func (t *Table) WriteBackends(w io.Writer) error {
	for i := range t.Services {
		svc := &t.Services[i]
		if _, err := fmt.Fprintf(w, "%s  %s\n%s\n", t.At.Format(time.TimeOnly), svc.summary(), strings.Join(align(backendCells(svc)), "\n")); err != nil {
			return err
		}
	}

	return nil
}

// summary returns one line about a Service.
func (s *Service) summary() string {
	text := fmt.Sprintf("%s  %d live, %s new/s", s.Service, s.Live, number(s.New))
	for _, reason := range slices.Sorted(maps.Keys(s.Refused)) {
		text += fmt.Sprintf(", %s/s %s", number(s.Refused[reason]), reason)
	}

	return text
}

// backendCells returns the titles and the cells of the table of a Service's backends.
func backendCells(svc *Service) [][]string {
	lines := [][]string{{"BACKEND", "PORT", "PROTOCOL", "LIVE", "SENT/S", "RECEIVED/S", "RETRANS/S", "RTT"}}
	for _, b := range svc.Backends {
		rtt := "-"
		if b.RTTMicroseconds > 0 {
			rtt = (time.Duration(b.RTTMicroseconds) * time.Microsecond).String()
		}
		lines = append(lines, []string{
			b.Backend.String(), b.Port, b.Protocol, fmt.Sprint(b.Live), size(b.Sent), size(b.Received), number(b.Retransmits), rtt,
		})
	}

	return lines
}

// align pads cells so that columns are aligned.
func align(lines [][]string) []string {
	var text strings.Builder
	tabs := tabwriter.NewWriter(&text, 0, 8, 3, ' ', 0)
	for _, cells := range lines {
		fmt.Fprintln(tabs, strings.Join(cells, "\t"))
	}
	tabs.Flush() // a Builder takes everything

	return strings.Split(strings.TrimSuffix(text.String(), "\n"), "\n")
}

// summary returns one line about the node.
func (t *Table) summary() string {
	live, fresh := 0, 0.0
	for _, s := range t.Services {
		live += s.Live
		fresh += s.New
	}
	text := fmt.Sprintf("%s  %d live", t.At.Format(time.TimeOnly), live)
	if t.Seconds > 0 {
		text += fmt.Sprintf(", %s new/s", number(fresh))
		if sum, most := refused(t.Refused); sum > 0 {
			text += fmt.Sprintf(", %s refused/s, most of them %s", number(sum), most)
		}
	}
	if t.Quiet > 0 {
		text += fmt.Sprintf("; quiet Services: %d", t.Quiet)
	}

	return text
}

// number returns a rate with as many digits as matter.
func number(rate float64) string {
	if rate >= 10 || rate == 0 {
		return fmt.Sprintf("%.0f", rate)
	}

	return fmt.Sprintf("%.1f", rate)
}

// duration returns seconds as text with two digits.
func duration(seconds float64) string {
	unit := time.Microsecond
	for d := time.Duration(seconds * float64(time.Second)); d >= 100*unit; {
		unit *= 10
	}

	return time.Duration(seconds * float64(time.Second)).Round(unit).String()
}

// size returns a rate of bytes.
func size(rate float64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	for rate >= 1000 && len(units) > 1 {
		rate, units = rate/1024, units[1:]
	}

	return number(rate) + " " + units[0]
}
