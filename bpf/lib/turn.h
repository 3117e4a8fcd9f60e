/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Turning packets around at the device by which they come. What a client outside says to a
 * backend on another node comes to this node only to be masqueraded: it is, at ingress, and
 * leaves by the device to which a route leads. The answers go the same way back. The stack sees
 * neither, and a flow needs no entries at egress.
 *
 * A packet that the stack has to see is led there with the backend's address, and its flow
 * stays there. That is decided for each packet, and before it is written: the stack drops
 * what comes to it from an address of this node.
 */
#ifndef SLUICE_TURN_H
#define SLUICE_TURN_H

#include <stddef.h>
#include <linux/udp.h>

#include "masquerade.h"

#define MIN_HOPS 2 /* one is taken here */

/*
 * is_plain reports whether nothing of a packet but its addresses, its ports and its hops concerns
 * a router. Fragments, options, and what is wrong with a packet are the stack's.
 */
static __always_inline bool is_plain(struct __sk_buff *ctx, const struct headers *ip)
{
	const struct ipv6hdr *v6;
	const struct iphdr *v4;

	/* bpf_redirect_neigh wants the IP header behind that of Ethernet, and a frame to us alone. */
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
 * length_of is how long the IP packet will be on the wire; of one that will be cut into segments,
 * each of them. 0 is too long to be turned.
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

/* may_be_cut reports whether a router may make fragments of a packet. */
static __always_inline bool may_be_cut(struct __sk_buff *ctx, const struct headers *ip)
{
	const struct iphdr *v4 = ip->v6 ? NULL : peek(ctx, ip->l3, sizeof(*v4));

	return v4 && !(v4->frag_off & V4_DONT_FRAGMENT);
}

/*
 * find_turn finds the way of a packet to pkt->to.dst that leads past the stack, as the stack would
 * send it, and is false if there is none: then it is the stack's, or too long: pkt->mtu. See
 * DEVICE_TURNS.
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
 * may_turn reports whether the flow of a new packet to a backend beyond this node may be turned. What
 * the client is told has to leave by the device by which the client came.
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
	pkt->mtu = 0; /* the stack says so */
	return false;
}

/* take_side has an entry know what another one does of the same side of its flow. */
static __always_inline void take_side(struct flow *f, const struct flow *from)
{
	f->state = from ? from->state : FLOW_OPEN;
	f->ending = from ? from->ending : 0;
	f->stamp = from ? from->stamp : 0;
	f->end = from ? from->end : 0;
	f->ack = from ? from->ack : 0;
}

/* lead_through_stack has an entry say of its flow what pkt->flow does. */
static __always_inline void lead_through_stack(const struct packet *pkt, struct flow *entry)
{
	if (!entry)
		return;
	entry->stack_port = pkt->flow.stack_port;
	entry->flags = (entry->flags | pkt->flow.flags) & ~FLOW_TURNED;
}

/*
 * unturn leads pkt->flow, which is turned, through the stack from now on: it gets the entries of
 * egress, before what comes at ingress is led there. It is for ingress; and global, so that
 * the verifier looks at it once.
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
 * turn_or_pass decides whether a packet of the entry f is turned, if f is: pkt->turns. If not,
 * pkt->to is what the stack shall see of it; or it goes nowhere, and its sender is told pkt->mtu.
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

/* spend_hop takes one of the packet's hops, as a router does. */
static __always_inline bool spend_hop(struct __sk_buff *ctx, const struct headers *ip)
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
	/* The checksum makes up for it, in the packet and in what the device has added up. */
	check = v4->check + bpf_htons(0x0100);
	v4->check = check + (check >= 0xffff);
	v4->ttl--;
	return true;
}

#endif
