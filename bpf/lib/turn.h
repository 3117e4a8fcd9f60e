/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets of flows that are turned around: see route.h. */
#ifndef SLUICE_TURN_H
#define SLUICE_TURN_H

#include "tuple.h"

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
 * is_of_flow reports whether the packet, which cannot be turned around, makes its flow f pass the stack. If that
 * is for what the packet is like, it has to be of the connection, as far as its numbers or its tag show.
 */
static __always_inline bool is_of_flow(struct __sk_buff *ctx, const struct packet *pkt,
				       const struct flow *f)
{
	const struct segment *tcp = &pkt->tcp;

	if (config_device_class == DEVICE_UPLINK && is_plain(ctx, &pkt->ip))
		return true;
	if (pkt->is_error)
		return false;
	if (f->proto == IPPROTO_UDP || is_new(f))
		return true;
	if (pkt->ip.later)
		return false;
	if (f->proto == IPPROTO_SCTP)
		return !f->end || pkt->sctp.tag == f->end;
	return is_near(tcp->end, f->end) && (!tcp->acks || is_near(tcp->ack, f->ack));
}

/*
 * unturn makes pkt->flow, which is turned around, pass the stack from now on: it puts the entries
 * of egress before the entries of ingress change. Without room for more entries in flows, these stay
 * half open. A packet that is not of the flow is dropped, and an error, which has no numbers to show, passes the
 * stack as it would leave, and changes nothing. It is for ingress, and global, so that the verifier walks it once.
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
	if (!is_of_flow(ctx, pkt, &pkt->flow))
		return pkt->is_error ? REASON_NEXT : REASON_DROP_NO_FLOW;
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
	why = put_opening(FLOW_TO_BACKEND);
	if (why)
		return why;
	if (open)
		put_back_all(pkt, has_share(pkt->flow.proto));
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

	if (!is_turned(f) || is_of_node(f) || find_turn(ctx, pkt))
		return REASON_NEXT;
	if (pkt->mtu)
		return REASON_FLOW_ERROR;
	pkt->flow = *f;
	why = unturn(ctx);
	goes_as(&pkt->flow, role, &pkt->to);
	return why;
}

/*
 * renew_masquerade writes the masquerade of pkt->flow into its entry of a role. It is global, so that the verifier walks
 * it once.
 */
__noinline int renew_masquerade(__u32 role)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	struct flow *entry;

	entry = pkt ? entry_of(pkt, &pkt->flow, role) : NULL;
	if (!entry)
		return 0;
	entry->masquerade = pkt->flow.masquerade;
	entry->masquerade_port = pkt->flow.masquerade_port;
	return 0;
}

/*
 * masquerade_here gives the flow of a packet that is the first to leave as its masquerade an address of the device at
 * hand. The stack may have sent it by another one than expected: it looks at ports, where routes are of equal cost,
 * and at marks. It is for egress, and global, so that the verifier walks it once.
 */
__noinline int masquerade_here(struct __sk_buff *ctx)
{
	struct packet *sent = packet_at(HOOK_EGRESS), *pkt = packet_at(HOOK_INGRESS);
	struct flow *f;
	struct addr source = {};
	int why;

	if (!sent || !pkt)
		return REASON_NEXT;
	f = &sent->flow;
	device_source(device_in(ctx), addr_is_v4(&f->backend), &source);
	if (addr_equal(&source, &f->masquerade))
		return REASON_NEXT;
	source_here(ctx, &f->client, &f->backend, &source);
	if (addr_is_any(&source) || addr_equal(&source, &f->masquerade))
		return REASON_NEXT;

	copy_sent(sent, pkt);
	pkt->flow = *f;
	take_side(&pkt->flow, entry_of(pkt, f, FLOW_FROM_BACKEND));
	release(HOOK_INGRESS, FLOW_FROM_BACKEND);
	pkt->flow.masquerade = source;
	pkt->flow.last_seen = pkt->now;
	pkt->flow.bytes = 0;
	why = reserve_port(ctx, FLOW_FROM_BACKEND);
	evict(pkt);
	if (why)
		return why;
	renew_masquerade(FLOW_FROM_CLIENT);
	renew_masquerade(FLOW_TO_CLIENT);
	renew_masquerade(FLOW_TO_BACKEND);
	goes_as(&pkt->flow, FLOW_TO_BACKEND, &sent->to);
	return REASON_NEXT;
}

/* decrement_ttl decrements the hop limit of a packet, as a router does. */
static __always_inline bool decrement_ttl(struct __sk_buff *ctx, const struct headers *ip)
{
	struct {
		__u8 ttl, protocol;
		__sum16 check;
	} new;
	const struct ipv6hdr *v6;
	const struct iphdr *v4;
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
	new.check = check + (check >= 0xffff);
	new.protocol = v4->protocol;
	new.ttl = v4->ttl - 1;
	return !bpf_skb_store_bytes(ctx, ip->l3 + offsetof(struct iphdr, ttl), &new, sizeof(new),
				    0);
}

#endif
