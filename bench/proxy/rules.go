package proxy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/test/lab"
)

// order returns the order of the chain of rules through which a new connection passes until
// one matches its address.
func (k *kubeProxy) order(addresses []netip.Addr) ([]netip.Addr, error) {
	if k.mode() != string(IPTables) {
		return addresses, nil
	}
	chain, err := k.tool("iptables", "-w", "-t", "nat", "-S", "KUBE-SERVICES")
	if err != nil {
		return nil, err
	}

	return sortByChain(addresses, chain)
}

// sortByChain sorts addresses by the first rule of a chain that matches them. The
// chain is as iptables -S prints it.
func sortByChain(addresses []netip.Addr, chain string) ([]netip.Addr, error) {
	places := make(map[string]int)
	for line := range strings.Lines(chain) {
		_, rule, _ := strings.Cut(line, " -d ")
		address, _, ok := strings.Cut(rule, "/32 ")
		if _, seen := places[address]; ok && !seen {
			places[address] = len(places)
		}
	}
	for _, address := range addresses {
		if _, ok := places[address.String()]; !ok {
			return nil, fmt.Errorf("no rule matches %s", address)
		}
	}

	return slices.SortedFunc(slices.Values(addresses), func(a, b netip.Addr) int {
		return places[a.String()] - places[b.String()]
	}), nil
}

// clean removes rules. Those of kube-proxy's own --cleanup are the same, which takes
// minutes for many Services.
func (k *kubeProxy) clean() error {
	switch k.cfg.Kind {
	case NFTables, IPTables:
		return k.cfg.Namespace.Netfilter("flush ruleset")
	case IPTablesLegacy:
		var err error
		for _, family := range []string{"iptables", "ip6tables"} {
			for _, table := range []string{"nat", "filter", "mangle"} {
				_, flushed := k.tool(family, "-w", "-t", table, "-F")
				_, deleted := k.tool(family, "-w", "-t", table, "-X")
				err = errors.Join(err, flushed, deleted)
			}
		}

		return err
	default:
		cmd := k.command(k.cfg.Binary, "--cleanup")
		if err := lab.Start(k.cfg.Namespace, nil, cmd); err != nil {
			return err
		}

		return cmd.Wait()
	}
}
