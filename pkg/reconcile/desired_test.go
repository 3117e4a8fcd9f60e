package reconcile

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/lab"
)

// desired is the desired state of one Service in a script.
type desired struct {
	name    lb.ServiceName
	created time.Time
	res     lb.Resolution
}

// mustParseDesired reads Services as scripts describe them. A line is a frontend of the Service
// that the last line "service namespace/name created=N" named, of default/web before the first:
//
//	10.96.0.1:80/UDP external LoadBalancer by=rr port=dns drop masquerade affinity=60s ranges=10.0.0.0/8 node -> 10.0.1.7:53 10.0.2.7:53(local,terminating)
//	10.96.0.1:*
//	alive port=dns 10.0.3.7:53/UDP
//
// What is left out means TCP, internal, ClusterIP, random and an unnamed port. Backends are alive.
func mustParseDesired(t testing.TB, text string) []desired {
	t.Helper()
	var services []desired
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if words[0] == "service" {
			services = append(services, mustParseService(t, words[1:]))

			continue
		}
		if len(services) == 0 {
			services = append(services, desired{name: lb.ServiceName{Namespace: "default", Name: "web"}})
		}
		mustParseDesiredLine(t, &services[len(services)-1], words)
	}

	return services
}

func mustParseService(t testing.TB, words []string) desired {
	t.Helper()
	namespace, name, _ := strings.Cut(words[0], "/")
	w := desired{name: lb.ServiceName{Namespace: namespace, Name: name}}
	for _, word := range words[1:] {
		var seconds int64
		if _, err := fmt.Sscanf(word, "created=%d", &seconds); err != nil {
			t.Fatalf("%q: %v", word, err)
		}
		w.created = time.Unix(seconds, 0)
	}

	return w
}

func mustParseDesiredLine(t testing.TB, w *desired, words []string) {
	t.Helper()
	if words[0] == "alive" {
		e := lb.EndpointState{Port: &lb.PortName{Service: w.name}, Alive: true}
		for _, word := range words[1:] {
			if name, ok := strings.CutPrefix(word, "port="); ok {
				e.Port.Port = name
			} else {
				e.Addr, e.Port.Protocol = mustParseVIP(t, word)
			}
		}
		w.res.Endpoints = append(w.res.Endpoints, e)

		return
	}
	f := mustParseFrontend(t, w.name, words)
	w.res.Frontends = append(w.res.Frontends, f)
	for _, b := range f.Backends {
		w.res.Endpoints = append(w.res.Endpoints, lb.EndpointState{Port: &f.Port, Addr: b.Addr, Use: lb.Used, Alive: true})
	}
}

func mustParseFrontend(t testing.TB, name lb.ServiceName, words []string) lb.Frontend {
	t.Helper()
	addr, protocol := mustParseVIP(t, words[0])
	f := lb.Frontend{
		Key:  lb.FrontendKey{Addr: addr.Addr(), Port: addr.Port(), Protocol: protocol, Scope: lb.Internal},
		Kind: lb.KindClusterIP,
		Port: lb.PortName{Service: name, Protocol: protocol},
	}
	for i, word := range words[1:] {
		if word == "->" {
			for _, backend := range words[i+2:] {
				f.Backends = append(f.Backends, mustParseBackend(t, backend))
			}
			slices.SortFunc(f.Backends, func(a, b lb.Backend) int { return a.Addr.Compare(b.Addr) })

			break
		}
		mustParseOption(t, &f, word)
	}

	return f
}

func mustParseOption(t testing.TB, f *lb.Frontend, word string) {
	t.Helper()
	option, value, _ := strings.Cut(word, "=")
	switch option {
	case "internal":
		f.Key.Scope = lb.Internal
	case "external":
		f.Key.Scope = lb.External
	case "port":
		f.Port.Port = value
	case "drop":
		f.DropIfEmpty = true
	case "masquerade":
		f.Masquerade = true
	case "opted-out":
		f.OptedOut = true
	case "heal":
		healing, err := lb.ParseHealing(value)
		lab.Must(t, err)
		f.Healing = healing
	case "node":
		f.NodeInRanges = true
	case "by":
		algorithm, err := lb.ParseAlgorithm(value)
		lab.Must(t, err)
		f.Algorithm = algorithm
	case "affinity":
		d, err := time.ParseDuration(value)
		lab.Must(t, err)
		f.Affinity = d
	case "ranges":
		for prefix := range strings.SplitSeq(value, ",") {
			f.SourceRanges = append(f.SourceRanges, netip.MustParsePrefix(prefix))
		}
	default:
		lab.Must(t, f.Kind.UnmarshalText([]byte(word)))
	}
}

// mustParseVIP reads "10.96.0.1:80", "10.96.0.1:53/UDP" or "10.96.0.1:*".
func mustParseVIP(t testing.TB, word string) (netip.AddrPort, lb.Protocol) {
	t.Helper()
	if addr, ok := strings.CutSuffix(word, ":*"); ok {
		return netip.AddrPortFrom(netip.MustParseAddr(strings.Trim(addr, "[]")), 0), lb.AnyProtocol
	}
	addr, name, ok := strings.Cut(word, "/")
	protocol := lb.TCP
	if ok {
		lab.Must(t, protocol.UnmarshalText([]byte(name)))
	}

	return netip.MustParseAddrPort(addr), protocol
}

// mustParseBackend reads "10.0.1.7:8080" or "10.0.1.7:8080(local,terminating)".
func mustParseBackend(t testing.TB, word string) lb.Backend {
	t.Helper()
	addr, flags, _ := strings.Cut(strings.TrimSuffix(word, ")"), "(")

	return lb.Backend{
		Addr:        netip.MustParseAddrPort(addr),
		Local:       strings.Contains(flags, "local"),
		Terminating: strings.Contains(flags, "terminating"),
	}
}
