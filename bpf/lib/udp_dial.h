/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The destinations of a UDP socket that sends datagrams without connecting. Its datagrams to one
 * frontend go to one backend. The socket itself stores the choice for a few destinations, so that
 * its first datagram and its end touch nothing that other sockets use; udp_pin.h has the others.
 */
#ifndef SLUICE_UDP_DIAL_H
#define SLUICE_UDP_DIAL_H

#include <stdbool.h>

#include "clock.h"
#include "sock.h"

/* dials_of returns NULL for a socket that has sent no datagram to a Service. */
static __always_inline struct udp_dials *dials_of(struct bpf_sock_addr *ctx)
{
	return bpf_sk_storage_get(&sl_udp_dials, ctx->sk, NULL, 0);
}

/* is_live reports whether a place is taken by a flow that has not expired. */
static __always_inline bool is_live(const struct udp_dial *dial, __u64 now)
{
	return dial->backend_id && elapsed(now, dial->last_used) < config_udp_idle_ns;
}

static __always_inline bool has_original_dst(const struct udp_dial *dial,
					     const struct frontend_key *original_dst)
{
	return dial->original_port == original_dst->port &&
	       addr_equal(&dial->original_dst, &original_dst->addr);
}

static __always_inline bool has_backend_addr(const struct udp_dial *dial,
					     const struct addr *backend, __be16 port)
{
	return dial->backend_port == port && addr_equal(&dial->backend, backend);
}

/*
 * answer_for makes the answers of a dial's backend appear to come from its original destination,
 * and from no other.
 */
static __always_inline void answer_for(struct udp_dials *own, struct udp_dial *dial)
{
	int i;

	if (dial->answers)
		return;
	for (i = 0; i < UDP_DIALS; i++)
		if (has_backend_addr(&own->dials[i], &dial->backend, dial->backend_port))
			own->dials[i].answers = false;
	dial->answers = true;
}

/*
 * pick_for_destination returns the backend that the flow of the socket to original_dst has, as
 * long as that is in the maps, else NULL: a backend that drains has no slot any more, but keeps
 * its flows.
 */
static __always_inline const struct backend *
pick_for_destination(struct udp_dials *own, const struct pool *pool,
		     const struct frontend_key *original_dst, __u64 now)
{
	__u32 id = 0;
	int i;

	bpf_spin_lock(&own->lock);
	for (i = 0; i < UDP_DIALS; i++) {
		struct udp_dial *dial = &own->dials[i];

		if (!is_live(dial, now) || !has_original_dst(dial, original_dst))
			continue;
		id = dial->backend_id;
		dial->last_used = now;
		answer_for(own, dial);
		break;
	}
	bpf_spin_unlock(&own->lock);
	return id ? pick_id(pool, id) : NULL;
}

/* has_dial reports whether a socket has a flow to original_dst. */
static __always_inline bool has_dial(const struct udp_dials *own,
				     const struct frontend_key *original_dst, __u64 now)
{
	int i;

	for (i = 0; i < UDP_DIALS; i++)
		if (is_live(&own->dials[i], now) && has_original_dst(&own->dials[i], original_dst))
			return true;
	return false;
}

/* answers_another reports whether the backend answers this socket for another destination. */
static __always_inline bool answers_another(const struct udp_dials *own,
					    const struct frontend_key *original_dst,
					    const struct backend *be, __u64 now)
{
	int i;

	for (i = 0; i < UDP_DIALS; i++) {
		const struct udp_dial *dial = &own->dials[i];

		if (is_live(dial, now) && dial->answers && !has_original_dst(dial, original_dst) &&
		    has_backend_addr(dial, &be->addr, be->port))
			return true;
	}
	return false;
}

/*
 * keep_dial stores a choice in the socket, in the place of the destination or in a free one, and
 * is false if there is none. counts: the dials of the socket are in the loads of backends.
 */
static __always_inline bool keep_dial(struct udp_dials *own,
				      const struct frontend_key *original_dst,
				      const struct backend *be, __u32 client, __u64 now,
				      bool counts)
{
	struct udp_dial *dial, *to = NULL;
	__u32 had = 0;
	int i;

	bpf_spin_lock(&own->lock);
	own->counted = counts;
	for (i = 0; i < UDP_DIALS; i++) {
		dial = &own->dials[i];
		if (dial->backend_id && has_original_dst(dial, original_dst)) {
			to = dial;
			break;
		}
		if (!to && !is_live(dial, now))
			to = dial;
	}
	if (to) {
		had = to->backend_id;
		to->original_dst = original_dst->addr;
		to->original_port = original_dst->port;
		to->backend = be->addr;
		to->backend_port = be->port;
		to->service_port_id = be->service_port_id;
		to->backend_id = be->id;
		to->last_used = now;
		to->client = client;
		to->answered = false;
		to->answers = false;
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

/*
 * original_dst_for sets the original destination for which peer answers this socket, and is false
 * if there is none. If this is the first answer, it sets first to the dial.
 */
static __always_inline bool original_dst_for(struct udp_dials *own, const struct addr *peer,
					     __be16 port, __u64 now, struct addr *original_dst,
					     __be16 *original_port, struct udp_dial *first)
{
	bool found = false;
	int i;

	bpf_spin_lock(&own->lock);
	for (i = 0; i < UDP_DIALS; i++) {
		struct udp_dial *dial = &own->dials[i];

		if (!is_live(dial, now) || !dial->answers || !has_backend_addr(dial, peer, port))
			continue;
		*original_dst = dial->original_dst;
		*original_port = dial->original_port;
		if (!dial->answered) {
			first->backend_id = dial->backend_id;
			first->service_port_id = dial->service_port_id;
			first->last_used = dial->last_used;
			first->client = dial->client;
		}
		dial->answered = 1;
		dial->last_used = now;
		found = true;
		break;
	}
	bpf_spin_unlock(&own->lock);
	return found;
}

/* answer_directly makes datagrams of peer appear to come from peer again. */
static __always_inline void answer_directly(struct udp_dials *own, const struct addr *peer,
					    __be16 port)
{
	int i;

	bpf_spin_lock(&own->lock);
	for (i = 0; i < UDP_DIALS; i++)
		if (has_backend_addr(&own->dials[i], peer, port))
			own->dials[i].answers = false;
	bpf_spin_unlock(&own->lock);
}

/* release_dials takes the dials of a closing socket out of the loads of backends. */
static __always_inline void release_dials(const struct udp_dials *own)
{
	int i;

	for (i = 0; i < UDP_DIALS; i++)
		if (own->counted && own->dials[i].backend_id)
			add_sockets(own->dials[i].backend_id, -1);
}

#endif
