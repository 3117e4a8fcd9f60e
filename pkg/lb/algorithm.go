package lb

import (
	"fmt"
	"slices"
	"strings"
)

// Algorithm is the way in which a frontend chooses a backend for a new flow.
type Algorithm uint8

// The algorithms. Their names are those of the schedulers of IPVS, where it has one.
const (
	DefaultAlgorithm Algorithm = iota // of a Service: the one of the agent's configuration
	Random
	RoundRobin
	LeastConnections      // of two at random, the one with fewer live connections
	ShortestExpectedDelay // of all, the one with the fewest; Kubernetes knows no weights
	NeverQueue            // the first that has none, else as ShortestExpectedDelay
	SourceHash            // by the address of the client
	DestinationHash       // by the VIP
	Maglev                // by the whole flow, the same on every node
)

var algorithmText = [...]string{"default", "random", "rr", "lc", "sed", "nq", "sh", "dh", "maglev"}

// ParseAlgorithm parses the name of an algorithm, as String returns it. The
// default cannot be named.
func ParseAlgorithm(text string) (Algorithm, error) {
	known := algorithmText[Random:]
	if i := slices.Index(known, text); i >= 0 {
		return Random + Algorithm(i), nil
	}

	return DefaultAlgorithm, fmt.Errorf("%q is none of the algorithms %s", text, strings.Join(known, ", "))
}

func (a Algorithm) String() string {
	if int(a) < len(algorithmText) {
		return algorithmText[a]
	}

	return fmt.Sprintf("algorithm %d", uint8(a))
}

// Hashes reports whether a looks a hash up in a table of backends.
func (a Algorithm) Hashes() bool { return a == SourceHash || a == DestinationHash || a == Maglev }
