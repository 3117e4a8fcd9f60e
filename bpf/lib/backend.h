/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* From a pool to one of its backends. */
#ifndef SLUICE_BACKEND_H
#define SLUICE_BACKEND_H

#include <stdbool.h>

#include "place.h"

/* A pool has at most 2^MAX_POOL_BITS slots: as many steps find one. */
#define MAX_POOL_BITS 24

/* How many slots are tried, all over the pool, when the first will not do. */
#define MAX_PICKS 4

/*
 * pick_id returns the backend with this id, or NULL if it is gone, or answers for
 * another service port: an id that was remembered may.
 */
static __always_inline const struct backend *pick_id(const struct pool *pool, __u32 id)
{
	const struct backend *be = backend_at(id);

	return be && be->service_port_id == pool->service_port_id ? be : NULL;
}

/* has_slot says whether a slot of the pool holds id. Slots are sorted by it. */
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

/* random_below returns a number in [0, n), all of them equally likely. */
static __always_inline __u32 random_below(__u32 n)
{
	return ((__u64)bpf_get_prandom_u32() * n) >> 32;
}

/*
 * pick_slot returns the backend in the try-th of MAX_PICKS slots that are spread over
 * the pool, beginning with the slot at first. Up to MAX_PICKS slots, that is every one.
 */
static __always_inline const struct backend *pick_slot(const struct pool *pool, __u32 first,
						       __u32 try)
{
	__u32 stride = (pool->slot_count + MAX_PICKS - 1) / MAX_PICKS;

	return pick_id(pool, slot_at(pool->slot_base + (first + try * stride) % pool->slot_count));
}

/* pick_random returns any backend of the pool, or NULL. */
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

/* why_no_backend returns the outcome of a client for which no backend could be picked. */
static __always_inline enum reason why_no_backend(const struct pool *pool)
{
	if (pool->slot_count)
		return REASON_DROP_BACKEND_MISSING;
	return pool->flags & POOL_DROP_IF_EMPTY ? REASON_DROP_NO_LOCAL_BACKEND :
						  REASON_REJECT_NO_BACKEND;
}

#endif
