package lb

import (
	"fmt"
	"slices"
	"strings"
)

// Failover is where clients outside of the cluster go whose Service has the external traffic policy Local, and no usable endpoint on
// this node.
type Failover uint8

// The kinds of failover.
const (
	NoFailover  Failover = iota // nowhere: their packets are dropped, or rejected where no node has an endpoint
	Fallback                    // to endpoints on other nodes, as under the policy Cluster
	Passthrough                 // where routes lead the packets to external addresses, as if they were no Service's
)

var failoverText = [...]string{"none", "fallback", "passthrough"}

// ParseFailover parses a kind of failover, as String returns it.
func ParseFailover(text string) (Failover, error) {
	if i := slices.Index(failoverText[:], text); i >= 0 {
		return Failover(i), nil
	}

	return NoFailover, fmt.Errorf("%q is none of %s", text, strings.Join(failoverText[:], ", "))
}

func (f Failover) String() string {
	if int(f) < len(failoverText) {
		return failoverText[f]
	}

	return fmt.Sprintf("failover %d", uint8(f))
}
