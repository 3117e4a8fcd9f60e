package node

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// nftables reads the nftables ruleset of a namespace, which includes that of iptables-nft. The zero
// value is that of a kernel without nftables.
type nftables struct {
	sockets map[int]*nl.SocketHandle
}

func openNFTables(ns netns.NsHandle) (nftables, error) {
	socket, err := nl.GetNetlinkSocketAt(ns, netns.None(), unix.NETLINK_NETFILTER)
	if isUnknown(err) {
		return nftables{}, nil
	}
	if err != nil {
		return nftables{}, fmt.Errorf("netlink socket of netfilter: %w", err)
	}

	return nftables{map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: {Socket: socket}}}, nil
}

func (n nftables) close() {
	for _, s := range n.sockets {
		s.Close()
	}
}

// chain is a chain of a table.
type chain struct {
	family      uint8
	table, name string
}

func (c chain) String() string { return fmt.Sprintf("nftables chain %s %s", c.table, c.name) }

// concern returns a rule or policy that applies to forwarded packets and does more than accept them, or
// masquerade them in the end; "" if there is none. An unknown expression counts as one that does more.
func (n nftables) concern() (string, error) {
	chains, err := n.chains()
	if err != nil {
		return "", err
	}
	known := make(map[chain]bool)
	for _, c := range chains {
		if !c.seesForwarded() {
			continue
		}
		if c.policy != nfAccept {
			return c.String() + " has a policy other than accept", nil
		}
		if found, err := n.follow(c.chain, known); err != nil || found != "" {
			return found, err
		}
	}

	return "", nil
}

// follow checks the rules of a chain, and of the chains to which they jump.
func (n nftables) follow(c chain, known map[chain]bool) (string, error) {
	if known[c] {
		return "", nil
	}
	known[c] = true
	for expressions, err := range n.rules(c) {
		if err != nil {
			return "", err
		}
		for _, e := range expressions {
			target, harmless := e.effect()
			if !harmless {
				return fmt.Sprintf("%s has a rule with %q", c, e.name), nil
			}
			if target == "" {
				continue
			}
			if found, err := n.follow(chain{c.family, c.table, target}, known); err != nil || found != "" {
				return found, err
			}
		}
	}

	return "", nil
}

// chains returns all chains.
func (n nftables) chains() ([]listedChain, error) {
	if n.sockets == nil {
		return nil, nil
	}
	messages, err := n.dump(unix.NFT_MSG_GETCHAIN, unix.NFPROTO_UNSPEC)
	if errors.Is(err, unix.EINVAL) {
		return nil, nil // a kernel without nftables
	}
	if err != nil {
		return nil, err
	}
	var chains []listedChain
	for _, message := range messages {
		c, err := chainOf(message)
		if err != nil {
			return nil, err
		}
		chains = append(chains, c)
	}

	return chains, nil
}

// rules yields the expressions of each rule of a chain. It stops after the first error.
func (n nftables) rules(c chain) iter.Seq2[[]expression, error] {
	return func(yield func([]expression, error) bool) {
		messages, err := n.dump(unix.NFT_MSG_GETRULE, c.family,
			nl.NewRtAttr(unix.NFTA_RULE_TABLE, nl.ZeroTerminated(c.table)),
			nl.NewRtAttr(unix.NFTA_RULE_CHAIN, nl.ZeroTerminated(c.name)))
		if err != nil {
			yield(nil, err)

			return
		}
		for _, message := range messages {
			expressions, err := expressionsOf(message)
			if !yield(expressions, err) || err != nil {
				return
			}
		}
	}
}

// dump returns the messages that answer a dump request.
func (n nftables) dump(kind int, family uint8, attrs ...*nl.RtAttr) ([][]byte, error) {
	request := nl.NewNetlinkRequest(nfnlSubsysNFTables<<8|kind, unix.NLM_F_DUMP)
	request.Sockets = n.sockets
	request.AddData(&nl.Nfgenmsg{NfgenFamily: family})
	for _, attr := range attrs {
		request.AddData(attr)
	}

	return request.Execute(unix.NETLINK_NETFILTER, 0)
}

const (
	nfnlSubsysNFTables = 10
	nfDrop             = 0
	nfAccept           = 1
	sizeofNfgenmsg     = 4
	xtName             = 1 // NFTA_TARGET_NAME
)

// listedChain is a chain with its hook and policy, if it is a base chain.
type listedChain struct {
	chain
	hooked bool // false: other chains jump to it
	hook   uint32
	policy uint32
}

// seesForwarded reports whether forwarded packets pass the hook, before they leave the stack.
func (c listedChain) seesForwarded() bool {
	if !c.hooked {
		return false
	}
	switch c.family {
	case unix.NFPROTO_IPV4, unix.NFPROTO_IPV6, unix.NFPROTO_INET:
		return c.hook != unix.NF_INET_LOCAL_IN && c.hook != unix.NF_INET_LOCAL_OUT
	case unix.NFPROTO_NETDEV:
		return c.hook == unix.NF_NETDEV_INGRESS
	default:
		return false
	}
}

// chainOf parses the message of a chain.
func chainOf(message []byte) (c listedChain, err error) {
	attrs, err := attributesOf(message)
	if err != nil {
		return c, err
	}
	c.chain = chain{message[0], text(attrs[unix.NFTA_CHAIN_TABLE]), text(attrs[unix.NFTA_CHAIN_NAME])}
	nested, hooked := attrs[unix.NFTA_CHAIN_HOOK]
	if !hooked {
		return c, nil
	}
	hook, err := parse(nested)
	c.hooked, c.hook, c.policy = true, number(hook[unix.NFTA_HOOK_HOOKNUM]), nfAccept
	if policy, ok := attrs[unix.NFTA_CHAIN_POLICY]; ok {
		c.policy = number(policy)
	}

	return c, err
}

// expression is an expression of a rule.
type expression struct {
	name string
	data map[uint16][]byte
}

// expressionsOf parses the message of a rule.
func expressionsOf(message []byte) ([]expression, error) {
	attrs, err := attributesOf(message)
	if err != nil {
		return nil, err
	}
	list, err := nl.ParseRouteAttr(attrs[unix.NFTA_RULE_EXPRESSIONS])
	if err != nil {
		return nil, err
	}
	var all []expression
	for _, element := range list {
		parts, err := parse(element.Value)
		if err != nil {
			return nil, err
		}
		e := expression{name: text(parts[unix.NFTA_EXPR_NAME])}
		if e.data, err = parse(parts[unix.NFTA_EXPR_DATA]); err != nil {
			return nil, err
		}
		all = append(all, e)
	}

	return all, nil
}

// sources are the attributes by which expressions that may write name the source register.
var sources = map[string]uint16{
	"payload": unix.NFTA_PAYLOAD_SREG, "meta": unix.NFTA_META_SREG, "ct": unix.NFTA_CT_SREG, "exthdr": unix.NFTA_EXTHDR_SREG,
}

// effect reports whether the expression is harmless: it only matches, counts or accepts a packet, or jumps to another
// chain, which is target. Masquerading is harmless, too: it comes last, and the programs do the same.
func (e expression) effect() (target string, harmless bool) {
	switch e.name {
	case "target":
		return "", text(e.data[xtName]) == "MASQUERADE"
	case "masq", "cmp", "bitwise", "byteorder", "range", "counter", "fib", "rt", "socket", "match":
		return "", true
	case "payload", "meta", "ct", "exthdr":
		_, writes := e.data[sources[e.name]]

		return "", !writes
	case "lookup":
		register, maps := e.data[unix.NFTA_LOOKUP_DREG]

		return "", !maps || number(register) != unix.NFT_REG_VERDICT
	case "immediate":
		return e.verdict()
	default:
		return "", false
	}
}

// verdict returns the effect of an immediate expression, which loads a register or is a verdict.
func (e expression) verdict() (target string, harmless bool) {
	if number(e.data[unix.NFTA_IMMEDIATE_DREG]) != unix.NFT_REG_VERDICT {
		return "", true
	}
	code, target, err := verdictOf(e.data[unix.NFTA_IMMEDIATE_DATA])
	if err != nil {
		return "", false
	}
	switch code {
	case nfAccept, unix.NFT_CONTINUE, unix.NFT_RETURN:
		return "", true
	case unix.NFT_JUMP, unix.NFT_GOTO:
		return target, target != ""
	default:
		return "", false
	}
}

// verdictOf parses a verdict, with the chain that it leads to.
func verdictOf(attribute []byte) (code int32, target string, err error) {
	data, err := parse(attribute)
	if err != nil {
		return 0, "", err
	}
	verdict, err := parse(data[unix.NFTA_DATA_VERDICT])

	return int32(number(verdict[unix.NFTA_VERDICT_CODE])), text(verdict[unix.NFTA_VERDICT_CHAIN]), err
}

// attributesOf parses the attributes of a message.
func attributesOf(message []byte) (map[uint16][]byte, error) {
	if len(message) < sizeofNfgenmsg {
		return nil, fmt.Errorf("a message of %d bytes", len(message))
	}

	return parse(message[sizeofNfgenmsg:])
}

// parse parses attributes, and returns them by type.
func parse(bytes []byte) (map[uint16][]byte, error) {
	list, err := nl.ParseRouteAttr(bytes)
	if err != nil {
		return nil, err
	}
	attrs := make(map[uint16][]byte, len(list))
	for _, a := range list {
		attrs[a.Attr.Type&nl.NLA_TYPE_MASK] = a.Value
	}

	return attrs, nil
}

// number parses a number of 32 bits; an attribute of another size is a number without a meaning.
func number(bytes []byte) uint32 {
	if len(bytes) != 4 {
		return ^uint32(0)
	}

	return binary.BigEndian.Uint32(bytes)
}

func text(bytes []byte) string { return unix.ByteSliceToString(bytes) }
