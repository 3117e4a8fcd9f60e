/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Re-steering: a SYN that is sent again, because no answer has come, goes to another backend, and so
 * does a datagram to a suspect.
 *
 * A flow of a device that is half open begins anew. A socket that was translated when it connected
 * has no flow, but its packets pass the device of its pod: it gets a flow, from the backend that it
 * dialled to another one, and keeps that peer. So nothing changes for the application.
 *
 * The first backend that accepts a connection gets it, even one that was given up before: its
 * entries stay, in the state FLOW_ABANDONED. So a backend that is only slow loses nothing, and what
 * the others answer later does not reach the client, which could not tell it from an answer of the
 * right one. Of datagrams, every answer is right, also a late one.
 */
#ifndef SLUICE_RESTEER_H
#define SLUICE_RESTEER_H

#include "own.h"

/* A SYN that comes again sooner than a client repeats it was duplicated on its way. */
#define REPEAT_NS (20 * 1000000ULL)

/*
 * is_same_syn reports whether the SYN is that of the flow f again: with the data that it had (TCP Fast Open), or less,
 * since a kernel that repeats it sends none.
 */
static __always_inline bool is_same_syn(const struct packet *pkt, const struct flow *f)
{
	return f->end - pkt->tcp.end < MAX_EARLY;
}

/*
 * is_unanswered reports whether the flow f, to which the packet of its client belongs, has no answer: the
 * packet is its SYN again, and the backend has not answered that, or has refused it: pkt->refused. Of UDP,
 * whose datagrams need no answer, the backend has to be a suspect, and the flow so old that its first
 * datagram was no probe. The flow of a connected socket leaves even if it was answered before.
 */
static __noinline bool is_unanswered(struct packet *pkt, const struct flow *f, bool half_open)
{
	bool udp = f->proto == IPPROTO_UDP;
	const struct flow *answers;

	if (pkt->event != EVENT_OPEN || f->role != FLOW_FROM_CLIENT)
		return false;
	if (udp && f->flags & FLOW_RESTEERED)
		return is_suspect(f->backend_id);
	if (!half_open || (udp && !is_suspect(f->backend_id)))
		return false;
	if (!udp && (f->proto != IPPROTO_TCP || f->state != FLOW_NEW || !is_same_syn(pkt, f)))
		return false;
	answers = entry_of(pkt, f, answers_role(f));
	if (!answers || answers->state != FLOW_NEW)
		return false;
	pkt->refused = !udp && answers->ending & FLOW_REFUSED;
	return pkt->refused || elapsed(pkt->now, f->created) >= (udp ? SILENCE : REPEAT_NS);
}

/*
 * give_up is called when f is unanswered: it notes what a SYN that is sent again shows of the backend.
 * That is pkt->given_up from then on, and its answers arrive at pkt->late.
 */
static __always_inline void give_up(struct __sk_buff *ctx, struct packet *pkt, struct flow *f)
{
	__u64 sooner = f->flags & FLOW_RESTEERED ? REPEAT_NS : SEND_AGAIN_NS;

	if (f->proto == IPPROTO_TCP && !pkt->refused && !is_foreign(f) &&
	    elapsed(pkt->now, f->last_seen) >= sooner && is_intact(ctx, pkt->ip.key.hook)) {
		note_retransmit(f->backend_id, f->service_port_id, client_of(f), f->created,
				pkt->now);
		refresh(pkt, f, true);
	}
	pkt->given_up = f->backend_id;
	comes_as(f, answers_role(f), &pkt->late);
}

/*
 * dials_again reports whether the packet is the SYN of a new connection of a port whose earlier one
 * was re-steered and has no answer yet: it is for the address that it has, or re-steered in turn.
 */
static __always_inline bool dials_again(const struct packet *pkt, const struct flow *f,
					bool half_open)
{
	return half_open && f->proto == IPPROTO_TCP && f->flags & FLOW_RESTEERED &&
	       pkt->event == EVENT_OPEN && f->role == FLOW_FROM_CLIENT && f->state == FLOW_NEW &&
	       !is_same_syn(pkt, f);
}

/*
 * abandon takes the flow of pkt->given_up out of its load, after another backend has got the packet.
 * If that is a SYN, it marks the entry at which the answers of the former arrive, with the number that
 * they acknowledge.
 */
static __always_inline void abandon(const struct packet *pkt)
{
	struct flow *answers;

	add_flows(pkt->given_up, -1);
	answers = pkt->flow.proto == IPPROTO_TCP ? half_open_at(&pkt->late) : NULL;
	if (!answers || answers->backend_id != pkt->given_up)
		return;
	answers->ack = pkt->tcp.end;
	answers->state = FLOW_ABANDONED;
}

/*
 * answer_late handles a packet of a backend that was given up, which has the entry f. If it accepts
 * the connection, and no other backend has, the connection is its own again: REASON_NEXT. A packet
 * of another connection with this tuple is not looked at.
 */
static __noinline int answer_late(struct packet *pkt, struct flow *f)
{
	struct flow *from, *answers;

	if (pkt->ip.later || !pkt->tcp.acks || pkt->tcp.ack - f->ack >= MAX_EARLY)
		return REASON_PASS_OTHER_TRAFFIC;
	if (pkt->event != EVENT_ACCEPT)
		return REASON_DROP_ABANDONED;
	if (!is_foreign(f))
		note_success(f->backend_id, f->service_port_id, client_of(f), f->created,
			     bpf_ktime_get_ns());
	comes_as(f, FLOW_FROM_CLIENT, &pkt->key);
	from = half_open_at(&pkt->key);
	if (!from || from->end != f->ack || from->state != FLOW_NEW)
		return REASON_DROP_ABANDONED;
	pkt->gone = *from;
	answers = entry_of(pkt, &pkt->gone, answers_role(&pkt->gone));
	if (!answers || answers->state != FLOW_NEW)
		return REASON_DROP_ABANDONED;

	answers->ack = f->ack;
	answers->state = FLOW_ABANDONED;
	uncount(from);
	pkt->flow = *f;
	pkt->flow.role = FLOW_FROM_CLIENT;
	pkt->flow.state = FLOW_NEW;
	pkt->flow.flags |= FLOW_COUNTED;
	pkt->flow.end = pkt->tcp.ack;
	pkt->flow.ack = 0;
	comes_as(&pkt->flow, FLOW_FROM_CLIENT, &pkt->key);
	if (put_half_open(&pkt->key, &pkt->flow, BPF_ANY))
		return REASON_DROP_ABANDONED;
	add_flows(f->backend_id, 1);
	f->state = FLOW_NEW;
	f->ack = 0;
	return REASON_NEXT;
}

/*
 * put_dialled puts the entry of the answers of the backend that a socket dialled, for the flow at
 * hand, which leads elsewhere. Its own flow translates nothing.
 */
static __always_inline void put_dialled(struct packet *pkt, __u32 backend_id)
{
	struct flow *f = &pkt->flow;

	f->backend = f->original_dst;
	f->backend_port = f->original_port;
	f->backend_id = backend_id;
	f->stack_port = f->client_port;
	f->role = FLOW_TO_CLIENT;
	f->flags = FLOW_RESTEERED | (f->flags & FLOW_OF_NODE);
	f->end = 0;
	f->ack = pkt->tcp.end;
	f->state = FLOW_ABANDONED;
	comes_as(f, FLOW_TO_CLIENT, &pkt->key);
	note_entry(&pkt->key, FLOW_TO_CLIENT, false, pkt->now);
	if (!put_half_open(&pkt->key, f, BPF_NOEXIST))
		count_flows(COUNT_HALF_OPEN_PUT, 1);
}

/*
 * leaves_dialled reports whether the datagrams of a connected socket leave the backend that it dialled:
 * a suspect, unless it has just dialled that, perhaps as the probe. Once it has left, it stays away.
 */
static __always_inline bool leaves_dialled(const struct sock_state *state)
{
	return state->resteered ||
	       (is_suspect(state->backend_id) && bpf_ktime_get_ns() - state->since > SILENCE);
}

/*
 * leaving_socket returns the state of the socket that sends the packet of this protocol, if it was
 * translated when it connected and does not stay with the backend that it dialled, else NULL: it has
 * sent its SYN before without an answer, or its datagrams leave a suspect. A packet has its socket, even
 * that of another network namespace, until the stack of the node takes it.
 */
static __always_inline struct sock_state *leaving_socket(struct __sk_buff *ctx, __u8 proto)
{
	bool udp = proto == IPPROTO_UDP;
	struct bpf_sock *sk = ctx->sk;
	struct sock_state *state;
	struct bpf_tcp_sock *tcp;

	if (!sk)
		return NULL;
	sk = bpf_sk_fullsock(sk);
	if (!sk || sk->state != (udp ? BPF_TCP_ESTABLISHED : BPF_TCP_SYN_SENT))
		return NULL;
	tcp = udp ? NULL : bpf_tcp_sock(sk);
	if (!udp && (!tcp || !tcp->total_retrans))
		return NULL;
	state = bpf_sk_storage_get(&sl_sock_state, sk, NULL, 0);
	return state && (udp ? leaves_dialled(state) : !state->shows_nothing) ? state : NULL;
}

/*
 * may_leave_dialled is the cheap check of every packet of a pod: may its socket leave the backend that it
 * dialled?
 */
static __always_inline bool may_leave_dialled(struct __sk_buff *ctx, const struct network *net)
{
	if (!resteers_sockets())
		return false;
	if (net->proto == IPPROTO_UDP)
		return may_be_suspects() && leaving_socket(ctx, IPPROTO_UDP);
	return peek_syn(ctx, net) && leaving_socket(ctx, IPPROTO_TCP);
}

/* may_be_resteered is the same of every packet that leaves the node. */
static __always_inline bool may_be_resteered(struct __sk_buff *ctx, const struct network *net)
{
	return resteers_own() && peek_syn(ctx, net) && leaving_socket(ctx, IPPROTO_TCP);
}

/* find_pool_of copies the pool of a service port at a destination, and is false if that is gone. */
static __always_inline bool find_pool_of(const struct frontend_key *original_dst,
					 __u32 service_port_id, struct pool *pool)
{
	enum reason why = find_pool(original_dst, pool);

	if (why == REASON_PASS_NO_FRONTEND)
		why = find_node_port(original_dst, pool);
	return !why && pool->service_port_id == service_port_id;
}

/*
 * find_dialled_pool copies the pool of the Service that a socket has dialled, and is false if that is gone.
 */
static __always_inline bool find_dialled_pool(const struct sock_state *state, __u8 proto,
					      struct pool *pool)
{
	struct frontend_key original_dst = {
		.addr = state->original_dst,
		.port = state->original_port,
		.proto = proto,
		.scope = SCOPE_INTERNAL,
	};

	return find_pool_of(&original_dst, state->service_port_id, pool);
}

/*
 * find_leaving returns the state of the socket that sends the packet to the backend that it dialled, and
 * does not stay with that, or NULL, and copies the pool of its Service.
 */
static __always_inline struct sock_state *find_leaving(struct __sk_buff *ctx, struct packet *pkt)
{
	const struct flow_key *came = &pkt->ip.key;
	struct sock_state *state = leaving_socket(ctx, came->proto);

	if (!state || state->backend_port != came->dst_port ||
	    !addr_equal(&state->backend, &came->dst) ||
	    !find_dialled_pool(state, came->proto, &pkt->pool))
		return NULL;
	return state;
}

/*
 * begin_resteered makes pkt->flow the flow of the socket that sends the packet to the backend that it
 * dialled.
 */
static __always_inline void begin_resteered(struct packet *pkt, __u8 class)
{
	pkt->flow = (struct flow){
		.client = pkt->ip.key.src,
		.client_port = pkt->ip.key.src_port,
		.original_dst = pkt->ip.key.dst,
		.original_port = pkt->ip.key.dst_port,
		.proto = pkt->ip.key.proto,
		.service_port_id = pkt->pool.service_port_id,
		.created = pkt->now,
		.last_seen = pkt->now,
		.flags = FLOW_COUNTED | FLOW_RESTEERED | class,
	};
}

/* lead_to_other gives the socket that sends the packet, whose state it is, a flow to another backend. */
static __always_inline enum reason lead_to_other(struct __sk_buff *ctx, struct packet *pkt,
						 struct sock_state *state)
{
	bool tcp = pkt->ip.key.proto == IPPROTO_TCP, first = !pkt->given_up;
	__u32 had = state->backend_id;

	if (tcp && first)
		pkt->given_up = had;
	if (!may_leave(pkt, pkt->refused || state->refused) || !pick_instead(pkt))
		return REASON_PASS_NO_FRONTEND;

	begin_resteered(pkt, class_flag(config_device_class));
	/* For the packets of the client that follow: see may_be_direct. */
	note_port(DIRECT_PORT);
	note_port(pkt->flow.original_port);
	note_source(&pkt->flow.original_dst, pkt->flow.original_port, false, pkt->now);
	if (remember(ctx, pkt))
		return REASON_PASS_NO_FRONTEND;
	goes_as(&pkt->flow, FLOW_FROM_CLIENT, &pkt->to);
	move_load(pkt, state);
	if (!is_foreign(&pkt->flow))
		note_attempt(pkt->flow.backend_id, state->service_port_id, state->client, pkt->now);
	if (tcp && first)
		put_dialled(pkt, had);
	return REASON_TRANSLATED;
}

/*
 * resteer gives the socket that sends the packet, whose backend does not answer, a flow to another one.
 * It returns REASON_FLOW if another CPU has done that. It is for ingress, and global, so that the verifier
 * walks it once.
 */
__noinline int resteer(struct __sk_buff *ctx)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	struct sock_state *state;
	enum reason why;
	bool udp;

	if (!pkt || pkt->event != EVENT_OPEN || pkt->ip.key.proto == IPPROTO_SCTP)
		return REASON_PASS_NO_FRONTEND;
	udp = pkt->ip.key.proto == IPPROTO_UDP;
	state = find_leaving(ctx, pkt);
	if (!state)
		return REASON_PASS_NO_FRONTEND;
	if (config_bridge_port && is_beside(ctx, &pkt->ip.key))
		return REASON_PASS_NO_FRONTEND; /* another backend would not get the frame */
	if (!udp && !make_room())
		return REASON_PASS_NO_FRONTEND; /* it would lose the flow later */
	why = udp ? begin_alone(HOOK_INGRESS) : REASON_NEXT;
	if (why)
		return why;
	why = lead_to_other(ctx, pkt, state);
	if (udp)
		end_beginning();
	return why;
}

/*
 * pick_on is pick_instead for a packet that the stack has routed: it returns 1 if the backend has a route
 * from the same source by the same device, else 0. It is global, so that the verifier walks it once.
 */
__noinline int pick_on(struct __sk_buff *ctx)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	struct route way;

	return pkt && pick_instead(pkt) &&
	       find_route(ctx, &pkt->ip.key.src, &pkt->backend.addr, &way) &&
	       way.ifindex == ctx->ifindex;
}

/*
 * resteer_own is resteer for a process of this node, for egress. It works on a copy of the packet at
 * ingress, as all do that open flows. The flow gets a port of the masquerade's window, which no socket
 * takes for a connection of its own to that backend. The packet passes egress again with that port, and
 * is not re-steered then.
 */
__noinline int resteer_own(struct __sk_buff *ctx)
{
	struct packet *sent = packet_at(HOOK_EGRESS), *pkt = packet_at(HOOK_INGRESS);
	struct sock_state *state;
	bool found = false;
	__u32 had;
	int i, why;

	if (!sent || !pkt || sent->event != EVENT_OPEN || sent->ip.key.proto != IPPROTO_TCP ||
	    !is_own(ctx, &sent->ip.key) || encrypts(ctx))
		return REASON_PASS_OTHER_TRAFFIC;
	copy_sent(sent, pkt);
	state = find_leaving(ctx, pkt);
	if (!state || !make_room())
		return REASON_PASS_OTHER_TRAFFIC;
	had = state->backend_id;
	pkt->given_up = sent->given_up ?: had;
	if (!may_leave(pkt, pkt->refused || state->refused))
		return REASON_PASS_OTHER_TRAFFIC;
	for (i = 0; i < MAX_BACKENDS && !found; i++)
		found = pick_on(ctx);
	if (!found)
		return REASON_PASS_OTHER_TRAFFIC;

	begin_resteered(pkt, FLOW_OF_NODE);
	set_backend(ctx);
	why = reserve_port(ctx, FLOW_TO_CLIENT);
	evict(pkt);
	if (why)
		return REASON_PASS_OTHER_TRAFFIC;
	if (put_entries(pkt)) {
		release(HOOK_INGRESS, FLOW_TO_CLIENT);
		return REASON_PASS_OTHER_TRAFFIC;
	}
	goes_as(&pkt->flow, FLOW_FROM_CLIENT, &sent->to);
	move_load(pkt, state);
	note_attempt(pkt->flow.backend_id, state->service_port_id, state->client, pkt->now);
	if (sent->given_up)
		abandon(pkt);
	else
		put_dialled(pkt, had);
	sent->role = FLOW_FROM_CLIENT;
	return REASON_TRANSLATED;
}

/*
 * begin_own handles the first packet of a process of this node without a flow: it opens one, or returns why the
 * packet is refused, or REASON_PASS_OTHER_TRAFFIC.
 */
static __always_inline enum reason begin_own(struct __sk_buff *ctx, const struct packet *pkt)
{
	enum reason why = REASON_PASS_OTHER_TRAFFIC;

	if (pkt->ip.key.proto == IPPROTO_UDP)
		why = lead_own(ctx);
	else if (resteers_own())
		why = resteer_own(ctx);
	return why == REASON_PASS_OTHER_TRAFFIC ? open_beside_own(ctx) : why;
}

/*
 * leave handles the first packet of a connection, or a datagram, that leaves the node, by a process with the
 * flow f: the flow is forgotten, and the outcome is that of a packet without one; or a SYN is re-steered
 * again, REASON_TRANSLATED; or neither, REASON_NEXT.
 */
static __always_inline enum reason leave(struct __sk_buff *ctx, struct packet *pkt, struct flow *f,
					 bool half_open)
{
	bool udp = f->proto == IPPROTO_UDP;

	if (starts_new_flow(pkt, f, half_open) || dials_again(pkt, f, half_open)) {
		pkt->gone = *f;
		forget_all(pkt);
		return begin_own(ctx, pkt);
	}
	if (udp || !resteers_own() || !is_unanswered(pkt, f, half_open))
		return REASON_NEXT;
	give_up(ctx, pkt, f);
	return resteer_own(ctx) == REASON_TRANSLATED ? REASON_TRANSLATED : REASON_NEXT;
}

#endif
