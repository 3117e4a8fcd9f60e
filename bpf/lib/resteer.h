/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Re-steering: a SYN that is sent again, because no answer has come, goes to another backend.
 *
 * A flow of a device that is half open begins anew. A connection that was translated at its socket
 * has no flow, but its packets pass the device of its pod: it gets a flow, from the backend that the
 * socket dialled to another one, and the socket keeps that peer. So nothing changes for the
 * application.
 *
 * The first backend that answers gets the connection, even one that was given up before: its
 * entries stay, in the state FLOW_ABANDONED. So a backend that is only slow loses nothing, and what
 * the others answer later does not reach the client, which could not tell it from an answer of the
 * right one.
 */
#ifndef SLUICE_RESTEER_H
#define SLUICE_RESTEER_H

#include "open.h"

/* A SYN that comes again sooner than a client repeats it was duplicated on its way. */
#define REPEAT_NS (20 * 1000000ULL)

/* answers_role returns the role of the entry at which the answers of the backend of f arrive. */
static __always_inline __u8 answers_role(const struct flow *f)
{
	return is_masqueraded(f) ? FLOW_FROM_BACKEND : FLOW_TO_CLIENT;
}

/*
 * is_unanswered reports whether the packet is the SYN of the flow f again, which the backend has
 * not answered. Then pkt->given_up is that backend, and pkt->late is where its answers arrive.
 */
static __noinline bool is_unanswered(struct packet *pkt, const struct flow *f, bool half_open)
{
	const struct flow *answers;

	if (!half_open || pkt->ip.key.proto != IPPROTO_TCP || pkt->event != EVENT_OPEN ||
	    f->role != FLOW_FROM_CLIENT || f->state != FLOW_NEW || f->end != pkt->tcp.end ||
	    (__s64)(pkt->now - f->created) < (__s64)REPEAT_NS)
		return false;
	answers = entry_of(pkt, f, answers_role(f));
	if (!answers || answers->state != FLOW_NEW)
		return false;
	pkt->given_up = f->backend_id;
	pkt->late = pkt->key;
	return true;
}

/*
 * dials_again reports whether the packet is the SYN of a new connection of a port whose earlier one
 * was re-steered and has no answer yet: it is for the address that it has, or re-steered in turn.
 */
static __always_inline bool dials_again(const struct packet *pkt, const struct flow *f,
					bool half_open)
{
	return half_open && f->flags & FLOW_RESTEERED && pkt->event == EVENT_OPEN &&
	       f->state == FLOW_NEW && f->end != pkt->tcp.end;
}

/*
 * abandon takes the flow of pkt->given_up out of its load, after another backend has got the SYN. It
 * marks the entry at which its answers arrive, with the number that they acknowledge.
 */
static __always_inline void abandon(const struct packet *pkt)
{
	struct flow *answers = half_open_at(&pkt->late);

	add_flows(pkt->given_up, -1);
	note_failure(pkt->given_up, pkt->flow.service_port_id,
		     hash(&pkt->flow.client, sizeof(pkt->flow.client)), HEALTH_RETRANSMIT,
		     pkt->now);
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

	if (pkt->ip.later || !pkt->tcp.acks || pkt->tcp.ack != f->ack)
		return REASON_PASS_OTHER_TRAFFIC;
	if (pkt->event != EVENT_ACCEPT)
		return REASON_DROP_ABANDONED;
	note_success(f->backend_id, f->service_port_id, hash(&f->client, sizeof(f->client)),
		     f->created, bpf_ktime_get_ns());
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
	pkt->flow.end = f->ack;
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
	f->flags = FLOW_RESTEERED | class_flag(config_device_class);
	f->end = 0;
	f->ack = pkt->tcp.end;
	f->state = FLOW_ABANDONED;
	comes_as(f, FLOW_TO_CLIENT, &pkt->key);
	if (!put_half_open(&pkt->key, f, BPF_NOEXIST))
		count_flows(COUNT_HALF_OPEN_PUT, 1);
}

/*
 * repeats_syn returns the state of the socket that sends the packet, if it was translated and has
 * sent its SYN before without an answer, else NULL. A packet has its socket, even that of another
 * network namespace, until the stack of the node takes it.
 */
static __always_inline struct sock_state *repeats_syn(struct __sk_buff *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct bpf_tcp_sock *tcp;

	if (!sk)
		return NULL;
	sk = bpf_sk_fullsock(sk);
	if (!sk || sk->state != BPF_TCP_SYN_SENT)
		return NULL;
	tcp = bpf_tcp_sock(sk);
	if (!tcp || !tcp->total_retrans)
		return NULL;
	return bpf_sk_storage_get(&sl_sock_state, sk, NULL, 0);
}

/*
 * find_dialled_pool copies the pool of the Service that a socket has dialled, and is false if that is gone.
 */
static __always_inline bool find_dialled_pool(const struct sock_state *state, struct pool *pool)
{
	struct frontend_key original_dst = {
		.addr = state->original_dst,
		.port = state->original_port,
		.proto = IPPROTO_TCP,
		.scope = SCOPE_INTERNAL,
	};
	enum reason why = find_pool(&original_dst, pool);

	if (why == REASON_PASS_NO_FRONTEND)
		why = find_node_port(&original_dst, pool);
	return !why && pool->service_port_id == state->service_port_id;
}

/*
 * resteer gives the connection of the socket that sends the packet, whose backend does not answer,
 * a flow to another one, to which the load of the connection moves. It is for ingress, and global,
 * so that the verifier walks it once.
 */
__noinline int resteer(struct __sk_buff *ctx)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	struct sock_state *state;
	__u32 had, counted;
	bool first;

	if (!pkt || pkt->event != EVENT_OPEN || pkt->ip.key.proto != IPPROTO_TCP)
		return REASON_PASS_NO_FRONTEND;
	state = repeats_syn(ctx);
	if (!state || state->backend_port != pkt->ip.key.dst_port ||
	    !addr_equal(&state->backend, &pkt->ip.key.dst) || !find_dialled_pool(state, &pkt->pool))
		return REASON_PASS_NO_FRONTEND;
	if (config_bridge_port && is_beside(ctx, &pkt->ip.key))
		return REASON_PASS_NO_FRONTEND; /* another backend would not get the frame */
	had = state->backend_id;
	first = !pkt->given_up;
	if (first)
		pkt->given_up = had;
	if (!may_leave(pkt) || !pick_instead(pkt))
		return REASON_PASS_NO_FRONTEND;

	pkt->flow = (struct flow){
		.client = pkt->ip.key.src,
		.client_port = pkt->ip.key.src_port,
		.original_dst = pkt->ip.key.dst,
		.original_port = pkt->ip.key.dst_port,
		.proto = IPPROTO_TCP,
		.service_port_id = pkt->pool.service_port_id,
		.created = pkt->now,
		.last_seen = pkt->now,
		.flags = FLOW_COUNTED | FLOW_RESTEERED | class_flag(config_device_class),
	};
	/* For the packets of the client that follow: see may_be_direct. */
	note_port(DIRECT_PORT);
	note_port(pkt->flow.original_port);
	note_source(&pkt->flow.original_dst, pkt->flow.original_port, false, pkt->now);
	if (remember(ctx, pkt))
		return REASON_PASS_NO_FRONTEND;
	goes_as(&pkt->flow, FLOW_FROM_CLIENT, &pkt->to);
	add_flows(pkt->flow.backend_id, 1);
	bpf_spin_lock(&state->lock);
	counted = state->counted;
	state->counted = 0;
	state->backend_id = pkt->flow.backend_id;
	state->resteered = 1;
	bpf_spin_unlock(&state->lock);
	if (counted)
		add_sockets(had, -1);
	note_attempt(state->backend_id, state->service_port_id, state->client, pkt->now);
	if (first)
		put_dialled(pkt, had);
	return REASON_TRANSLATED;
}

#endif
