package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// isUnknown reports whether err is that of a kernel without the protocol.
func isUnknown(err error) bool {
	return errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP)
}

// concern is what the network stack does to packets that it forwards, beyond routing them by their addresses: packets
// that bypass the stack would miss that.
type concern struct {
	text     string // for the operator; empty if the stack accepts all of them and does nothing else
	encrypts bool   // it has policies of IPsec, or may have
}

// concern reads the concern. Of several reasons it has one. That something cannot be read is a reason, too.
func (r *reader) concern() concern {
	encrypts := true // until the policies, which are the first, are known to be none
	for _, part := range []struct {
		name string
		find func() (string, error)
	}{
		{"IPsec policies", r.policies},
		{"routing rules", r.rules},
		{"iptables", r.legacyTables},
		{"nftables", r.tables.concern},
	} {
		found, err := Complete(part.find)
		if err != nil {
			return concern{fmt.Sprintf("%s cannot be read: %v", part.name, err), encrypts}
		}
		if found != "" {
			return concern{found, encrypts}
		}
		encrypts = false
	}

	return concern{}
}

// fillBypassed sets which programs at the ingress of devices miss packets that do not enter the stack. It returns a
// concern if there is one in the stack.
func (r *reader) fillBypassed(devices []Device) string {
	if r.bypassed == nil {
		return ""
	}
	var indices []int
	for _, d := range Decide(devices, r.devices) {
		if d.turns() {
			indices = append(indices, d.Index)
		}
	}
	var found map[int]string
	err := InNamespace(r.ns, func() (err error) {
		found, err = r.bypassed(indices)

		return err
	})
	if err != nil {
		return fmt.Sprintf("programs of others cannot be read: %v", err)
	}
	for i := range devices {
		devices[i].Bypassed = found[devices[i].Index]
	}
	if found[0] == "" {
		return ""
	}

	return fmt.Sprintf("%q runs at a hook of netfilter", found[0])
}

// policies returns a concern if there are IPsec policies.
func (r *reader) policies() (string, error) {
	if r.xfrm == nil {
		return "", nil
	}
	policies, err := r.xfrm.XfrmPolicyList(netlink.FAMILY_ALL)
	if err != nil || len(policies) == 0 {
		return "", err
	}

	return fmt.Sprintf("%d IPsec policies", len(policies)), nil
}

// IPsecPolicies returns how many IPsec policies the calling thread's network namespace has.
func IPsecPolicies() (int, error) {
	policies, err := Complete(func() ([]netlink.XfrmPolicy, error) { return netlink.XfrmPolicyList(netlink.FAMILY_ALL) })
	if err != nil && !isUnknown(err) {
		return 0, fmt.Errorf("list IPsec policies: %w", err)
	}

	return len(policies), nil
}

// MarkRules returns the priorities of the routing rules of the calling thread's network namespace
// that select by a mark.
func MarkRules() ([]int, error) {
	rules, err := Complete(func() ([]netlink.Rule, error) { return rulesBy(netlink.RuleList) })
	if err != nil {
		return nil, fmt.Errorf("list routing rules: %w", err)
	}
	var priorities []int
	for _, r := range rules {
		if marks(r) {
			priorities = append(priorities, r.Priority)
		}
	}

	return priorities, nil
}

// rulesBy returns the routing rules of both families.
func rulesBy(list func(family int) ([]netlink.Rule, error)) ([]netlink.Rule, error) {
	var all []netlink.Rule
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		rules, err := list(family)
		if err != nil && !isUnknown(err) {
			return nil, err
		}
		all = append(all, rules...)
	}

	return all, nil
}

// marks reports whether a routing rule selects by a mark.
func marks(r netlink.Rule) bool { return r.Mark != 0 || r.Mask != nil }

// rules returns a concern if there are routing rules that select by more than addresses, which
// the programs' lookups of routes do not have.
func (r *reader) rules() (string, error) {
	rules, err := rulesBy(r.routes.RuleList)
	for _, rule := range rules {
		if marks(rule) {
			return fmt.Sprintf("routing rule %d selects by a mark", rule.Priority), nil
		}
		if rule.Tos != 0 || rule.TunID != 0 || rule.IPProto != 0 || rule.Sport != nil || rule.Dport != nil {
			return fmt.Sprintf("routing rule %d selects by more than addresses", rule.Priority), nil
		}
	}

	return "", err
}

// legacyTables returns a concern if there are tables of iptables-legacy. It does not read their rules: the
// kernel creates a table when it is first used, so there are some.
func (r *reader) legacyTables() (string, error) {
	var tables []string
	err := InNamespace(r.ns, func() error {
		for _, name := range []string{"ip_tables_names", "ip6_tables_names"} {
			names, err := os.ReadFile("/proc/thread-self/net/" + name)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			tables = append(tables, strings.Fields(string(names))...)
		}

		return nil
	})
	if err != nil || len(tables) == 0 {
		return "", err
	}

	return "legacy iptables has tables: " + strings.Join(tables, ", "), nil
}

// subscribeForwarding opens sockets that receive the changes of what concern reads, except legacy tables,
// which have no notifications. The caller closes the sockets, also in case of an error.
func subscribeForwarding(ns netns.NsHandle) ([]*nl.NetlinkSocket, error) {
	var sockets []*nl.NetlinkSocket
	for _, of := range []struct {
		protocol int
		group    uint
	}{{unix.NETLINK_XFRM, xfrmPolicyGroup}, {unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES}} {
		socket, err := nl.SubscribeAt(ns, netns.None(), of.protocol, of.group)
		if isUnknown(err) {
			continue
		}
		if err != nil {
			return sockets, fmt.Errorf("subscribe to protocol %d of netlink: %w", of.protocol, err)
		}
		sockets = append(sockets, socket)
	}

	return sockets, nil
}

const xfrmPolicyGroup = 4 // XFRMNLGRP_POLICY
