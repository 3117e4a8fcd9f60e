/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Turning packets around at the device on which they arrive. A packet of a client outside to a
 * backend on another node passes this node only to be masqueraded: that happens at ingress, and
 * the packet leaves by the device of its route. Answers are turned around in the same way. The
 * stack sees neither, and the flow needs no entries at egress.
 *
 * A packet that the stack has to see goes there with the backend's address, and its flow stays in
 * the stack from then on. That is decided for each packet before it is written, because the stack
 * drops packets from an address of this node.
 */
#ifndef SLUICE_TURN_H
#define SLUICE_TURN_H

#include <stddef.h>
#include <linux/udp.h>

#include "masquerade.h"

#define MIN_HOPS 2 /* this node takes one */

/*
 * is_plain reports whether a router would only look at the addresses and the hop limit of a
 * packet. Fragments, options and invalid packets are for the stack.
 */
static __always_inline bool is_plain(struct __sk_buff *ctx, const struct headers *ip)
{
	const struct ipv6hdr *v6;
	const struct iphdr *v4;

	/* bpf_redirect_neigh requires an untagged Ethernet frame that is addressed to this node. */
	if (ctx->vlan_present || ctx->pkt_type != PACKET_HOST || ip->l3 != ETH_HLEN || ip->fragment)
		return false;
	if (ip->v6) {
		v6 = peek(ctx, ip->l3, sizeof(*v6));
		return v6 && ip->l4 == ip->l3 + sizeof(*v6) && v6->hop_limit >= MIN_HOPS;
	}
	v4 = peek(ctx, ip->l3, sizeof(*v4));
	return v4 && ip->l4 == ip->l3 + sizeof(*v4) && v4->ttl >= MIN_HOPS;
}

/*
 * length_of returns the length of the IP packet on the wire, or that of each segment if it will be
 * segmented; 0 if it is too long to be turned around.
 */
static __always_inline __u16 length_of(struct __sk_buff *ctx, const struct headers *ip)
{
	const struct tcp_header *tcp;
	__u32 length = ip->end - ip->l3;

	if (ctx->gso_size) {
		length = ip->l4 - ip->l3 + sizeof(struct udphdr) + ctx->gso_size;
		if (ip->key.proto == IPPROTO_TCP) {
			tcp = peek(ctx, ip->l4, sizeof(*tcp));
			if (!tcp)
				return 0;
			length += (tcp->length >> 4) * 4 - sizeof(struct udphdr);
		}
	}
	return length <= 0xffff ? length : 0;
}

/* may_be_cut reports whether a router may fragment a packet. */
static __always_inline bool may_be_cut(struct __sk_buff *ctx, const struct headers *ip)
{
	const struct iphdr *v4 = ip->v6 ? NULL : peek(ctx, ip->l3, sizeof(*v4));

	return v4 && !(v4->frag_off & V4_DONT_FRAGMENT);
}

/*
 * find_turn finds the route of a packet to pkt->to.dst that bypasses the stack, as the stack would
 * send it. It is false if there is none, and sets pkt->mtu if the packet is too long for the
 * route. See DEVICE_TURNS.
 */
static __noinline bool find_turn(struct __sk_buff *ctx, struct packet *pkt)
{
	struct bpf_fib_lookup fib = { .ifindex = ctx->ifindex };
	const struct device *dev;
	__u32 out;
	long found;

	if (config_device_class != DEVICE_UPLINK || config_bridge_port || !is_plain(ctx, &pkt->ip))
		return false;
	fib.tot_len = length_of(ctx, &pkt->ip);
	if (!fib.tot_len)
		return false;
	set_fib_addrs(&fib, &pkt->ip.key.src, &pkt->to.dst);
	found = bpf_fib_lookup(ctx, &fib, sizeof(fib), 0);
	if (found == BPF_FIB_LKUP_RET_FRAG_NEEDED && !pkt->is_error && !may_be_cut(ctx, &pkt->ip))
		pkt->mtu = fib.mtu_result;
	if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return false;
	out = fib.ifindex;
	dev = bpf_map_lookup_elem(&sl_devices, &out);
	if (!dev || !(dev->flags & DEVICE_TURNS))
		return false;
	pkt->out = out;
	pkt->next.nh_family = fib.family;
	__builtin_memcpy(pkt->next.ipv6_nh, fib.ipv6_dst, sizeof(pkt->next.ipv6_nh));
	pkt->turns = true;
	return true;
}

/*
 * may_turn reports whether the flow of a new packet to a remote backend may be turned around. Its
 * answers have to leave by the device on which the client came.
 */
static __always_inline bool may_turn(struct __sk_buff *ctx, struct packet *pkt,
				     const struct backend *be)
{
	struct route back;

	if (be->flags & BACKEND_LOCAL)
		return false;
	pkt->to.dst = be->addr;
	if (find_route(ctx, &be->addr, &pkt->ip.key.src, &back) && back.ifindex == ctx->ifindex &&
	    find_turn(ctx, pkt))
		return true;
	pkt->mtu = 0; /* the stack sends the error */
	return false;
}

/* take_side copies the state of one side of a flow from another entry, or NULL. */
static __always_inline void take_side(struct flow *f, const struct flow *from)
{
	f->state = from ? from->state : FLOW_OPEN;
	f->ending = from ? from->ending : 0;
	f->stamp = from ? from->stamp : 0;
	f->end = from ? from->end : 0;
	f->ack = from ? from->ack : 0;
}

/*
 * lead_through_stack updates an entry for the change of pkt->flow from turned around to passing
 * the stack.
 */
static __always_inline void lead_through_stack(const struct packet *pkt, struct flow *entry)
{
	if (!entry)
		return;
	entry->stack_port = pkt->flow.stack_port;
	entry->flags = (entry->flags | pkt->flow.flags) & ~FLOW_TURNED;
}

/*
 * unturn makes pkt->flow, which is turned around, pass the stack from now on: it puts the entries
 * of egress before the entries of ingress change. It is for ingress, and global, so that the
 * verifier walks it once.
 */
__noinline int unturn(struct __sk_buff *ctx)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	struct flow *client, *backend;
	const struct flow *opening;
	bool open;
	int why;

	if (!pkt)
		return REASON_DROP_FLOW_TABLE;
	client = entry_of(pkt, &pkt->flow, FLOW_FROM_CLIENT);
	opening = half_open_at(&pkt->key);
	open = !opening || opening->created != pkt->flow.created;
	backend = entry_of(pkt, &pkt->flow, FLOW_FROM_BACKEND);
	pkt->flow.flags &= ~FLOW_TURNED;
	pkt->flow.last_seen = pkt->now;
	pkt->flow.bytes = 0;

	take_side(&pkt->flow, backend);
	why = reserve_own_port(ctx, &pkt->flow);
	if (why == REASON_DROP_MASQUERADE_PORT) {
		count_flows(COUNT_STACK_PORTS, 1);
		why = reserve_port(ctx, FLOW_TO_CLIENT);
	}
	evict(pkt);
	if (why)
		return why;
	take_side(&pkt->flow, client);
	why = put_opening(pkt, FLOW_TO_BACKEND);
	if (why)
		return why;
	if (open) {
		put_back_all(pkt);
		release_all(pkt);
	}
	lead_through_stack(pkt, client);
	lead_through_stack(pkt, backend);
	return REASON_NEXT;
}

/*
 * turn_or_pass decides whether a packet of the entry f is turned around, and sets pkt->turns if
 * so. Otherwise pkt->to becomes the tuple that the stack sees, or the sender gets an error with
 * pkt->mtu.
 */
static __always_inline int turn_or_pass(struct __sk_buff *ctx, struct packet *pkt,
					const struct flow *f)
{
	__u8 role = f->role;
	int why;

	if (!is_turned(f) || find_turn(ctx, pkt))
		return REASON_NEXT;
	if (pkt->mtu)
		return REASON_FLOW_ERROR;
	pkt->flow = *f;
	why = unturn(ctx);
	goes_as(&pkt->flow, role, &pkt->to);
	return why;
}

/* decrement_ttl decrements the hop limit of a packet, as a router does. */
static __always_inline bool decrement_ttl(struct __sk_buff *ctx, const struct headers *ip)
{
	const struct ipv6hdr *v6;
	struct iphdr *v4;
	__u32 check;
	__u8 hops;

	if (ip->v6) {
		v6 = peek(ctx, ip->l3, sizeof(*v6));
		if (!v6)
			return false;
		hops = v6->hop_limit - 1;
		return !bpf_skb_store_bytes(ctx, ip->l3 + offsetof(struct ipv6hdr, hop_limit),
					    &hops, sizeof(hops), BPF_F_RECOMPUTE_CSUM);
	}
	v4 = peek(ctx, ip->l3, sizeof(*v4));
	if (!v4)
		return false;
	/*
	 * The header checksum compensates the change, also in the sum that the device has computed.
	 */
	check = v4->check + bpf_htons(0x0100);
	v4->check = check + (check >= 0xffff);
	v4->ttl--;
	return true;
}

#endif
