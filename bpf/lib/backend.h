/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Picking a backend of a pool. */
#ifndef SLUICE_BACKEND_H
#define SLUICE_BACKEND_H

#include <stdbool.h>

#include "place.h"

/* A pool has at most 2^MAX_POOL_BITS slots, so a binary search takes that many steps. */
#define MAX_POOL_BITS 24

/* How many slots, spread over the pool, are tried before a new flow is refused. */
#define MAX_PICKS 4

/*
 * pick_id returns the backend with this id, or NULL if it is gone or now belongs to another
 * service port, which can happen to an id that was remembered.
 */
static __always_inline const struct backend *pick_id(const struct pool *pool, __u32 id)
{
	const struct backend *be = backend_at(id);

	return be && be->service_port_id == pool->service_port_id ? be : NULL;
}

/* has_slot reports whether a slot of the pool holds id. Slots are sorted by id. */
static __always_inline bool has_slot(const struct pool *pool, __u32 id)
{
	__u32 low = 0, high = pool->slot_count;
	int i;

	for (i = 0; i < MAX_POOL_BITS && low < high; i++) {
		__u32 middle = low + (high - low) / 2;
		__u32 have = slot_at(pool->slot_base + middle);

		if (have == id)
			return true;
		if (have < id)
			low = middle + 1;
		else
			high = middle;
	}
	return false;
}

/* random_below returns a number in [0, n), each with the same probability. */
static __always_inline __u32 random_below(__u32 n)
{
	return ((__u64)bpf_get_prandom_u32() * n) >> 32;
}

/*
 * pick_slot returns the backend in the try-th of MAX_PICKS slots that are spread over the pool,
 * starting with the slot at first. In a pool of up to MAX_PICKS slots, these are all of them.
 */
static __always_inline const struct backend *pick_slot(const struct pool *pool, __u32 first,
						       __u32 try)
{
	__u32 stride = (pool->slot_count + MAX_PICKS - 1) / MAX_PICKS;

	return pick_id(pool, slot_at(pool->slot_base + (first + try * stride) % pool->slot_count));
}

/* pick_random returns a random backend of the pool, or NULL. */
static __always_inline const struct backend *pick_random(const struct pool *pool)
{
	const struct backend *be;
	__u32 first, try;

	if (!pool->slot_count)
		return NULL;
	first = random_below(pool->slot_count);
	for (try = 0; try < MAX_PICKS; try++) {
		be = pick_slot(pool, first, try);
		if (be)
			return be;
	}
	return NULL;
}

/* why_no_backend returns the reason for a client for which no backend could be picked. */
static __always_inline enum reason why_no_backend(const struct pool *pool)
{
	if (pool->slot_count)
		return REASON_DROP_BACKEND_MISSING;
	return pool->flags & POOL_DROP_IF_EMPTY ? REASON_DROP_NO_LOCAL_BACKEND :
						  REASON_REJECT_NO_BACKEND;
}

#endif
