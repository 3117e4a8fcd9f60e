package lb

import (
	"fmt"
	"slices"
	"strings"
)

// Healing is what is done about backends that do not answer new connections, until Kubernetes
// notices. A Service can only have less of it than the node.
type Healing uint8

// The kinds of healing, from none to most.
const (
	HealAsNode  Healing = iota // of a Service: what the node does
	HealOff                    // nothing
	HealEject                  // new connections go to other backends
	HealResteer                // and so do those that have begun and have no answer
)

var healingText = [...]string{"default", "off", "eject", "resteer"}

// ParseHealing parses a kind of healing, as String returns it. That of the node cannot be named.
func ParseHealing(text string) (Healing, error) {
	known := healingText[HealOff:]
	if i := slices.Index(known, text); i >= 0 {
		return HealOff + Healing(i), nil
	}

	return HealAsNode, fmt.Errorf("%q is none of %s", text, strings.Join(known, ", "))
}

func (h Healing) String() string {
	if int(h) < len(healingText) {
		return healingText[h]
	}

	return fmt.Sprintf("healing %d", uint8(h))
}
