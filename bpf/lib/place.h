/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Places in the arrays that the agent fills.
 *
 * What a program reads there is right, or it is seen to be wrong:
 *
 * - The agent writes a place before anything leads to it, and the word that leads to it
 *   last, with release order: a frontend's pool_id, or its element in frontend_ids. Each
 *   step of ours goes by the number that the step before has read. arm64 keeps that
 *   order, too: a load does not come before the load of its address.
 * - Nothing that a frontend leads to is changed afterwards. The agent makes another pool,
 *   and switches pool_id with one store.
 * - The agent uses a place again only when every program has ended that may have read
 *   what led to it (an RCU grace period, which the update of an array of maps waits for).
 * - An element of frontend_ids is beyond that rule: the kernel may give it to another key
 *   while we read its value. So a frontend says which key it is for, and we compare.
 * - Ids of backends that are remembered longer than a program runs have a generation,
 *   and a place says which one it has.
 */
#ifndef SLUICE_PLACE_H
#define SLUICE_PLACE_H

#include <stdbool.h>

#include "../../maps/maps.h"

/* read_once has the compiler read a word that the agent may write, once. */
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

/* slot_at returns the backend id in a slot, or 0, which no backend has. */
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
