package lab

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
)

// Netfilter loads a ruleset in the language of nft(8).
func (ns *Namespace) Netfilter(ruleset string) error {
	cmd := exec.Command("nft", "-f", "-")
	var printed strings.Builder
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(ruleset), &printed, &printed
	err := Start(ns, nil, cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return fmt.Errorf("ruleset of %s: %w: %s", ns.name, err, printed.String())
	}

	return nil
}

// NetfilterCounters are the packets that each named counter of the ruleset has
// seen. Those of several tables must not share a name.
func (ns *Namespace) NetfilterCounters() (map[string]uint64, error) {
	text, err := Output(ns, nil, "nft", "--json", "list", "counters")
	if err != nil {
		return nil, err
	}
	var listed struct {
		Nftables []struct {
			Counter *struct {
				Name    string
				Packets uint64
			}
		}
	}
	if err := json.Unmarshal([]byte(text), &listed); err != nil {
		return nil, fmt.Errorf("counters of %s: %w", ns.name, err)
	}
	counters := make(map[string]uint64)
	for _, object := range listed.Nftables {
		if object.Counter != nil {
			counters[object.Counter.Name] = object.Counter.Packets
		}
	}

	return counters, nil
}
