/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The first packet of a flow: it is assigned to a backend, and the entries of the flow are put. */
#ifndef SLUICE_OPEN_H
#define SLUICE_OPEN_H

#include "left.h"
#include "beginning.h"
#include "reason.h"
#include "pick.h"
#include "reset.h"
#include "turn.h"

/* How many backends are tried if another flow of the client's port has the first one. */
#define MAX_BACKENDS 3

/*
 * misses_node reports whether replies of a backend that has no address of this node would bypass
 * the node, or the backend would answer itself, unless the client is masqueraded: after find_back.
 */
static __always_inline bool misses_node(struct __sk_buff *ctx, const struct packet *pkt,
					const struct backend *be)
{
	const struct addr *client = &pkt->ip.key.src;

	return addr_equal(&be->addr, client) || (!is_pod(ctx, pkt) && !is_here(ctx, be, client));
}

/*
 * set_backend gives pkt->flow the backend at hand, and sets whether it is masqueraded, and whether it is
 * foreign. The replies of a backend with an address of this node never leave it. It is global, so that the
 * verifier walks it once.
 */
__noinline int set_backend(struct __sk_buff *ctx)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	const struct backend *be;
	struct flow *f;

	if (!pkt)
		return 0;
	be = &pkt->backend;
	f = &pkt->flow;
	f->backend = be->addr;
	f->backend_port = be->port;
	f->backend_id = be->id;
	f->stack_port = f->client_port;
	f->flags &= ~FLOW_MASQUERADED;
	if (is_of_node(f))
		return 0;
	find_back(ctx, pkt, &be->addr, &pkt->ip.key.src);
	f->flags &= ~FLOW_OF_NODE;
	if (is_behind_device(ctx, pkt))
		f->flags |= class_flag(config_device_class);
	if (addr_flags(&be->addr) & ADDR_NODE)
		note_port(be->port); /* for direct connections to it: see open_beside */
	else if (pkt->pool.flags & POOL_MASQUERADE || misses_node(ctx, pkt, be))
		f->flags |= FLOW_MASQUERADED;
	return 0;
}

/*
 * reserve_reply reserves the tuple of the backend's replies for pkt->flow. If another flow, or a
 * direct connection, of the client's port has that very backend, it picks another backend, or
 * changes the client's port for the stack of the node and the backend.
 */
static __always_inline int reserve_reply(struct __sk_buff *ctx, struct packet *pkt)
{
	const struct backend *other;
	int why, i;

	for (i = 0; i < MAX_BACKENDS; i++) {
		why = reserve_own_port(ctx, &pkt->flow);
		if (why != REASON_DROP_MASQUERADE_PORT)
			return why;
		if (pkt->pool.affinity_seconds || is_foreign(&pkt->flow))
			break;
		other = pick_random(&pkt->pool);
		if (!other)
			break;
		pkt->backend = *other;
		set_backend(ctx);
	}
	count_flows(COUNT_STACK_PORTS, 1);
	return reserve_port(ctx, FLOW_TO_CLIENT);
}

/* leads_back reports whether the route from src to the client leaves by the device at hand. */
static __always_inline bool leads_back(struct __sk_buff *ctx, const struct addr *src,
				       const struct addr *client)
{
	struct route back;

	return find_route(ctx, src, client, &back) && back.ifindex == device_in(ctx);
}

/*
 * note_return marks pkt->flow if its replies have to be routed from the original destination: after find_back,
 * routed from the backend's address, they would leave by another device than the one at hand.
 */
static __always_inline void note_return(struct __sk_buff *ctx, struct packet *pkt)
{
	struct flow *f = &pkt->flow;

	if (config_device_class == DEVICE_UPLINK && !is_turned(f) && pkt->back != device_in(ctx) &&
	    leads_back(ctx, &f->original_dst, &f->client))
		f->flags |= FLOW_RETURNS;
}

/* put_entries puts the remaining entries. The entry of the client's packets comes last. */
static __always_inline int put_entries(struct packet *pkt)
{
	struct flow *f = &pkt->flow;
	int why = REASON_NEXT;

	/* It was reserved first, before the masquerade and the return were known. */
	if (!is_turned(f) && f->flags & (FLOW_MASQUERADED | FLOW_RETURNS))
		why = complete_opening(pkt, FLOW_TO_CLIENT);
	f->end = 0; /* of the packets from the client */
	if (!why)
		why = put_opening(FLOW_TO_BACKEND);
	if (f->proto == IPPROTO_TCP)
		f->end = pkt->tcp.end; /* the packet at hand is the first of this entry */
	if (f->proto == IPPROTO_UDP)
		f->ack = checked_at(pkt->now);
	if (pkt->refused)
		f->ending |= FLOW_REFUSED;
	return why ?: put_opening(FLOW_FROM_CLIENT);
}

/* remember reserves the tuples of the new flow and puts its entries. */
static __always_inline int remember(struct __sk_buff *ctx, struct packet *pkt)
{
	struct flow *f = &pkt->flow;
	int why = REASON_NEXT;

	set_backend(ctx);
	if (f->proto == IPPROTO_UDP && !(f->flags & FLOW_BY_UPLINKS && is_masqueraded(f)))
		note_port(DIRECT_PORT); /* see yield_to_datagram */
	if (is_masqueraded(f) && try_turn(ctx, pkt, &pkt->backend))
		f->flags |= FLOW_TURNED | FLOW_SENT;
	else
		why = reserve_reply(ctx, pkt);
	evict(pkt);
	if (why)
		return why;
	note_return(ctx, pkt);
	if (is_masqueraded(f)) {
		why = masquerade(ctx, pkt);
		evict(pkt);
	}
	if (!why)
		why = put_entries(pkt);
	if (why) {
		release(HOOK_INGRESS, FLOW_TO_CLIENT);
		release(HOOK_INGRESS, FLOW_FROM_BACKEND);
	}
	return why;
}

/*
 * scope_of returns the scope of the frontends that a client can reach. The internal scope is for
 * pods of this node: the packets that arrive on a device of pods, unless detectLocalMode requires
 * a source in local_cidrs as well. A packet that arrives on an uplink or a tunnel comes from
 * another node, even with the address of a pod.
 */
static __always_inline __u8 scope_of(const struct addr *src)
{
	struct cidr_key key = { .prefix_len = 128, .addr = *src };

	if (config_device_class != DEVICE_PODS)
		return SCOPE_EXTERNAL;
	if (config_scope_by_source && !bpf_map_lookup_elem(&sl_local_cidrs, &key))
		return SCOPE_EXTERNAL;
	return SCOPE_INTERNAL;
}

/* seed_of_packet returns the seed of the pool's algorithm: see choose. */
static __always_inline __u32 seed_of_packet(const struct pool *pool, const struct flow_key *came)
{
	switch (pool->algorithm) {
	case ALGORITHM_RR:
		return turn_of(&came->dst, came->dst_port, came->proto, scope_of(&came->src));
	case ALGORITHM_SH:
		return client_at(&came->src);
	case ALGORITHM_DH:
		return hash(&came->dst, sizeof(came->dst));
	default:
		return hash(came, sizeof(*came));
	}
}

/*
 * better_instead returns the lesser of best and rank, if the backend in a slot may take over: it is not the
 * one with this id, is no suspect, and has not just refused a connection. It is global as less_loaded is.
 */
__noinline __u32 better_instead(__u32 best, __u32 slot, __u32 rank, __u32 id, __u64 now)
{
	__u32 other = slot_at(slot);

	return rank < best && other != id && !is_suspect(other) && !has_refused(other, now) ? rank :
											      best;
}

/*
 * instead_of returns the id of a backend among the count slots from base on that may take over, and
 * is not the one with this id, or 0. Of several, each has the same chance. At the time NEVER no refusal
 * counts. It is global, so that the verifier walks it once.
 */
__noinline __u32 instead_of(__u32 base, __u32 count, __u32 id, __u64 now)
{
	__u32 random = bpf_get_prandom_u32(), best = ~0U, i;
	__u64 next;

	for (i = 0; i < MAX_COMPARED && i < count; i++) {
		next = compared(count, random, i);
		best = better_instead(best, base + (next >> 32), next, id, now);
	}
	if (best == ~0U)
		return 0;
	return slot_at(base + (compared(count, random, best % MAX_COMPARED) >> 32));
}

/*
 * may_leave reports whether the flow of the packet, whose backend does not answer, may get another one.
 * The SYN of a client with affinity only leaves a suspect, or a backend that has refused this connection,
 * and a datagram stays if so many are suspects that none is passed over.
 */
static __always_inline bool may_leave(const struct packet *pkt, bool refused)
{
	const struct pool *pool = &pkt->pool;

	if (pool->flags & POOL_NO_RESTEER)
		return false;
	if (pkt->ip.key.proto == IPPROTO_UDP)
		return are_few_suspects(pool->slot_base, pool->slot_count);
	return !pool->affinity_seconds || refused || is_suspect(pkt->given_up);
}

/*
 * pick_instead sets pkt->backend to another backend of pkt->pool than pkt->given_up, rather one that has
 * not just refused a connection, and is false if there is none.
 */
static __always_inline bool pick_instead(struct packet *pkt)
{
	const struct pool *pool = &pkt->pool;
	__u32 base = pool->slot_base, count = pool->slot_count;
	const struct backend *be;

	be = pick_id(pool, instead_of(base, count, pkt->given_up, pkt->now) ?:
				   instead_of(base, count, pkt->given_up, NEVER));
	if (be)
		pkt->backend = *be;
	return be;
}

/*
 * open_flow picks a backend for a new flow, and sets pkt->to to the tuple of its first packet. It
 * returns REASON_NEXT if a flow that is unanswered stays as it is.
 */
static __always_inline enum reason open_flow(struct __sk_buff *ctx, struct packet *pkt)
{
	const struct pool *pool = &pkt->pool;
	const struct flow_key *came = &pkt->ip.key;
	struct affinity_key client = addr_client(pool->service_port_id, &came->src);
	bool joins = came->proto == IPPROTO_TCP && pkt->tcp.joins;
	const struct backend *be;
	enum reason why;

	if (pkt->given_up) {
		if (!may_leave(pkt, pkt->refused) || !pick_instead(pkt))
			return REASON_NEXT;
		if (pool->affinity_seconds && is_suspect(pkt->given_up))
			keep_backend(&sl_claims, &client, pkt->backend.id, pkt->now);
	} else {
		be = pick_backend(pool, &client, seed_of_packet(pool, came), pkt->now, false);
		if (!be)
			return why_no_backend(pool);
		pkt->backend = *be;
	}

	pkt->flow = (struct flow){
		.client = came->src,
		.client_port = came->src_port,
		.original_dst = came->dst,
		.original_port = came->dst_port,
		.proto = came->proto,
		.service_port_id = pool->service_port_id,
		.created = pkt->now,
		.last_seen = pkt->now,
		.state = joins ? FLOW_JOINING : FLOW_NEW,
		.flags = FLOW_COUNTED | (pkt->left ? FLOW_RESTEERED : 0),
		.end = came->proto == IPPROTO_SCTP ? pkt->sctp.asks : 0, /* of the replies */
	};
	why = remember(ctx, pkt);
	if (why)
		return why;

	add_load(ctx, pkt);
	if (is_attempt(ctx, pkt))
		note_attempt(pkt->flow.backend_id, pool->service_port_id, client_of(&pkt->flow),
			     pkt->now);
	count_bytes(pool->service_port_id, pkt->ip.end - pkt->ip.l3, 0);

	goes_as(&pkt->flow, FLOW_FROM_CLIENT, &pkt->to);
	return REASON_TRANSLATED;
}

/*
 * has_no_host reports whether no host can send packets from an address: it is unspecified, or that of a group,
 * of all hosts, or loopback. The stack drops such packets, unless they are turned around.
 */
static __always_inline bool has_no_host(const struct addr *a)
{
	__u32 v4 = bpf_ntohl(a->words[3]);

	if (addr_is_loopback(a) || addr_is_any(a))
		return true;
	if (!addr_is_v4(a))
		return a->bytes[0] == 0xff;
	return !(v4 >> 24) || v4 >> 28 == 0xe || v4 == 0xffffffff;
}

/*
 * is_no_client reports whether the source of a first packet is none of a client: no host has it, or only
 * Services have it. A Service answers as that of its clients, and not on its own, and two of them would answer each
 * other without end. An external address may be a host's as well, as a load balancer's, or that by which pods leave
 * the cluster: what comes from it is a client's but for datagrams from a Service's port. And all of a ClusterIP that
 * the node has is its own.
 */
static __always_inline bool is_no_client(const struct flow_key *came)
{
	struct frontend_key from = {
		.addr = came->src,
		.port = came->src_port,
		.proto = came->proto,
		.scope = SCOPE_EXTERNAL,
	};
	__u32 flags;

	if (has_no_host(&came->src))
		return true;
	flags = may_be_ours(addr_hash(&came->src)) ? addr_flags(&came->src) : 0;
	if (!(flags & ADDR_SERVICE) || flags & ADDR_NODE)
		return false;
	return is_cluster_ip(&from) ||
	       (came->proto == IPPROTO_UDP && bpf_map_lookup_elem(&sl_frontend_ids, &from));
}

/*
 * is_nodes_own reports whether the packet is to a ClusterIP that this node has as an address, and to
 * a port on which a socket of the node is bound to it (NodeLocal DNSCache). It is global, so that the
 * verifier walks it once.
 */
__noinline int is_nodes_own(struct __sk_buff *ctx)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	struct frontend_key original_dst = {};

	if (!pkt)
		return false;
	original_dst.addr = pkt->ip.key.dst;
	original_dst.scope = SCOPE_INTERNAL; /* a ClusterIP has a catch-all in each */
	return is_cluster_ip(&original_dst) &&
	       is_served_here(ctx, &pkt->ip.key.dst, pkt->ip.key.dst_port, pkt->ip.key.proto);
}

/*
 * is_awaited reports whether the packet, to an address of this node, is a datagram that answers one from there:
 * netfilter tracks that, which may have come from a pod and was masqueraded, or a socket is connected to the
 * sender. A socket that is only bound waits for any sender, and proves nothing to a Service. It is global, so that
 * the verifier walks it once.
 */
__noinline int is_awaited(struct __sk_buff *ctx)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	const struct flow_key *came;
	__u32 size;

	if (!pkt || pkt->ip.key.proto != IPPROTO_UDP)
		return false;
	came = &pkt->ip.key;
	size = tuple_of(came, &pkt->tuple);
	return has_socket(ctx, &pkt->tuple, size, IPPROTO_UDP) ||
	       is_tracked(ctx, came, &pkt->tuple, TRACKED_AWAITED);
}

static __always_inline enum reason lookup_frontend(const struct flow_key *came, __u32 flags,
						   struct pool *pool)
{
	struct frontend_key original_dst = {
		.addr = came->dst,
		.port = came->dst_port,
		.proto = came->proto,
		.scope = scope_of(&came->src),
	};
	enum reason why = REASON_PASS_NO_FRONTEND;

	if (has_ports(came->proto)) {
		if (flags & ADDR_SERVICE)
			why = find_pool(&original_dst, pool);
		if (why == REASON_PASS_NO_FRONTEND && flags & ADDR_NODE_PORT)
			why = find_node_port(&original_dst, pool);
	}
	/* Other ports of the node stay reachable even if a Service has the address of the node. */
	if (why != REASON_PASS_NO_FRONTEND || flags & ADDR_NODE)
		return why;
	return why_no_frontend(&original_dst);
}

/*
 * why_no_flow returns the reason for a packet, or an ICMP error about one of the other direction, that belongs to no
 * flow and begins none; pkt->came is the tuple of its connection. If that is to a Service, it is refused: the stack
 * would only forward it, the router send it back, and so on until its hops are used up. But a connection that
 * netfilter knows passes, which kube-proxy may have given to a backend, and so does what the node itself answers.
 * It is global, so that the verifier walks it once.
 */
__noinline int why_no_flow(struct __sk_buff *ctx, __u32 flags)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	enum reason why;

	if (!pkt || flags & ADDR_NODE || config_conntrack_hidden)
		return REASON_PASS_NO_FLOW;
	why = lookup_frontend(&pkt->came, flags, &pkt->pool);
	if (why == REASON_PASS_NO_FRONTEND || (!why && passes_through(&pkt->pool)))
		return REASON_PASS_NO_FLOW;
	if (is_tracked(ctx, &pkt->came, &pkt->tuple, TRACKED_SERVED))
		return REASON_PASS_NO_FLOW;
	if (why == REASON_DROP_UNALLOCATED)
		return why;
	if (!why)
		pkt->service_port_id = pkt->pool.service_port_id;
	if (!is_answered(pkt))
		return REASON_DROP_NO_FLOW;
	return why ?: REASON_REJECT_NO_FLOW;
}

/*
 * begin_flow opens a flow for its first packet, to a backend of pkt->pool if pkt->left is set. It returns
 * REASON_FLOW if another CPU has done that: see begin_alone. It is global, and finds the packet by itself, so
 * that the verifier walks it once, and not for each call.
 */
__noinline int begin_flow(struct __sk_buff *ctx, __u32 flags)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	enum reason why;

	if (!pkt)
		return REASON_PASS_OTHER_TRAFFIC;
	if (has_ports(pkt->ip.key.proto) && (pkt->event != EVENT_OPEN || pkt->ip.later)) {
		pkt->came = pkt->ip.key;
		return why_no_flow(ctx, flags);
	}
	why = pkt->left ? REASON_NEXT : lookup_frontend(&pkt->ip.key, flags, &pkt->pool);
	if (!why && !pkt->left && flags & ADDR_NODE && (is_nodes_own(ctx) || is_awaited(ctx)))
		why = REASON_PASS_NO_FRONTEND;
	if (why != REASON_PASS_NO_FRONTEND && is_no_client(&pkt->ip.key))
		return REASON_DROP_SOURCE;
	if (why)
		return why;
	if (pkt->pool.flags & POOL_SOURCE_RANGES && !is_in_ranges(&pkt->pool, &pkt->ip.key.src))
		why = REASON_DROP_SOURCE_RANGE;
	else if (passes_through(&pkt->pool))
		return REASON_PASS_NO_FRONTEND;
	else if (pkt->ip.key.proto == IPPROTO_UDP)
		why = begin_alone(HOOK_INGRESS);
	else if (!make_room())
		why = REASON_DROP_FLOW_TABLE; /* refusing it is better than losing it later */
	if (!why)
		why = open_flow(ctx, pkt);
	if (pkt->ip.key.proto == IPPROTO_UDP)
		end_beginning();
	pkt->service_port_id = pkt->pool.service_port_id;
	if (!pkt->given_up && why != REASON_FLOW)
		count_new(pkt->pool.service_port_id, why);
	return why;
}

/*
 * Direct connections to a backend from a port whose flow already has that backend. To the backend
 * both would be one connection, so the direct one gets a flow of its own, with another port.
 */

/*
 * make_direct turns pkt->flow, a flow of a Service to the backend at hand, into the flow of the
 * direct connection to the same backend.
 */
static __always_inline void make_direct(struct packet *pkt)
{
	struct flow *f = &pkt->flow;

	f->client_port = f->stack_port;
	f->original_dst = f->backend;
	f->original_port = f->backend_port;
	f->state = FLOW_NEW;
	f->flags = class_flag(config_device_class);
	f->ending = 0;
	f->stamp = 0;
	f->created = pkt->now;
	f->last_seen = pkt->now;
	f->bytes = 0;
	f->end = 0;
	f->ack = 0;
}

/*
 * may_go_beside reports whether the packet at hand, of the tuple of pkt->gone at the backend, can begin an exchange of
 * its own beside that flow of a client outside: its answers pass this node, and it is not one of that flow which a device
 * below this one has translated.
 */
static __always_inline bool may_go_beside(struct __sk_buff *ctx, const struct packet *pkt)
{
	__u32 device = ctx->ifindex;
	const struct device *dev = bpf_map_lookup_elem(&sl_devices, &device);

	return config_device_class == DEVICE_UPLINK && dev && !(dev->flags & DEVICE_ABOVE) &&
	       pkt->gone.flags & FLOW_BY_UPLINKS && !is_masqueraded(&pkt->gone);
}

/*
 * yield_to_datagram handles a datagram to no frontend whose answers a flow would translate, and reports whether it begins
 * an exchange beside that flow, which is in pkt->gone. Otherwise a flow of a pod, and a foreign one, end if the sender is
 * behind the device: the answers are those of its own exchange. A socket of a pod may have the port of an earlier one that
 * had no socket hook, and a foreign flow that of another host. At an uplink neither of the two shows who has sent it,
 * so both go on. No other flow yields: the datagram may be its own, which a device below this one has translated. It is
 * global, so that the verifier walks it once.
 */
__noinline int yield_to_datagram(struct __sk_buff *ctx)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);

	if (!pkt)
		return false;
	reversed(&pkt->ip.key, &pkt->key);
	pkt->key.hook = HOOK_EGRESS;
	if (!copy_holder(pkt,
			 half_open_at(&pkt->key) ?: bpf_map_lookup_elem(&sl_flows, &pkt->key)) ||
	    pkt->gone.role != FLOW_TO_CLIENT)
		return false;
	if (!is_foreign(&pkt->gone) &&
	    (config_device_class != DEVICE_PODS || !(pkt->gone.flags & FLOW_BY_PODS)))
		return may_go_beside(ctx, pkt);
	find_back(ctx, pkt, &pkt->ip.key.dst, &pkt->ip.key.src);
	if (is_behind_device(ctx, pkt))
		forget_all(pkt);
	return false;
}

/*
 * find_beside reports whether the packet at hand, to no frontend, begins a connection or an exchange from a port whose
 * flow already has that very backend, and copies that flow to pkt->gone. One that is half open may be forged, and the
 * answer to its first packet is not that to another one.
 */
static __always_inline bool find_beside(struct __sk_buff *ctx, struct packet *pkt)
{
	const struct flow *half_open;

	if (pkt->ip.key.proto == IPPROTO_UDP)
		return yield_to_datagram(ctx);
	if (pkt->ip.key.proto != IPPROTO_TCP)
		return false;
	reversed(&pkt->ip.key, &pkt->key);
	pkt->key.hook = HOOK_EGRESS;
	half_open = config_device_class == DEVICE_UPLINK ? half_open_at(&pkt->key) : NULL;
	if (!copy_holder(pkt, half_open ?: bpf_map_lookup_elem(&sl_flows, &pkt->key)) ||
	    pkt->gone.role != FLOW_TO_CLIENT)
		return false;
	return half_open ? may_go_beside(ctx, pkt) : !has_ended(HOOK_INGRESS);
}

/*
 * open_beside handles the first segment of a TCP connection, or a datagram, to no frontend: it opens a flow if the
 * client's port already has a flow to that very backend. It is global, so that the verifier walks it once.
 */
__noinline int open_beside(struct __sk_buff *ctx)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	int why;

	if (!pkt || !find_beside(ctx, pkt))
		return REASON_PASS_NO_FRONTEND;
	pkt->flow = pkt->gone;
	make_direct(pkt);
	find_back(ctx, pkt, &pkt->flow.backend, &pkt->ip.key.src);
	if (!is_behind_device(ctx, pkt))
		return REASON_PASS_NO_FRONTEND;
	if (config_device_class == DEVICE_UPLINK && pkt->flow.proto == IPPROTO_UDP &&
	    hold_on_tuple(pkt, &pkt->gone) == HOLD_NONE) {
		forget_all(pkt);
		return REASON_PASS_NO_FRONTEND;
	}
	note_port(DIRECT_PORT);
	why = reserve_port(ctx, FLOW_TO_CLIENT);
	evict(pkt);
	if (why)
		return why;
	note_return(ctx, pkt);
	why = put_entries(pkt);
	if (why) {
		release(HOOK_INGRESS, FLOW_TO_CLIENT);
		return why;
	}
	goes_as(&pkt->flow, FLOW_FROM_CLIENT, &pkt->to);
	return REASON_TRANSLATED;
}

#endif
