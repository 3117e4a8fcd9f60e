/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Session affinity: a client keeps its backend. */
#ifndef SLUICE_AFFINITY_H
#define SLUICE_AFFINITY_H

#include <stdbool.h>

#include "../../maps/maps.h"
#include "balance.h"

#define NS_PER_SECOND 1000000000ULL

/* netns_client returns the key of all sockets of one network namespace. */
static __always_inline struct affinity_key netns_client(const struct pool *pool, __u64 cookie)
{
	struct affinity_key client = {
		.service_port_id = pool->service_port_id,
		.client_kind = CLIENT_NETNS,
	};

	/* Not in the initializer, which would leave the rest of the union uninitialized. */
	client.netns_cookie = cookie;
	return client;
}

/* addr_client returns the key of all clients behind one address. */
static __always_inline struct affinity_key addr_client(__u32 service_port_id,
						       const struct addr *src)
{
	struct affinity_key client = {
		.service_port_id = service_port_id,
		.client_kind = CLIENT_ADDR,
	};

	client.addr = *src;
	return client;
}

/*
 * pick_previous returns the backend that the client had, if new flows may still choose it and the
 * client was here within the timeout, else NULL.
 */
static __always_inline const struct backend *pick_previous(const struct pool *pool,
							   const struct affinity *had, __u64 now)
{
	if (!had || now - had->last_used >= pool->affinity_seconds * NS_PER_SECOND)
		return NULL;
	return has_slot(pool, had->backend_id) ? pick_id(pool, had->backend_id) : NULL;
}

/* keep_backend writes the backend of a client into an affinity map. */
static __always_inline void keep_backend(void *where, const struct affinity_key *client,
					 __u32 backend_id, __u64 now)
{
	struct affinity has = { .last_used = now, .backend_id = backend_id };

	bpf_map_update_elem(where, client, &has, BPF_ANY);
}

/*
 * pick_backend returns a backend for a new flow of client, or NULL; seed: see choose. An assured
 * client, such as a socket of this node, keeps the backend in sl_affinity; any other only in
 * sl_claims, until its flow is confirmed. If two CPUs choose for a new client at once, the later
 * choice is kept.
 */
static __always_inline const struct backend *pick_backend(const struct pool *pool,
							  const struct affinity_key *client,
							  __u32 seed, __u64 now, bool assured)
{
	struct affinity *had;
	const struct backend *be;

	if (!pool->affinity_seconds)
		return pick_new(pool, seed);
	had = bpf_map_lookup_elem(&sl_affinity, client);
	be = pick_previous(pool, had, now);
	if (be && assured)
		had->last_used = now;
	if (be)
		return be;
	if (!assured)
		be = pick_previous(pool, bpf_map_lookup_elem(&sl_claims, client), now);
	if (!be)
		be = pick_new(pool, seed);
	if (be && assured)
		keep_backend(&sl_affinity, client, be->id, now);
	else if (be)
		keep_backend(&sl_claims, client, be->id, now);
	return be;
}

/*
 * confirm_client moves the affinity of the client of a confirmed flow from sl_claims to
 * sl_affinity, or refreshes it there.
 */
static __always_inline void confirm_client(const struct flow *f, __u64 now)
{
	struct affinity_key client = addr_client(f->service_port_id, &f->client);
	struct affinity *had = bpf_map_lookup_elem(&sl_affinity, &client);
	const struct affinity *claims;

	if (had && had->backend_id == f->backend_id) {
		had->last_used = now;
		return;
	}
	claims = bpf_map_lookup_elem(&sl_claims, &client);
	if (!claims || claims->backend_id != f->backend_id)
		return;
	keep_backend(&sl_affinity, &client, f->backend_id, now);
	bpf_map_delete_elem(&sl_claims, &client);
}

#endif
