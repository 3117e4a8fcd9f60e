/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The original destination of a connected socket, stored in the socket itself. */
#ifndef SLUICE_SOCK_STATE_H
#define SLUICE_SOCK_STATE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/in.h>

#include "sock.h"

/* state_of returns NULL for a socket that was never translated. */
static __always_inline struct sock_state *state_of(struct bpf_sock_addr *ctx)
{
	return bpf_sk_storage_get(&sl_sock_state, ctx->sk, NULL, 0);
}

/*
 * replace_state writes what a socket got in place of what it had. Threads may use one UDP socket
 * at once: each removes from the load what it replaces.
 */
static __always_inline void replace_state(struct sock_state *state, const struct sock_state *next)
{
	__u32 had, counted;

	bpf_spin_lock(&state->lock);
	had = state->backend_id;
	counted = state->counted;
	state->original_dst = next->original_dst;
	state->backend = next->backend;
	state->original_port = next->original_port;
	state->backend_port = next->backend_port;
	state->service_port_id = next->service_port_id;
	state->backend_id = next->backend_id;
	state->counted = next->counted;
	state->answered = next->answered;
	state->resteered = 0;
	state->refused = 0;
	state->shows_nothing = next->shows_nothing;
	state->since = next->since;
	state->handshake_counted = 0;
	state->client = next->client;
	state->syn_retransmits = 0;
	bpf_spin_unlock(&state->lock);

	if (counted)
		add_sockets(had, -1);
	if (next->counted)
		add_sockets(next->backend_id, 1);
}

/*
 * Two fields of a UDP socket change when it receives its first datagram: the kernel charges that to the
 * memory of the socket, of which a part remains, and sets the CPU of incoming datagrams, if the socket is
 * connected. An application can set either by an option, without any datagram.
 */

/*
 * may_have_received reports whether a UDP socket that connects shows either. So it does not show whether
 * its next peer answers.
 */
static __always_inline bool may_have_received(struct bpf_sock_addr *ctx)
{
	const struct sock *sk = sock_of(ctx);

	return config_heal && ctx->protocol == IPPROTO_UDP &&
	       (BPF_CORE_READ(sk, __sk_common.skc_incoming_cpu) >= 0 ||
		BPF_CORE_READ(sk, sk_forward_alloc));
}

/* note_left notes that a UDP socket leaves its backend. That it has connected to it was only noted if that shows answers. */
static __always_inline void note_left(const struct sock_state *state, __u32 proto, __u64 now)
{
	if (config_heal && proto == IPPROTO_UDP && !state->answered && !state->resteered &&
	    shows_answers(state->backend_id, state->since))
		note_abandoned(state->backend_id, state->service_port_id, state->client,
			       state->since, now);
}

/* has_received reports whether a UDP socket that showed neither when it connected has received a datagram. */
static __always_inline bool has_received(const struct sock *sk)
{
	if (bpf_core_field_exists(sk->sk_reserved_mem) && BPF_CORE_READ(sk, sk_reserved_mem))
		return false;
	return BPF_CORE_READ(sk, __sk_common.skc_incoming_cpu) >= 0 &&
	       BPF_CORE_READ(sk, sk_forward_alloc) > 0;
}

/*
 * remember_original_dst stores the original destination and the backend in the socket, which
 * counts in the backend's load until it is closed. Sockets of the kernel do not count, because no
 * program runs when they are closed.
 */
static __always_inline enum reason remember_original_dst(struct bpf_sock_addr *ctx,
							 const struct frontend_key *original_dst,
							 const struct backend *be, __u32 client,
							 bool answered, bool shows_nothing,
							 __u64 now)
{
	struct sock_state next = {
		.original_dst = original_dst->addr,
		.original_port = original_dst->port,
		.backend = be->addr,
		.backend_port = be->port,
		.service_port_id = be->service_port_id,
		.backend_id = be->id,
		.counted = !is_kernel_socket(ctx),
		.answered = answered,
		.shows_nothing = shows_nothing,
		.client = client,
		.since = now,
	};
	struct sock_state *state;

	state = bpf_sk_storage_get(&sl_sock_state, ctx->sk, &next, BPF_SK_STORAGE_GET_F_CREATE);
	if (!state)
		return REASON_TRANSLATED_UNREMEMBERED;

	/*
	 * This makes the kernel create the cookie, which the iterator over the state reads from the
	 * socket.
	 */
	bpf_get_socket_cookie(ctx);

	/* The kernel copies next into new storage; a socket that connects again has older state. */
	if (state->since != now || state->backend_id != next.backend_id) {
		note_left(state, ctx->protocol, now);
		replace_state(state, &next);
	} else if (next.counted)
		add_sockets(next.backend_id, 1);
	return REASON_TRANSLATED;
}

/* leave_load removes a socket from the load of its backend, which resteer may change meanwhile. */
static __always_inline void leave_load(struct sock_state *state)
{
	__u32 had, counted;

	bpf_spin_lock(&state->lock);
	had = state->backend_id;
	counted = state->counted;
	state->counted = 0;
	bpf_spin_unlock(&state->lock);
	if (counted)
		add_sockets(had, -1);
}

/* forget_original_dst deletes the state of a socket that now connects to no Service. */
static __always_inline void forget_original_dst(struct bpf_sock_addr *ctx)
{
	struct sock_state *state = state_of(ctx);

	if (!state)
		return;
	note_left(state, ctx->protocol, bpf_ktime_get_ns());
	leave_load(state);
	bpf_sk_storage_delete(&sl_sock_state, ctx->sk);
}

/*
 * note_answer notes once that the backend of a connected UDP socket has answered, if it has. If the
 * socket was re-steered, its flow shows that.
 */
static __always_inline void note_answer(struct sock_state *state, const struct sock *sk, __u64 now)
{
	if (!config_heal || state->answered || state->resteered || !has_received(sk))
		return;
	state->answered = 1;
	note_datagram(state->backend_id, state->service_port_id, state->client, state->since, now);
}

/*
 * get_original_dst sets original_dst and original_port, and reports whether peer is the backend that
 * the socket got for them.
 */
static __always_inline bool get_original_dst(struct sock_state *state, const struct addr *peer,
					     __be16 port, struct addr *original_dst,
					     __be16 *original_port)
{
	bool is_peer;

	bpf_spin_lock(&state->lock);
	is_peer = state->backend_port == port && addr_equal(&state->backend, peer);
	*original_dst = state->original_dst;
	*original_port = state->original_port;
	bpf_spin_unlock(&state->lock);
	return is_peer;
}

/*
 * pick_connected returns the backend to which the socket is connected, if it connected to the same
 * original destination, else NULL.
 */
static __always_inline const struct backend *pick_connected(struct bpf_sock_addr *ctx,
							    const struct pool *pool,
							    const struct frontend_key *original_dst)
{
	struct sock_state *state;
	bool same;
	__u32 id;

	if (!is_connected(ctx))
		return NULL;
	state = state_of(ctx);
	if (!state)
		return NULL;
	bpf_spin_lock(&state->lock);
	same = state->original_port == original_dst->port &&
	       addr_equal(&state->original_dst, &original_dst->addr);
	id = state->backend_id;
	bpf_spin_unlock(&state->lock);
	return same ? pick_id(pool, id) : NULL;
}

#endif
