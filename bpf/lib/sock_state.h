/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What a socket dialled: remembered in the socket itself. */
#ifndef SLUICE_SOCK_STATE_H
#define SLUICE_SOCK_STATE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/in.h>

#include "../../maps/maps.h"
#include "addr.h"
#include "backend.h"
#include "load.h"
#include "netns.h"
#include "sock_addr.h"

/* state_of returns NULL for a socket that we never translated. */
static __always_inline struct sock_state *state_of(struct bpf_sock_addr *ctx)
{
	return bpf_sk_storage_get(&sl_sock_state, ctx->sk, NULL, 0);
}

/*
 * replace_state puts what a socket got in the place of what it had. Threads may send
 * by one UDP socket at once: each takes out of the load what it replaces.
 */
static __always_inline void replace_state(struct sock_state *state, const struct sock_state *next)
{
	__u32 had, counted;

	bpf_spin_lock(&state->lock);
	had = state->backend_id;
	counted = state->counted;
	state->dialled = next->dialled;
	state->backend = next->backend;
	state->dialled_port = next->dialled_port;
	state->backend_port = next->backend_port;
	state->service_port_id = next->service_port_id;
	state->backend_id = next->backend_id;
	state->counted = next->counted;
	bpf_spin_unlock(&state->lock);

	if (counted)
		add_sockets(had, -1);
	if (next->counted)
		add_sockets(next->backend_id, 1);
}

/* A socket counts until it is closed. There is no program for the end of the kernel's own. */
static __always_inline enum reason remember_dialled(struct bpf_sock_addr *ctx,
						    const struct frontend_key *dialled,
						    const struct backend *be)
{
	struct sock_state next = {
		.dialled = dialled->addr,
		.dialled_port = dialled->port,
		.backend = be->addr,
		.backend_port = be->port,
		.service_port_id = be->service_port_id,
		.backend_id = be->id,
		.counted = !is_kernels(ctx),
	};
	struct sock_state *state;

	state = bpf_sk_storage_get(&sl_sock_state, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!state)
		return REASON_TRANSLATED_UNREMEMBERED;

	/* Asked for, so that the iterator over the state finds it in the socket. */
	bpf_get_socket_cookie(ctx);

	replace_state(state, &next);
	return REASON_TRANSLATED;
}

/* forget_dialled is for a socket that now connects to no Service. */
static __always_inline void forget_dialled(struct bpf_sock_addr *ctx)
{
	const struct sock_state *state = state_of(ctx);

	if (!state)
		return;
	if (state->counted)
		add_sockets(state->backend_id, -1);
	bpf_sk_storage_delete(&sl_sock_state, ctx->sk);
}

/* connected_by gives what the socket dialled, if peer is the backend that it got for it. */
static __always_inline bool connected_by(struct sock_state *state, const struct addr *peer,
					 __be16 port, struct addr *dialled, __be16 *dialled_port)
{
	bool is_peer;

	bpf_spin_lock(&state->lock);
	is_peer = state->backend_port == port && addr_equal(&state->backend, peer);
	*dialled = state->dialled;
	*dialled_port = state->dialled_port;
	bpf_spin_unlock(&state->lock);
	return is_peer;
}

/*
 * pick_connected returns the backend to which the socket is connected, if it was
 * connected by way of what it dials now, else NULL.
 */
static __always_inline const struct backend *pick_connected(struct bpf_sock_addr *ctx,
							    const struct pool *pool,
							    const struct frontend_key *dialled)
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
	same = state->dialled_port == dialled->port && addr_equal(&state->dialled, &dialled->addr);
	id = state->backend_id;
	bpf_spin_unlock(&state->lock);
	return same ? pick_id(pool, id) : NULL;
}

#endif
