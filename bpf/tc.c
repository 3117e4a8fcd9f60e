//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Translating the packets of Services at devices. */
#include "lib/own.h"
#include "lib/refusal.h"
#include "lib/reject.h"
#include "lib/resteer.h"

/*
 * may_be_direct reports whether a packet to an address of no Service may open a connection to a
 * backend that has a flow, or belong to a direct connection that has one: see open_beside. Until there
 * was such a connection on this node, or a flow of UDP beside which there may be one, only a SYN costs more than a
 * look at its flags.
 */
static __always_inline bool may_be_direct(struct __sk_buff *ctx, const struct network *net)
{
	__be16 port;

	if (!peek_syn(ctx, net) && !may_be_our_port(DIRECT_PORT))
		return false;
	return peek_port(ctx, net, false, &port) && (!port || may_be_of_flow(net->hash, port));
}

/*
 * may_be_for_service is the cheap check of every packet from the wire: is it to an address of a
 * Service, or to a port of this node that may be a node port or that of a flow, or may it be for a
 * direct connection? flags: see addr_flags.
 */
static __always_inline enum reason may_be_for_service(struct __sk_buff *ctx, struct network *net,
						      __u32 *flags)
{
	struct addr dst;
	enum reason why;
	__be16 port;

	why = peek_network(ctx, net, false, &dst);
	if (why)
		return why;
	*flags = may_be_ours(net->hash) ? addr_flags(&dst) : 0;
	if (*flags & (ADDR_SERVICE | ADDR_LEFT) || may_leave_dialled(ctx, net))
		return REASON_NEXT;
	if (!*flags)
		return is_service_cidr(&dst) || may_be_direct(ctx, net) ? REASON_NEXT :
									  REASON_PASS_OTHER_TRAFFIC;
	if (!peek_port(ctx, net, false, &port) ||
	    (port && !may_be_our_port(port) && !(resteers_own() && peek_refusal(ctx, net))))
		return REASON_PASS_NO_FRONTEND; /* the node's own */
	return REASON_NEXT;
}

/* may_be_reply is the cheap check of every packet from the stack. */
static __always_inline enum reason may_be_reply(struct __sk_buff *ctx, struct network *net)
{
	struct addr src;
	enum reason why;
	__be16 port;

	why = peek_network(ctx, net, true, &src);
	if (why)
		return why;
	if (!peek_port(ctx, net, true, &port))
		return REASON_PASS_OTHER_TRAFFIC;
	if (port && !may_be_of_flow(net->hash, port) &&
	    !(resteers_sockets() && peek_refusal(ctx, net)) && !may_be_resteered(ctx, net) &&
	    !may_be_dialled(ctx, net) && !may_be_beside(ctx, net, port))
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

/*
 * mark sets the mark by which rules of netfilter, which do not see the Service, recognize packets
 * of clients to Services.
 */
static __always_inline void mark(struct __sk_buff *ctx)
{
	if (config_mark_mask)
		ctx->mark = (ctx->mark & ~config_mark_mask) | config_mark;
}

/* is_translated reports whether the packet belongs to a flow, and is to be written. */
static __always_inline bool is_translated(enum reason why)
{
	return why == REASON_FLOW || why == REASON_TRANSLATED;
}

/*
 * join_flow makes the packet one of the flow that another CPU has just opened for its client. It is global, so that
 * the verifier walks it once.
 */
__noinline int join_flow(struct __sk_buff *ctx)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	bool half_open;
	struct flow *f;

	f = pkt ? find_flow(pkt, &pkt->ip.key, &half_open) : NULL;
	if (!f)
		return REASON_DROP_FLOW_TABLE;
	f->bytes += pkt->ip.end - pkt->ip.l3;
	mark(ctx);
	return turn_or_pass(ctx, pkt, f) ?: REASON_FLOW;
}

/*
 * begin opens a flow for the first packet of a connection to a Service, or for that of a socket whose
 * backend its Service has left, or does not answer. It replaces the flow that was created at a time, 0: none.
 */
static __always_inline enum reason begin(struct __sk_buff *ctx, struct packet *pkt, __u32 flags,
					 __u64 replaces)
{
	enum reason why = flags & ADDR_LEFT ? find_left(ctx) : REASON_PASS_NO_FRONTEND;

	if (why && why != REASON_PASS_NO_FRONTEND)
		return why;
	pkt->replaces = replaces;
	why = begin_flow(ctx, flags);
	if (why == REASON_PASS_NO_FRONTEND && resteers_sockets())
		why = resteer(ctx);
	return why == REASON_FLOW ? join_flow(ctx) : why;
}

/* The sender of a packet that has the tuple of a flow. */
enum sender {
	SENDER_CLIENT, /* the client of the flow */
	SENDER_OTHER, /* another host or program with that address and port, which is behind the device at hand */
	SENDER_ELSEWHERE, /* none that is behind that device */
};

/*
 * sender_of returns the sender of the packet, whose flow is pkt->flow, and either foreign or of a client that was
 * behind another class of devices. The client's device may have got another class, or the client has moved. What is
 * open goes on, as long as the answers pass this node, and a connection begins anew. It is global, so that the verifier
 * walks it once.
 */
__noinline int sender_of(struct __sk_buff *ctx)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	const struct backend *be;
	const struct flow *f;
	bool here;

	if (!pkt)
		return SENDER_ELSEWHERE;
	f = &pkt->flow;
	here = is_client_here(ctx, HOOK_INGRESS);
	if (!is_stray(f))
		return here ? SENDER_OTHER : SENDER_CLIENT;
	if (!here)
		return SENDER_ELSEWHERE;
	if (pkt->event != EVENT_OPEN)
		return SENDER_CLIENT;
	if (f->proto != IPPROTO_UDP)
		return SENDER_OTHER;
	be = backend_at(f->backend_id);
	return be && (is_masqueraded(f) || !misses_node(ctx, pkt, be)) ? SENDER_CLIENT :
									 SENDER_OTHER;
}

/*
 * may_be_of_other reports whether the packet, which has the tuple of the foreign flow f, may be another host's: see
 * sender_of. Datagrams of an open flow are asked about once a second (is_due). Meanwhile, a client behind its device
 * that has this tuple has its answers by that flow.
 */
static __always_inline bool may_be_of_other(const struct packet *pkt, const struct flow *f,
					    bool half_open)
{
	return f->role == FLOW_FROM_CLIENT && pkt->event == EVENT_OPEN &&
	       (f->proto != IPPROTO_UDP || half_open || is_due(f, pkt->now));
}

/*
 * assign_flow finds or opens the flow of a packet from the wire, and sets pkt->to to what the
 * packet becomes.
 */
static __always_inline enum reason assign_flow(struct __sk_buff *ctx, struct packet *pkt,
					       __u32 flags)
{
	__u32 sender = SENDER_CLIENT;
	bool half_open, stray;
	struct flow *f = find_flow(pkt, &pkt->ip.key, &half_open);
	enum reason why;

	if (!f) {
		if (resteers_own() && pkt->event == EVENT_RESET) {
			pkt->to = pkt->ip.key;
			hide_from_socket(ctx, HOOK_INGRESS);
		}
		return begin(ctx, pkt, flags, 0);
	}
	stray = is_stray(f);
	if (stray || (is_foreign(f) && may_be_of_other(pkt, f, half_open))) {
		pkt->flow = *f;
		sender = sender_of(ctx);
	}
	if (sender == SENDER_ELSEWHERE)
		return pkt->event == EVENT_OPEN ? REASON_DROP_TUPLE_TAKEN : begin_flow(ctx, flags);
	if (stray && sender == SENDER_CLIENT)
		f->flags = (f->flags & ~FLOW_OF_NODE) | class_flag(config_device_class);
	if (sender == SENDER_OTHER || starts_new_flow(pkt, f, half_open) ||
	    dials_again(pkt, f, half_open)) {
		uncount(f);
		report_bytes(f);
		if (f->flags & FLOW_RESTEERED) { /* the socket may dial that backend again */
			pkt->gone = *f;
			forget_all(pkt);
		}
		return begin(ctx, pkt, flags, f->created);
	}
	if (config_heal && is_unanswered(pkt, f, half_open)) {
		give_up(ctx, pkt, f);
		if (config_resteer) {
			report_bytes(f);
			why = begin(ctx, pkt, flags, f->created);
			if (why == REASON_TRANSLATED)
				abandon(pkt);
			if (is_translated(why))
				return why;
			pkt->turns = false;
			goes_as(f, f->role, &pkt->to);
		}
	}
	if (f->state == FLOW_ABANDONED) {
		why = answer_late(pkt, f);
		if (why)
			return why;
	}
	if (f->role == FLOW_FROM_CLIENT)
		mark(ctx);
	why = turn_or_pass(ctx, pkt, f);
	if (why)
		return why;
	if (f->role == FLOW_FROM_BACKEND && is_of_node(f))
		find_entrance(ctx);
	if (!hides_refusal(ctx, pkt, f, half_open))
		track(pkt, f, half_open);
	return REASON_FLOW;
}

/* The stages of a packet from the wire: to a backend, or back to its client. */
static __always_inline enum reason translate(struct __sk_buff *ctx, struct packet *pkt,
					     const struct network *net, __u32 flags)
{
	enum reason why;

	why = read_ip(ctx, &pkt->ip, net->at, net->v6) ?: read_rest(ctx, pkt);
	if (why)
		return why;
	pkt->now = bpf_ktime_get_ns();
	if (pkt->is_error) {
		why = find_error_flow(ctx, HOOK_INGRESS);
		if (config_resteer && hide_error(ctx, HOOK_INGRESS, why))
			return REASON_DROP_ABANDONED;
		if (why == REASON_PASS_NO_FLOW)
			return why_no_flow(ctx, flags);
		why = why ?: turn_or_pass(ctx, pkt, &pkt->flow);
		if (why)
			return why;
		if (is_of_node(&pkt->flow))
			find_entrance(ctx);
		return rewrite_error(ctx, HOOK_INGRESS);
	}

	why = assign_flow(ctx, pkt, flags);
	if (why == REASON_PASS_NO_FRONTEND)
		why = open_beside(ctx);
	if (!is_translated(why))
		return why;
	if (why == REASON_TRANSLATED)
		mark(ctx);
	if (rewrite(ctx, pkt, &pkt->to) || (config_bridge_port && !bypass_node(ctx)))
		return REASON_DROP_REWRITE;
	return why;
}

/*
 * assign_sent finds the flow of a packet from the stack, or opens one for a process of this node, and sets pkt->to to
 * what the packet becomes.
 */
static __always_inline enum reason assign_sent(struct __sk_buff *ctx, struct packet *pkt)
{
	bool half_open;
	struct flow *f = find_flow(pkt, &pkt->ip.key, &half_open);
	enum reason why;

	if (!f) {
		if (resteers_sockets() && pkt->event == EVENT_RESET) {
			pkt->to = pkt->ip.key;
			hide_from_socket(ctx, HOOK_EGRESS);
		}
		return begin_own(ctx, pkt);
	}
	/* Turned around, a client's packet may have the tuple of a process: see open_beside_own. */
	if (f->role == FLOW_FROM_CLIENT && ctx->ingress_ifindex)
		return REASON_PASS_OTHER_TRAFFIC;
	if (f->role == FLOW_FROM_CLIENT && pkt->event == EVENT_OPEN) {
		why = leave(ctx, pkt, f, half_open);
		if (why)
			return why;
	}
	if (f->state == FLOW_ABANDONED) {
		why = answer_late(pkt, f);
		if (why)
			return why;
	} else if (is_direct_connection(pkt, f)) {
		forget_all(pkt);
		return REASON_PASS_OTHER_TRAFFIC;
	} else if (half_open) {
		pkt->flow = *f;
		if (!is_of_opening()) {
			forget_fragment(&pkt->ip);
			return REASON_PASS_OTHER_TRAFFIC;
		}
	}
	if (config_device_class == DEVICE_UPLINK && half_open && f->role == FLOW_TO_BACKEND &&
	    !(f->flags & FLOW_SENT)) {
		pkt->flow = *f;
		why = masquerade_here(ctx);
		if (why)
			return why;
	}
	pkt->role = f->role;
	pkt->flags = f->flags;
	if (!hides_refusal(ctx, pkt, f, half_open))
		track(pkt, f, half_open);
	return REASON_FLOW;
}

/*
 * The stages of a packet from the stack: back to its client, as the masquerade to a backend, or of a
 * process of this node to another backend than the one dialled.
 */
static __always_inline enum reason reverse(struct __sk_buff *ctx, struct packet *pkt,
					   const struct network *net)
{
	enum reason why;

	why = read_ip(ctx, &pkt->ip, net->at, net->v6) ?: read_rest(ctx, pkt);
	if (why)
		return why;
	if (pkt->is_error) {
		why = find_error_flow(ctx, HOOK_EGRESS);
		if (config_resteer && hide_error(ctx, HOOK_EGRESS, why))
			return REASON_DROP_ABANDONED;
		return why ?: rewrite_error(ctx, HOOK_EGRESS);
	}
	if (!has_ports(pkt->ip.key.proto))
		return REASON_PASS_OTHER_TRAFFIC;
	pkt->now = bpf_ktime_get_ns();
	why = assign_sent(ctx, pkt);
	return is_translated(why) ? rewrite(ctx, pkt, &pkt->to) ?: why : why;
}

/* enter lets the packet enter the stack by another device: see find_entrance. */
static __always_inline int enter(struct __sk_buff *ctx, const struct packet *pkt)
{
	return bpf_skb_store_bytes(ctx, 0, pkt->enters_as, sizeof(pkt->enters_as), 0) ?
		       VERDICT_DROP :
		       bpf_redirect(pkt->enters, BPF_F_INGRESS);
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
	if (!why && is_of_vlan(ctx))
		why = REASON_PASS_OTHER_TRAFFIC;
	if (why)
		return pass(why);
	pkt = new_packet(HOOK_INGRESS);
	if (!pkt)
		return VERDICT_NEXT;
	why = translate(ctx, pkt, &net, flags);
	if (pkt->turns && !decrement_ttl(ctx, &pkt->ip))
		why = REASON_DROP_REWRITE;
	verdict = finish(ctx, HOOK_INGRESS, why, is_reject(why) || pkt->mtu);
	if (verdict != VERDICT_NEXT)
		return verdict;
	if (pkt->turns)
		return bpf_redirect_neigh(pkt->out, &pkt->next, sizeof(pkt->next), 0);
	return pkt->enters ? enter(ctx, pkt) : verdict;
}

SEC("tc")
int sluice_egress(struct __sk_buff *ctx)
{
	struct network net;
	struct packet *pkt;
	enum reason why;
	int verdict;

	why = may_be_reply(ctx, &net);
	if (!why && is_of_vlan(ctx))
		why = REASON_PASS_OTHER_TRAFFIC;
	if (why)
		return pass(why);
	pkt = new_packet(HOOK_EGRESS);
	if (!pkt)
		return VERDICT_NEXT;
	why = reverse(ctx, pkt, &net);
	verdict = finish(ctx, HOOK_EGRESS, why, is_reject(why));
	return verdict == VERDICT_NEXT && is_translated(why) && is_routed_again(pkt) ?
		       route_again(ctx) :
		       verdict;
}

char tc_license[] SEC("license") = "Dual BSD/GPL";
