//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Translating the packets of Services at devices. */
#include "lib/open.h"
#include "lib/reject.h"

/* read_addr reads only the source or the destination address of a packet. */
static __always_inline enum reason read_addr(struct __sk_buff *ctx, const struct network *net,
					     bool from, struct addr *a)
{
	const struct ipv6hdr *v6;
	const struct iphdr *v4;

	if (net->v6) {
		v6 = peek(ctx, net->at, sizeof(*v6));
		if (!v6)
			return REASON_PASS_MALFORMED;
		__builtin_memcpy(a, from ? &v6->saddr : &v6->daddr, sizeof(*a));
	} else {
		v4 = peek(ctx, net->at, sizeof(*v4));
		if (!v4)
			return REASON_PASS_MALFORMED;
		*a = addr_of_v4(from ? v4->saddr : v4->daddr);
	}
	return REASON_NEXT;
}

/*
 * may_have_port is false for a packet whose protocol has no ports and reports no errors, so that
 * it is certainly not a Service's. port is 0 if the port is behind extension headers, or in
 * another fragment.
 */
static __always_inline bool may_have_port(struct __sk_buff *ctx, const struct network *net,
					  bool from, __be16 *port)
{
	const struct ipv6hdr *v6;
	const struct iphdr *v4;
	const __be16 *ports;
	__u32 at;
	__u8 proto;

	*port = 0;
	if (net->v6) {
		v6 = peek(ctx, net->at, sizeof(*v6));
		if (!v6 || is_extension(v6->nexthdr))
			return true;
		proto = v6->nexthdr;
		at = net->at + sizeof(*v6);
	} else {
		v4 = peek(ctx, net->at, sizeof(*v4));
		if (!v4 || v4->frag_off & V4_FRAGMENT_OFFSET)
			return true;
		proto = v4->protocol;
		at = net->at + v4->ihl * 4;
	}
	if (!has_ports(proto))
		return proto == (net->v6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP);
	ports = peek(ctx, at, 2 * sizeof(*ports));
	if (ports)
		*port = ports[from ? 0 : 1];
	return true;
}

/*
 * is_node_traffic reports whether a packet to an address of this node is certainly not for a node
 * port or a flow.
 */
static __always_inline bool is_node_traffic(struct __sk_buff *ctx, const struct network *net)
{
	__be16 port;

	return !may_have_port(ctx, net, false, &port) || (port && !may_be_our_port(port));
}

/*
 * may_be_for_service is the cheap check of every packet from the wire: is it to an address of a
 * Service, or to a port of this node that may be a node port or that of a flow? flags: see
 * addr_flags.
 */
static __always_inline enum reason may_be_for_service(struct __sk_buff *ctx, struct network *net,
						      __u32 *flags)
{
	struct addr dst;
	enum reason why;

	why = read_link(ctx, net);
	if (!why)
		why = read_addr(ctx, net, false, &dst);
	if (why)
		return why;
	*flags = may_be_ours(&dst) ? addr_flags(&dst) : 0;
	if (*flags & ADDR_SERVICE)
		return REASON_NEXT;
	if (*flags)
		return is_node_traffic(ctx, net) ? REASON_PASS_NO_FRONTEND : REASON_NEXT;
	return is_service_cidr(&dst) ? REASON_NEXT : REASON_PASS_OTHER_TRAFFIC;
}

/* may_be_reply is the cheap check of every packet from the stack. */
static __always_inline enum reason may_be_reply(struct __sk_buff *ctx, struct network *net)
{
	struct addr src;
	enum reason why;
	__be16 port;

	why = read_link(ctx, net);
	if (!why)
		why = read_addr(ctx, net, true, &src);
	if (why)
		return why;
	if (!may_have_port(ctx, net, true, &port) || (port && !may_be_of_flow(&src, port)))
		return REASON_PASS_OTHER_TRAFFIC;
	return REASON_NEXT;
}

/* read_rest reads what follows the IP header. */
static __always_inline enum reason read_rest(struct __sk_buff *ctx, struct packet *pkt)
{
	enum reason why;

	if (pkt->ip.v6) {
		why = skip_extensions(ctx, &pkt->ip);
		if (why)
			return why;
	}
	if (has_ports(pkt->ip.key.proto)) {
		why = read_transport(ctx, &pkt->ip);
		return why ?: read_event(ctx, pkt);
	}
	if (pkt->ip.key.proto == (pkt->ip.v6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP))
		return read_icmp(ctx, pkt);
	pkt->ip.key.src_port = 0;
	pkt->ip.key.dst_port = 0;
	return REASON_NEXT;
}

/* find_flow returns the entry of key, or NULL, and sets pkt->to to the tuple of its packets. */
static __always_inline struct flow *find_flow(struct packet *pkt, const struct flow_key *key,
					      bool *half_open)
{
	struct flow *f = bpf_map_lookup_elem(&sl_flows, key);

	*half_open = !f;
	if (!f)
		f = half_open_at(key);
	if (!f) {
		/* It may have been confirmed between the two lookups. */
		f = bpf_map_lookup_elem(&sl_flows, key);
		*half_open = false;
	}
	if (!f || !goes(pkt, f, key))
		return NULL;
	return f->role == FLOW_FROM_BACKEND && !(f->flags & FLOW_SENT) ? NULL : f;
}

/*
 * find_error_flow finds the flow that an ICMP error is about, and copies it to pkt->flow. It is
 * global, as begin_flow is.
 */
__noinline int find_error_flow(struct __sk_buff *ctx, __u32 hook)
{
	struct packet *pkt = packet_at(hook);
	const struct flow *f;
	enum reason why;
	bool half_open;

	if (!pkt)
		return REASON_PASS_OTHER_TRAFFIC;
	why = read_quoted(ctx, pkt, &pkt->quoted);
	if (why)
		return why;
	if (!addr_equal(&pkt->quoted.key.src, &pkt->ip.key.dst))
		return REASON_PASS_NO_FLOW; /* the receiver of the error did not send the quoted packet */
	reversed(&pkt->quoted.key, &pkt->came);
	pkt->came.hook = pkt->ip.key.hook;
	f = find_flow(pkt, &pkt->came, &half_open);
	if (!f || is_stray(f))
		return REASON_PASS_NO_FLOW;
	if (is_redirect(pkt->icmp_type, pkt->ip.v6))
		return REASON_DROP_REDIRECT;
	pkt->flow = *f;
	return REASON_NEXT;
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
 * check_room checks, for the first packet of a flow, whether flows has room for a connection:
 * refusing it now is better than losing it later. A datagram needs no room before it is answered.
 */
static __always_inline enum reason check_room(__u8 proto)
{
	return proto == IPPROTO_UDP || make_room() ? REASON_NEXT : REASON_DROP_FLOW_TABLE;
}

static __always_inline enum reason check_source_range(const struct pool *pool,
						      const struct addr *src)
{
	if (!(pool->flags & POOL_SOURCE_RANGES) || is_in_ranges(pool, src))
		return REASON_NEXT;
	return REASON_DROP_SOURCE_RANGE;
}

/*
 * begin_flow opens a flow for its first packet. It is global, and finds the packet by itself, so
 * that the verifier walks it once, and not for each call.
 */
__noinline int begin_flow(struct __sk_buff *ctx, __u32 flags)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	struct pool pool;
	enum reason why;

	if (!pkt)
		return REASON_PASS_OTHER_TRAFFIC;
	if (has_ports(pkt->ip.key.proto) && (pkt->event != EVENT_OPEN || pkt->ip.later))
		return REASON_PASS_NO_FLOW;
	why = lookup_frontend(&pkt->ip.key, flags, &pool);
	if (why)
		return why;
	why = check_source_range(&pool, &pkt->ip.key.src);
	if (!why)
		why = check_room(pkt->ip.key.proto);
	if (!why)
		why = open_flow(ctx, pkt, &pool);
	count_new(pool.service_port_id, why);
	return why;
}

/*
 * mark sets the mark by which rules of netfilter, which do not see the Service, recognize packets
 * of clients to Services.
 */
static __always_inline void mark(struct __sk_buff *ctx)
{
	if (config_mark_mask)
		ctx->mark = (ctx->mark & ~config_mark_mask) | config_mark;
}

/* translate_packet finds or opens the flow of a packet from the wire. */
static __always_inline enum reason translate_packet(struct __sk_buff *ctx, struct packet *pkt,
						    __u32 flags)
{
	bool half_open;
	struct flow *f = find_flow(pkt, &pkt->ip.key, &half_open);
	enum reason why;

	if (!f)
		return begin_flow(ctx, flags);
	if (is_stray(f))
		return pkt->event == EVENT_OPEN ? REASON_DROP_TUPLE_TAKEN : REASON_PASS_NO_FLOW;
	if (starts_new_flow(pkt, f, half_open)) {
		uncount(f);
		report_bytes(f);
		return begin_flow(ctx, flags);
	}
	if (f->role == FLOW_FROM_CLIENT)
		mark(ctx);
	why = turn_or_pass(ctx, pkt, f);
	if (why)
		return why;
	track(pkt, f, half_open);
	return REASON_FLOW;
}

/*
 * translate_error translates an error from the wire, so that it reaches the sender of the packet
 * that it quotes.
 */
static __always_inline enum reason translate_error(struct __sk_buff *ctx, struct packet *pkt)
{
	enum reason why = find_error_flow(ctx, HOOK_INGRESS);

	if (!why)
		why = turn_or_pass(ctx, pkt, &pkt->flow);
	return why ?: rewrite_error(ctx, HOOK_INGRESS);
}

/* translate rewrites a packet from the wire: to a backend, or back to its client. */
static __always_inline enum reason translate(struct __sk_buff *ctx, struct packet *pkt,
					     const struct network *net, __u32 flags)
{
	enum reason why;

	why = read_ip(ctx, &pkt->ip, net->at, net->v6);
	if (why)
		return why;
	why = read_rest(ctx, pkt);
	if (why)
		return why;
	pkt->now = bpf_ktime_get_ns();
	if (pkt->is_error)
		return translate_error(ctx, pkt);
	why = translate_packet(ctx, pkt, flags);
	if (why == REASON_PASS_NO_FRONTEND)
		why = open_beside(ctx);
	if (why != REASON_FLOW && why != REASON_TRANSLATED)
		return why;
	if (why == REASON_TRANSLATED)
		mark(ctx);
	if (rewrite(ctx, pkt, &pkt->to) || !shortcut(ctx, &pkt->to))
		return REASON_DROP_REWRITE;
	return why;
}

/* The stages of a packet from the wire, top to bottom. */
static __always_inline enum reason balance(struct __sk_buff *ctx, struct packet *pkt,
					   const struct network *net, __u32 flags)
{
	enum reason why = translate(ctx, pkt, net, flags);

	return pkt->turns && !decrement_ttl(ctx, &pkt->ip) ? REASON_DROP_REWRITE : why;
}

/*
 * is_direct_connection reports whether a client connects to a backend directly, or the backend
 * accepts that, with the tuple of a flow that has ended, or whose client has moved on to another
 * backend. The next flow of a Service would have replaced the entries.
 */
static __always_inline bool is_direct_connection(struct packet *pkt, const struct flow *f)
{
	bool opens = pkt->event == EVENT_OPEN && f->role == FLOW_TO_BACKEND;
	bool accepts = pkt->event == EVENT_ACCEPT && f->role == FLOW_TO_CLIENT;

	return (opens || accepts) && (has_ended(pkt, f) || is_replaced(pkt, f));
}

/*
 * The stages of a packet from the stack, top to bottom: it is either part of a flow, or other
 * traffic.
 */
static __always_inline enum reason reverse(struct __sk_buff *ctx, struct packet *pkt,
					   const struct network *net)
{
	enum reason why;
	bool half_open;
	struct flow *f;

	why = read_ip(ctx, &pkt->ip, net->at, net->v6);
	if (why)
		return why;
	why = read_rest(ctx, pkt);
	if (why)
		return why;
	if (pkt->is_error)
		return find_error_flow(ctx, HOOK_EGRESS) ?: rewrite_error(ctx, HOOK_EGRESS);
	if (!has_ports(pkt->ip.key.proto))
		return REASON_PASS_OTHER_TRAFFIC;

	f = find_flow(pkt, &pkt->ip.key, &half_open);
	if (!f)
		return REASON_PASS_OTHER_TRAFFIC;
	if (is_direct_connection(pkt, f)) {
		pkt->gone = *f;
		forget_all(pkt);
		return REASON_PASS_OTHER_TRAFFIC;
	}
	pkt->now = bpf_ktime_get_ns();
	pkt->role = f->role;
	pkt->flags = f->flags;
	track(pkt, f, half_open);
	return rewrite(ctx, pkt, &pkt->to) ?: REASON_FLOW;
}

SEC("tc")
int sluice_ingress(struct __sk_buff *ctx)
{
	struct network net;
	struct packet *pkt;
	enum reason why;
	__u32 flags;
	int verdict;

	/* A frame to another machine: the stack drops it, but a bridge forwards it. */
	if (config_ethernet && !config_bridge_port && ctx->pkt_type == PACKET_OTHERHOST)
		return pass(REASON_PASS_OTHER_TRAFFIC);
	why = may_be_for_service(ctx, &net, &flags);
	if (why)
		return pass(why);
	pkt = new_packet(HOOK_INGRESS);
	if (!pkt)
		return VERDICT_NEXT;
	why = balance(ctx, pkt, &net, flags);
	verdict = finish(ctx, why, is_reject(why) || pkt->mtu);
	return verdict == VERDICT_NEXT && pkt->turns ?
		       bpf_redirect_neigh(pkt->out, &pkt->next, sizeof(pkt->next), 0) :
		       verdict;
}

SEC("tc")
int sluice_egress(struct __sk_buff *ctx)
{
	struct network net;
	struct packet *pkt;
	enum reason why;

	why = may_be_reply(ctx, &net);
	if (why)
		return pass(why);
	pkt = new_packet(HOOK_EGRESS);
	if (!pkt)
		return VERDICT_NEXT;
	why = reverse(ctx, pkt, &net);
	if (why != REASON_FLOW || !returns(pkt))
		return finish(ctx, why, false);
	count(why);
	return return_reply(ctx);
}

char tc_license[] SEC("license") = "Dual BSD/GPL";
