/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Connected UDP sockets whose backend the Service has left: it is gone, or the original destination leads
 * to another Service or to none. The socket keeps its peer, and its program learns nothing. Where its
 * datagrams pass a device, the next one gets a flow to a backend that the original destination leads to
 * now, or is refused as one to the original destination would be.
 *
 * The agent marks the addresses of such backends (ADDR_LEFT), as long as there are sockets that have
 * dialled them. Packets to other addresses cost nothing.
 */
#ifndef SLUICE_LEFT_H
#define SLUICE_LEFT_H

#include <stdbool.h>

#include "dial.h"
#include "pick.h"
#include "turn.h"

/*
 * dialler_of returns the state of the connected UDP socket that sends a packet to the backend that it got
 * when it connected, or NULL. A packet has its socket, even that of another network namespace, until the
 * stack of the node takes it.
 */
static __always_inline struct sock_state *dialler_of(struct __sk_buff *ctx,
						     const struct flow_key *came)
{
	struct bpf_sock *sk = ctx->sk;
	struct sock_state *state;

	if (!sk)
		return NULL;
	sk = bpf_sk_fullsock(sk);
	if (!sk || sk->protocol != IPPROTO_UDP || sk->state != BPF_TCP_ESTABLISHED)
		return NULL;
	state = bpf_sk_storage_get(&sl_sock_state, sk, NULL, 0);
	return state && state->backend_port == came->dst_port &&
			       addr_equal(&state->backend, &came->dst) ?
		       state :
		       NULL;
}

/*
 * find_left handles a datagram to an address that a Service has left. It copies the pool that serves the
 * original destination of the socket, and sets pkt->left, or returns why the datagram is refused. It
 * returns REASON_PASS_NO_FRONTEND for a socket that has its backend, or that has dialled none. It is for a
 * packet at ingress, or its copy, and global, so that the verifier walks it once.
 */
__noinline int find_left(struct __sk_buff *ctx)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	struct frontend_key original_dst = { .proto = IPPROTO_UDP, .scope = SCOPE_INTERNAL };
	const struct sock_state *state;
	const struct backend *be;
	enum reason why;

	if (!pkt || pkt->ip.key.proto != IPPROTO_UDP || pkt->event != EVENT_OPEN)
		return REASON_PASS_NO_FRONTEND;
	state = dialler_of(ctx, &pkt->ip.key);
	if (!state)
		return REASON_PASS_NO_FRONTEND;
	original_dst.addr = state->original_dst;
	original_dst.port = state->original_port;
	why = lookup_dial(&original_dst, addr_is_loopback(&original_dst.addr), &pkt->pool);
	be = backend_at(state->backend_id);
	if (!why && be && !state->resteered && be->service_port_id == pkt->pool.service_port_id)
		return REASON_PASS_NO_FRONTEND;
	if (why == REASON_PASS_NO_FRONTEND)
		return REASON_REJECT_NO_BACKEND;
	if (!why && config_bridge_port && !(addr_flags(&pkt->ip.key.src) & ADDR_NODE) &&
	    is_beside(ctx, &pkt->ip.key))
		return REASON_REJECT_NO_BACKEND; /* another backend would not get the frame */
	pkt->left = true;
	return why;
}

/*
 * move_load moves the load of a socket from the backend that it had to that of the flow at hand, unless
 * another thread has connected it elsewhere meanwhile.
 */
static __always_inline void move_load(const struct packet *pkt, struct sock_state *state)
{
	const struct flow *f = &pkt->flow;
	__u32 had, counted = 0;

	bpf_spin_lock(&state->lock);
	had = state->backend_id;
	if (state->backend_port == f->original_port &&
	    addr_equal(&state->backend, &f->original_dst)) {
		counted = state->counted;
		state->counted = 0;
		state->backend_id = f->backend_id;
		state->service_port_id = f->service_port_id;
		state->resteered = 1;
	}
	bpf_spin_unlock(&state->lock);
	if (counted)
		add_sockets(had, -1);
	add_flows(f->backend_id, 1);
}

/* add_load adds the flow at hand to the load of its backend. */
static __always_inline void add_load(struct __sk_buff *ctx, struct packet *pkt)
{
	struct sock_state *state = pkt->left ? dialler_of(ctx, &pkt->ip.key) : NULL;

	if (state)
		move_load(pkt, state);
	else
		add_flows(pkt->flow.backend_id, 1);
}

#endif
