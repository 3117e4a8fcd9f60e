/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Datagrams of one socket to one frontend stay together. The socket itself keeps the
 * choice for a few destinations, so that its first datagram and its end touch nothing
 * that other sockets use; udp_pin.h has those beyond.
 */
#ifndef SLUICE_UDP_DIAL_H
#define SLUICE_UDP_DIAL_H

#include <stdbool.h>

#include "addr.h"
#include "backend.h"
#include "config.h"
#include "load.h"

/* dials_of returns NULL for a socket that has sent no datagram to a Service. */
static __always_inline struct udp_dials *dials_of(struct bpf_sock_addr *ctx)
{
	return bpf_sk_storage_get(&sl_udp_dials, ctx->sk, NULL, 0);
}

/* is_live is true of a place that is taken, by a flow that has not ended. */
static __always_inline bool is_live(const struct udp_dial *dial, __u64 now)
{
	return dial->backend_id && now - dial->last_used < config_udp_idle_ns;
}

static __always_inline bool is_dialled(const struct udp_dial *dial,
				       const struct frontend_key *dialled)
{
	return dial->dialled_port == dialled->port && addr_equal(&dial->dialled, &dialled->addr);
}

static __always_inline bool is_to(const struct udp_dial *dial, const struct addr *backend,
				  __be16 port)
{
	return dial->backend_port == port && addr_equal(&dial->backend, backend);
}

/* answer_for makes what comes from a dial's backend come from what it dialled, alone. */
static __always_inline void answer_for(struct udp_dials *own, struct udp_dial *dial)
{
	int i;

	if (dial->answers)
		return;
	for (i = 0; i < UDP_DIALS; i++)
		if (is_to(&own->dials[i], &dial->backend, dial->backend_port))
			own->dials[i].answers = false;
	dial->answers = true;
}

/*
 * pick_dialled returns the backend that the socket's flow to dialled has, as long as it
 * lives, else NULL: one that drains has no slot any more, but keeps its flows.
 */
static __always_inline const struct backend *pick_dialled(struct udp_dials *own,
							  const struct pool *pool,
							  const struct frontend_key *dialled,
							  __u64 now)
{
	__u32 id = 0;
	int i;

	bpf_spin_lock(&own->lock);
	for (i = 0; i < UDP_DIALS; i++) {
		struct udp_dial *dial = &own->dials[i];

		if (!is_live(dial, now) || !is_dialled(dial, dialled))
			continue;
		id = dial->backend_id;
		dial->last_used = now;
		answer_for(own, dial);
		break;
	}
	bpf_spin_unlock(&own->lock);
	return id ? pick_id(pool, id) : NULL;
}

/* answers_another says whether the backend answers this socket for another destination. */
static __always_inline bool answers_another(const struct udp_dials *own,
					    const struct frontend_key *dialled,
					    const struct backend *be, __u64 now)
{
	int i;

	for (i = 0; i < UDP_DIALS; i++) {
		const struct udp_dial *dial = &own->dials[i];

		if (is_live(dial, now) && dial->answers && !is_dialled(dial, dialled) &&
		    is_to(dial, &be->addr, be->port))
			return true;
	}
	return false;
}

/*
 * keep_dial has the socket keep a choice, in the place that the destination has, or in a
 * free one. It is false if there is none. counts: the socket's dials are in the loads of
 * backends.
 */
static __always_inline bool keep_dial(struct udp_dials *own, const struct frontend_key *dialled,
				      const struct backend *be, __u64 now, bool counts)
{
	struct udp_dial *dial, *to = NULL;
	struct udp_dial next = {
		.dialled = dialled->addr,
		.dialled_port = dialled->port,
		.backend = be->addr,
		.backend_port = be->port,
		.service_port_id = be->service_port_id,
		.backend_id = be->id,
		.last_used = now,
	};
	__u32 had = 0;
	int i;

	bpf_spin_lock(&own->lock);
	own->counted = counts;
	for (i = UDP_DIALS - 1; i >= 0; i--) {
		dial = &own->dials[i];
		if (!is_live(dial, now))
			to = dial;
	}
	for (i = 0; i < UDP_DIALS; i++) {
		dial = &own->dials[i];
		if (dial->backend_id && is_dialled(dial, dialled))
			to = dial;
	}
	if (to) {
		had = to->backend_id;
		*to = next;
		answer_for(own, to);
	} else {
		own->pinned = true;
	}
	bpf_spin_unlock(&own->lock);

	if (to && counts) {
		if (had)
			add_sockets(had, -1);
		add_sockets(be->id, 1);
	}
	return to;
}

/* dialled_for gives what the socket dialled to get what answers from peer. */
static __always_inline bool dialled_for(struct udp_dials *own, const struct addr *peer, __be16 port,
					__u64 now, struct addr *dialled, __be16 *dialled_port)
{
	bool found = false;
	int i;

	bpf_spin_lock(&own->lock);
	for (i = 0; i < UDP_DIALS; i++) {
		struct udp_dial *dial = &own->dials[i];

		if (!is_live(dial, now) || !dial->answers || !is_to(dial, peer, port))
			continue;
		*dialled = dial->dialled;
		*dialled_port = dial->dialled_port;
		dial->last_used = now;
		found = true;
		break;
	}
	bpf_spin_unlock(&own->lock);
	return found;
}

/* answer_directly lets datagrams of peer come from peer again. */
static __always_inline void answer_directly(struct udp_dials *own, const struct addr *peer,
					    __be16 port)
{
	int i;

	bpf_spin_lock(&own->lock);
	for (i = 0; i < UDP_DIALS; i++)
		if (is_to(&own->dials[i], peer, port))
			own->dials[i].answers = false;
	bpf_spin_unlock(&own->lock);
}

/* release_dials takes what a closing socket dialled out of the backends' loads. */
static __always_inline void release_dials(const struct udp_dials *own)
{
	int i;

	for (i = 0; i < UDP_DIALS; i++)
		if (own->counted && own->dials[i].backend_id)
			add_sockets(own->dials[i].backend_id, -1);
}

#endif
