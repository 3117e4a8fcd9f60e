/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Lookups in the arrays that the agent fills.
 *
 * What a program reads there is right, or recognizably wrong:
 *
 * - The agent writes a place before anything leads to it. It writes the word that leads to it
 *   last, with release order: the pool_id of a frontend, or an element of frontend_ids. Each
 *   lookup here depends on the number that the one before has read, and even arm64 keeps the order
 *   of loads that depend on each other.
 * - Nothing that a frontend leads to is changed afterwards. The agent writes another pool, and
 *   switches pool_id with one store.
 * - The agent reuses a place only when every program that may have read what led to it has ended
 *   (an RCU grace period, which the update of an array of maps waits for).
 * - Elements of frontend_ids are not covered by that: the kernel may give one to another key while
 *   its value is read. So a frontend contains its own key, which find_pool compares.
 * - Ids of backends that are kept for longer than a program runs have a generation, and each place
 *   contains its current one.
 */
#ifndef SLUICE_PLACE_H
#define SLUICE_PLACE_H

#include <stdbool.h>

#include "../../maps/maps.h"

/* read_once makes the compiler read a word that the agent may write exactly once. */
static __always_inline __u32 read_once(const __u32 *word)
{
	return *(volatile const __u32 *)word;
}

static __always_inline const struct frontend *frontend_at(__u32 id)
{
	__u32 chunk = id / CHUNK_FRONTENDS, place = id % CHUNK_FRONTENDS;
	void *places = bpf_map_lookup_elem(&sl_frontends, &chunk);

	return places ? bpf_map_lookup_elem(places, &place) : NULL;
}

static __always_inline const struct pool *pool_at(__u32 id)
{
	__u32 chunk = id / CHUNK_POOLS, place = id % CHUNK_POOLS;
	void *places = bpf_map_lookup_elem(&sl_pools, &chunk);

	return places ? bpf_map_lookup_elem(places, &place) : NULL;
}

/* slot_at returns the backend id in a slot, or 0, which is no backend. */
static __always_inline __u32 slot_at(__u32 slot)
{
	__u32 chunk = slot / CHUNK_SLOTS, place = slot % CHUNK_SLOTS;
	void *places = bpf_map_lookup_elem(&sl_slots, &chunk);
	const __u32 *id = places ? bpf_map_lookup_elem(places, &place) : NULL;

	return id ? read_once(id) : 0;
}

/* backend_at returns the backend with this id, or NULL if it is gone. */
static __always_inline const struct backend *backend_at(__u32 id)
{
	__u32 chunk = (id & INDEX_MASK) / CHUNK_BACKENDS;
	__u32 place = (id & INDEX_MASK) % CHUNK_BACKENDS;
	void *places = bpf_map_lookup_elem(&sl_backends, &chunk);
	const struct backend *be = places ? bpf_map_lookup_elem(places, &place) : NULL;

	return be && id && read_once(&be->id) == id ? be : NULL;
}

#endif
