/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Session affinity: a client keeps its backend. */
#ifndef SLUICE_AFFINITY_H
#define SLUICE_AFFINITY_H

#include <stdbool.h>

#include "../../maps/maps.h"
#include "balance.h"

#define NS_PER_SECOND 1000000000ULL

/* netns_client is all sockets of one network namespace. */
static __always_inline struct affinity_key netns_client(const struct pool *pool, __u64 cookie)
{
	struct affinity_key client = {
		.service_port_id = pool->service_port_id,
		.client_kind = CLIENT_NETNS,
	};

	/* Not in the initializer: that would leave the rest of the union as it is. */
	client.netns_cookie = cookie;
	return client;
}

/*
 * pick_remembered returns the backend that client had, if new flows may still choose it
 * and the client was here within the timeout.
 */
static __always_inline const struct backend *
pick_remembered(const struct pool *pool, const struct affinity_key *client, __u64 now)
{
	struct affinity *had = bpf_map_lookup_elem(&sl_affinity, client);
	const struct backend *be;

	if (!had || now - had->last_used >= pool->affinity_seconds * NS_PER_SECOND)
		return NULL;
	if (!has_slot(pool, had->backend_id))
		return NULL;
	be = pick_id(pool, had->backend_id);
	if (be)
		had->last_used = now;
	return be;
}

/*
 * pick_backend returns a backend for a new flow of client, or NULL; seed: see choose.
 * Two CPUs may choose for a new client at once; the later one is remembered.
 */
static __always_inline const struct backend *
pick_backend(const struct pool *pool, const struct affinity_key *client, __u32 seed, __u64 now)
{
	struct affinity has = { .last_used = now };
	const struct backend *be;

	if (!pool->affinity_seconds)
		return pick_new(pool, seed);
	be = pick_remembered(pool, client, now);
	if (be)
		return be;

	be = pick_new(pool, seed);
	if (be) {
		has.backend_id = be->id;
		bpf_map_update_elem(&sl_affinity, client, &has, BPF_ANY);
	}
	return be;
}

#endif
