//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the other programs would do with a new flow, without doing it: `sluice explain` runs these
 * on the maps in force (BPF_PROG_TEST_RUN). They call the stages of sock.c and tc.c up to the first
 * that writes a map. The question is in the packet that they run with, and the answer replaces it.
 */
#define SLUICE_PROBE
#include "lib/dial.h"
#include "lib/open.h"

/* What a socket dials. */
struct question {
	struct frontend_key original_dst;
	struct addr source; /* that the socket is bound to, or will have */
	struct pod_uid pod; /* of the calling process */
	__u8 has_source; /* or else it is a process of the node that is bound to no address */
	__u8 is_host; /* in the network namespace of the node */
	__u8 has_pod; /* pod is set */
	__u8 reserved;
};

/* answer.found */
enum finding {
	FOUND_POOL = 1, /* the destination has a frontend; pool is set */
	FOUND_AFFINITY = 2, /* the client keeps the backend of an earlier flow */
	FOUND_OPT_OUT_SERVICE = 4, /* why a socket is left alone */
	FOUND_OPT_OUT_POD = 8,
	FOUND_NODES_OWN =
		16, /* the destination is an address of the node, where a socket answers */
	FOUND_NO_ROOM =
		32, /* in the table of flows, until connections that have ended are removed */
	FOUND_MASQUERADE = 64, /* the backend sees an address of this node */
	FOUND_TURN = 128, /* packets leave for the backend without passing the stack */
};

/* The outcome of a new flow. */
struct answer {
	__u64 affinity_left; /* with FOUND_AFFINITY: for how long, in ns */
	struct pool pool;
	__u32 reason; /* enum reason */
	__u32 found; /* enum finding */
	__u32 scope; /* enum scope */
	__u32 backend_id; /* of the backend that this run has picked, or 0 */
	__u32 out; /* with FOUND_TURN, the ifindex of the device by which packets leave */
	struct addr masquerade; /* with FOUND_MASQUERADE */
};

const struct question *btf_question __attribute__((unused));
const struct answer *btf_answer __attribute__((unused));
const enum finding *btf_finding __attribute__((unused));

/*
 * offer picks a backend as pick_backend does for an assured client, or for one that is not. It
 * writes no map: a client is not remembered, and round robin takes no turn.
 */
static __always_inline const struct backend *
offer(struct answer *is, const struct affinity_key *client, __u32 seed, __u64 now, bool assured)
{
	const struct backend *be = NULL;
	const struct affinity *had;
	__u8 algorithm = is->pool.algorithm;

	if (is->pool.affinity_seconds) {
		had = bpf_map_lookup_elem(&sl_affinity, client);
		be = pick_previous(&is->pool, had, now);
		if (!be && !assured) {
			had = bpf_map_lookup_elem(&sl_claims, client);
			be = pick_previous(&is->pool, had, now);
		}
		if (be && had) {
			is->found |= FOUND_AFFINITY;
			is->affinity_left =
				had->last_used + is->pool.affinity_seconds * NS_PER_SECOND - now;
		}
	}
	if (algorithm == ALGORITHM_RR) /* which would take a turn */
		is->pool.algorithm = ALGORITHM_RANDOM;
	be = be ?: pick_new(&is->pool, seed, now);
	is->pool.algorithm = algorithm;
	if (be)
		is->backend_id = be->id;
	return be;
}

/* left_alone returns why a socket must not be translated, as is_left_alone decides it, or 0. */
static __always_inline __u32 left_alone(struct __sk_buff *ctx, const struct question *asks,
					__u32 pool_flags)
{
	const struct frontend_key *dst = &asks->original_dst;

	if (pool_flags & POOL_OPTED_OUT && !asks->is_host)
		return FOUND_OPT_OUT_SERVICE;
	if (asks->has_pod && bpf_map_lookup_elem(&sl_opted_out, &asks->pod))
		return FOUND_OPT_OUT_POD;
	if (is_nodes_cluster_ip(dst) &&
	    (!asks->is_host || is_served_here(ctx, &dst->addr, dst->port, dst->proto)))
		return FOUND_NODES_OWN;
	return 0;
}

/* The stages of resolve_connect in sock.c. */
static __always_inline enum reason explain_connect(struct __sk_buff *ctx,
						   const struct question *asks, struct answer *is)
{
	const struct frontend_key *dst = &asks->original_dst;
	struct affinity_key client;
	struct addr source = asks->source;
	enum reason why;

	is->scope = dst->scope;
	why = translates_connects(dst->proto, asks->is_host);
	if (why)
		return why;
	why = lookup_dial(dst, asks->is_host && may_be_localhost(dst), &is->pool);
	if (why == REASON_PASS_NO_FRONTEND)
		return why;
	is->found |= why ? 0 : FOUND_POOL;
	is->found |= left_alone(ctx, asks, is->pool.flags);
	if (is->found & ~FOUND_POOL)
		return REASON_PASS_DISABLED;
	if (!why && is->pool.flags & POOL_SOURCE_RANGES)
		why = check_client(&is->pool, asks->has_source ? &asks->source : NULL);
	if (why)
		return why;
	if (!asks->has_source)
		node_addr(addr_is_v4(&dst->addr), &source);
	client = addr_client(is->pool.service_port_id, &source);
	if (!offer(is, &client, seed_of_dial(&is->pool, client_at(&source), dst, true),
		   bpf_ktime_get_ns(), true))
		return why_no_backend(&is->pool);
	return REASON_TRANSLATED;
}

SEC("tc")
int sluice_probe_socket(struct __sk_buff *ctx)
{
	struct question asks;
	struct answer is = {};

	if (bpf_skb_load_bytes(ctx, 0, &asks, sizeof(asks)))
		return VERDICT_DROP;
	is.reason = explain_connect(ctx, &asks, &is);
	return bpf_skb_store_bytes(ctx, 0, &is, sizeof(is), 0) ? VERDICT_DROP : VERDICT_NEXT;
}

/*
 * explain_way sets how packets get to the backend: the stages of remember in open.h up to the first
 * reservation.
 */
static __always_inline enum reason explain_way(struct __sk_buff *ctx, struct packet *pkt,
					       const struct backend *be, struct answer *is)
{
	const struct addr *client = &pkt->ip.key.src;
	struct route way;

	find_back(ctx, pkt, &be->addr, &pkt->ip.key.src);
	if (addr_flags(&be->addr) & ADDR_NODE ||
	    !(is->pool.flags & POOL_MASQUERADE || misses_node(ctx, pkt, be)))
		return REASON_TRANSLATED;
	is->found |= FOUND_MASQUERADE;
	if (try_turn(ctx, pkt, be)) {
		is->found |= FOUND_TURN;
		is->out = pkt->out;
	}
	if (!find_route(ctx, client, &be->addr, &way) || addr_is_any(&way.source))
		return REASON_DROP_MASQUERADE_ADDR;
	is->masquerade = way.source;
	return REASON_TRANSLATED;
}

/*
 * The stages of the first packet of a flow in tc.c and open.h. asked is the id of the backend to
 * which the way is explained; 0: the one that is picked.
 */
static __always_inline enum reason explain_packet(struct __sk_buff *ctx, struct packet *pkt,
						  __u32 asked, struct answer *is)
{
	const struct flow_key *came = &pkt->ip.key;
	struct affinity_key client;
	const struct backend *be;
	struct network net;
	enum reason why;
	struct addr dst;
	__u32 flags;

	why = peek_network(ctx, &net, false, &dst);
	why = why ?: read_ip(ctx, &pkt->ip, net.at, net.v6);
	if (!why && pkt->ip.v6)
		why = skip_extensions(ctx, &pkt->ip);
	why = why ?: read_transport(ctx, &pkt->ip);
	if (why)
		return why;
	flags = may_be_ours(net.hash) ? addr_flags(&dst) : 0;
	if (flags && !(flags & ADDR_SERVICE) && !may_be_our_port(came->dst_port))
		return REASON_PASS_NO_FRONTEND;
	is->scope = scope_of(&came->src);
	why = lookup_frontend(came, flags, &is->pool);
	if (why != REASON_PASS_NO_FRONTEND && is_no_client(came))
		return REASON_DROP_SOURCE;
	if (why)
		return why;
	is->found |= FOUND_POOL;
	if (flags & ADDR_NODE && is_nodes_own(ctx)) {
		is->found |= FOUND_NODES_OWN;
		return REASON_PASS_NO_FRONTEND;
	}
	if (is->pool.flags & POOL_SOURCE_RANGES && !is_in_ranges(&is->pool, &came->src))
		return REASON_DROP_SOURCE_RANGE;
	if (passes_through(&is->pool))
		return REASON_PASS_NO_FRONTEND;
	if (came->proto != IPPROTO_UDP && !has_share(came->proto))
		is->found |= FOUND_NO_ROOM;
	client = addr_client(is->pool.service_port_id, &came->src);
	be = offer(is, &client, seed_of_packet(&is->pool, came), bpf_ktime_get_ns(), false);
	if (be && asked)
		be = pick_id(&is->pool, asked);
	if (!be)
		return why_no_backend(&is->pool);
	return explain_way(ctx, pkt, be, is);
}

SEC("tc")
int sluice_probe_device(struct __sk_buff *ctx)
{
	struct packet *pkt = new_packet(HOOK_INGRESS);
	struct answer is = {};

	if (!pkt)
		return VERDICT_DROP;
	is.reason = explain_packet(ctx, pkt, ctx->cb[0], &is);
	return bpf_skb_store_bytes(ctx, 0, &is, sizeof(is), 0) ? VERDICT_DROP : VERDICT_NEXT;
}

char probe_license[] SEC("license") = "Dual BSD/GPL";
