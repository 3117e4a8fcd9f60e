/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Datagrams of the node's own processes that are not translated at their socket, where they leave the node:
 * the Service did not exist yet, or had no backend, when the socket connected, or it has left the backend
 * that the socket got (see left.h). Such a datagram gets a flow, masqueraded and without the stack: it is
 * sent on by the route to its backend, with the source that the node prefers there. What the stack sees in
 * both directions is what the process has dialled.
 */
#ifndef SLUICE_OWN_H
#define SLUICE_OWN_H

#include "open.h"

/* is_own reports whether a packet that leaves the node was sent by a socket of the node's namespace. */
static __always_inline bool is_own(struct __sk_buff *ctx, const struct flow_key *came)
{
	struct bpf_sock *sk = ctx->sk;

	if (!sk)
		return false;
	sk = bpf_sk_fullsock(sk);
	return sk && bpf_htons(sk->src_port) == came->src_port &&
	       addr_flags(&came->src) & ADDR_NODE;
}

/*
 * may_be_dialled is the cheap check of every packet that leaves the node: may it be a datagram of a process
 * of this node to a Service, or to a backend that a Service has left?
 */
static __always_inline bool may_be_dialled(struct __sk_buff *ctx, const struct network *net)
{
	struct addr dst;

	if (net->proto != IPPROTO_UDP || !ctx->sk)
		return false;
	return peek_dst(ctx, net, &dst) && (may_be_ours(addr_hash(&dst)) || is_service_cidr(&dst));
}

/*
 * masquerade_own gives pkt->flow the backend at hand, and an address and a port of this node. It does not
 * lead to a backend that has an address of this node, because the stack takes no packets from itself. It is
 * global, so that the verifier walks it once.
 */
__noinline int masquerade_own(struct __sk_buff *ctx)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	struct route way;
	struct flow *f;
	int why;

	if (!pkt)
		return REASON_DROP_MASQUERADE_ADDR;
	f = &pkt->flow;
	f->backend = pkt->backend.addr;
	f->backend_port = pkt->backend.port;
	f->backend_id = pkt->backend.id;
	if (addr_flags(&f->backend) & ADDR_NODE)
		return REASON_DROP_MASQUERADE_ADDR;
	/* bpf_redirect_neigh requires an Ethernet frame. */
	if (!config_ethernet &&
	    (!find_route(ctx, &f->client, &f->backend, &way) || way.ifindex != device_in(ctx)))
		return REASON_DROP_MASQUERADE_ADDR;
	why = masquerade(ctx, pkt);
	evict(pkt);
	return why;
}

/*
 * find_own_pool copies the pool that serves the destination of what a process of this node sends. It is
 * global, so that the verifier walks it once.
 */
__noinline int find_own_pool(void)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	struct frontend_key original_dst = { .proto = IPPROTO_UDP, .scope = SCOPE_INTERNAL };

	if (!pkt)
		return REASON_PASS_NO_FRONTEND;
	original_dst.addr = pkt->ip.key.dst;
	original_dst.port = pkt->ip.key.dst_port;
	return lookup_dial(&original_dst, false, &pkt->pool);
}

/*
 * find_own_client sets pkt->key.src to the address by which the process that sends the packet is a client, as at sockets:
 * that of the node, unless the application has chosen another. The source of the packet may be that of any uplink. It
 * is global, so that the verifier walks it once.
 */
__noinline int find_own_client(struct __sk_buff *ctx)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	struct bpf_sock *held = ctx->sk;
	const struct sock *sk = NULL;
	const struct flow_key *came;

	if (!pkt)
		return 0;
	came = &pkt->ip.key;
	bpf_probe_read_kernel(&sk, sizeof(sk), &held);
	if (has_chosen_addr(sk) || !node_addr(addr_is_v4(&came->src), &pkt->key.src))
		pkt->key.src = came->src;
	return 0;
}

/*
 * pick_own picks a backend of pkt->pool for a process of this node: after find_own_client. It is global, so that the
 * verifier walks it once.
 */
__noinline int pick_own(void)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	struct affinity_key client;
	const struct backend *be;
	const struct pool *pool;
	__u32 seed;

	if (!pkt)
		return REASON_DROP_BACKEND_MISSING;
	pool = &pkt->pool;
	if (pool->flags & POOL_SOURCE_RANGES && !is_in_ranges(pool, &pkt->key.src))
		return REASON_DROP_SOURCE_RANGE;
	client = addr_client(pool->service_port_id, &pkt->key.src);
	seed = pool->algorithm == ALGORITHM_SH ? client_at(&pkt->key.src) :
						 seed_of_packet(pool, &pkt->ip.key);
	be = pick_backend(pool, &client, seed, pkt->now, false);
	if (!be)
		return why_no_backend(pool);
	pkt->backend = *be;
	return REASON_NEXT;
}

/*
 * open_own opens a flow of a process of this node to a backend of pkt->pool. Another one is picked if the
 * process cannot reach the first from here.
 */
static __always_inline enum reason open_own(struct __sk_buff *ctx, struct packet *pkt)
{
	const struct flow_key *came = &pkt->ip.key;
	const struct backend *be;
	enum reason why;
	int i;

	find_own_client(ctx);
	why = pick_own();
	if (why)
		return why;
	pkt->flow = (struct flow){
		.client = came->src,
		.client_port = came->src_port,
		.stack_port = came->src_port,
		.original_dst = came->dst,
		.original_port = came->dst_port,
		.proto = came->proto,
		.service_port_id = pkt->pool.service_port_id,
		.created = pkt->now,
		.last_seen = pkt->now,
		.flags = FLOW_COUNTED | FLOW_OF_NODE | FLOW_MASQUERADED | FLOW_TURNED | FLOW_SENT |
			 (pkt->left ? FLOW_RESTEERED : 0),
	};
	for (i = 0; i < MAX_BACKENDS; i++) {
		why = masquerade_own(ctx);
		if (why != REASON_DROP_MASQUERADE_ADDR)
			break;
		be = pick_random(&pkt->pool);
		if (!be)
			break;
		pkt->backend = *be;
	}
	if (why)
		return why;
	why = put_entries(pkt);
	if (why) {
		release(HOOK_INGRESS, FLOW_FROM_BACKEND);
		return why;
	}
	add_load(ctx, pkt);
	if (config_heal)
		note_attempt(pkt->flow.backend_id, pkt->pool.service_port_id, client_of(&pkt->flow),
			     pkt->now);
	count_bytes(pkt->pool.service_port_id, pkt->ip.end - pkt->ip.l3, 0);
	return REASON_TRANSLATED;
}

/* join_own makes the packet at egress one of the flow that another CPU has just opened for its process. */
static __always_inline enum reason join_own(struct packet *sent)
{
	bool half_open;
	struct flow *f = find_flow(sent, &sent->ip.key, &half_open);

	if (!f)
		return REASON_DROP_FLOW_TABLE;
	f->bytes += sent->ip.end - sent->ip.l3;
	sent->role = f->role;
	return REASON_FLOW;
}

/*
 * lead_own handles a datagram that leaves the node without a flow: it opens one, or joins that of REASON_FLOW, or
 * returns why the datagram is refused, or REASON_PASS_OTHER_TRAFFIC. It is for egress, and global, so that the verifier
 * walks it once.
 */
__noinline int lead_own(struct __sk_buff *ctx)
{
	struct packet *sent = packet_at(HOOK_EGRESS), *pkt = packet_at(HOOK_INGRESS);
	enum reason why = REASON_PASS_NO_FRONTEND;

	if (!sent || !pkt || sent->event != EVENT_OPEN || sent->ip.key.proto != IPPROTO_UDP ||
	    !is_own(ctx, &sent->ip.key))
		return REASON_PASS_OTHER_TRAFFIC;
	copy_sent(sent, pkt);
	if (addr_flags(&pkt->ip.key.dst) & ADDR_LEFT)
		why = find_left(ctx);
	if (why == REASON_PASS_NO_FRONTEND)
		why = find_own_pool();
	if (why == REASON_PASS_NO_FRONTEND)
		return REASON_PASS_OTHER_TRAFFIC;
	if (why)
		return why;
	sent->service_port_id = pkt->pool.service_port_id;
	pkt->replaces = 0;
	if (begin_alone(HOOK_EGRESS))
		return join_own(sent);
	why = open_own(ctx, pkt);
	end_beginning();
	count_new(sent->service_port_id, why);
	if (why != REASON_TRANSLATED)
		return why;
	goes_as(&pkt->flow, FLOW_FROM_CLIENT, &sent->to);
	sent->flow.backend_id = pkt->flow.backend_id;
	sent->role = FLOW_FROM_CLIENT;
	return REASON_TRANSLATED;
}

/*
 * Connections and datagrams of the node's own processes from a port with which a client is masqueraded to the
 * same destination: the masquerade may have the ports that the kernel hands out. To the destination both would
 * be one, so that of the process gets another port, as netfilter does it.
 */

/*
 * may_be_beside is the cheap check of every packet that leaves the node: may it be the first one of a process
 * of this node from such a port?
 */
static __always_inline bool may_be_beside(struct __sk_buff *ctx, const struct network *net,
					  __be16 port)
{
	return ctx->sk && (net->proto == IPPROTO_UDP || peek_syn(ctx, net)) &&
	       may_be_our_port(port);
}

/*
 * open_beside_own handles the first packet of a process of this node that has no flow: it opens one with
 * another port if a masqueraded flow holds the tuple of its replies, or returns REASON_PASS_OTHER_TRAFFIC. It
 * is for egress, and global, so that the verifier walks it once.
 */
__noinline int open_beside_own(struct __sk_buff *ctx)
{
	struct packet *sent = packet_at(HOOK_EGRESS), *pkt = packet_at(HOOK_INGRESS);
	const struct flow_key *came;
	struct flow *had;
	int why;

	if (!sent || !pkt || sent->event != EVENT_OPEN || sent->ip.key.proto == IPPROTO_SCTP ||
	    !may_be_our_port(sent->ip.key.src_port) || !is_own(ctx, &sent->ip.key))
		return REASON_PASS_OTHER_TRAFFIC;
	copy_sent(sent, pkt);
	came = &pkt->ip.key;
	reversed(came, &pkt->key);
	pkt->key.hook = HOOK_INGRESS;
	had = bpf_map_lookup_elem(&sl_flows, &pkt->key) ?: half_open_at(&pkt->key);
	if (!copy_holder(pkt, had) || pkt->gone.role != FLOW_FROM_BACKEND)
		return REASON_PASS_OTHER_TRAFFIC;
	pkt->flow = (struct flow){
		.client = came->src,
		.client_port = came->src_port,
		.original_dst = came->dst,
		.original_port = came->dst_port,
		.backend = came->dst,
		.backend_port = came->dst_port,
		.proto = came->proto,
		.service_port_id = pkt->gone.service_port_id,
		.backend_id = pkt->gone.backend_id,
		.created = pkt->now,
		.last_seen = pkt->now,
		.flags = FLOW_OF_NODE | FLOW_RESTEERED,
	};
	if (hold_on_tuple(pkt, &pkt->gone) == HOLD_NONE) {
		report_bytes(&pkt->gone);
		forget_all(pkt);
		return REASON_PASS_OTHER_TRAFFIC;
	}
	why = reserve_port(ctx, FLOW_TO_CLIENT);
	evict(pkt);
	if (!why)
		why = put_entries(pkt);
	if (why) {
		release(HOOK_INGRESS, FLOW_TO_CLIENT);
		return REASON_PASS_OTHER_TRAFFIC;
	}
	goes_as(&pkt->flow, FLOW_FROM_CLIENT, &sent->to);
	sent->role = FLOW_FROM_CLIENT;
	return REASON_TRANSLATED;
}

/*
 * find_entrance finds the device by which the stack expects an answer to a process of this node, because
 * the route to what the process has dialled leads there: a strict reverse path filter (rp_filter) drops it
 * elsewhere. It sets pkt->enters if that is another device than the one at hand. It is for ingress, and
 * global, so that the verifier walks it once.
 */
__noinline int find_entrance(struct __sk_buff *ctx)
{
	struct bpf_fib_lookup fib = { .ifindex = device_in(ctx), .tot_len = 1 };
	struct packet *pkt = packet_at(HOOK_INGRESS);

	if (!pkt || !config_ethernet)
		return 0;
	set_fib_addrs(&fib, &pkt->to.dst, &pkt->to.src);
	if (bpf_fib_lookup(ctx, &fib, sizeof(fib), 0) != BPF_FIB_LKUP_RET_SUCCESS ||
	    fib.ifindex == device_in(ctx))
		return 0;
	pkt->enters = fib.ifindex;
	__builtin_memcpy(pkt->enters_as, fib.smac, sizeof(pkt->enters_as));
	return 0;
}

#endif
