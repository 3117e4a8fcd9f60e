/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* From a frontend to one of its backends. */
#ifndef SLUICE_BACKEND_H
#define SLUICE_BACKEND_H

#include <stdbool.h>

#include "../../maps/maps.h"
#include "read.h"

/* An extent has at most 2^MAX_EXTENT_BITS slots: as many steps find one. */
#define MAX_EXTENT_BITS 21

/* How many slots are tried, all over the extent, when the first will not do. */
#define MAX_PICKS 4

struct choice {
	struct backend be;
	__u32 id;
};

/*
 * pick_id chooses the backend with this id, and is false if that is gone. An
 * id that came from elsewhere may belong to another Service by now: that is
 * gone too.
 */
static __always_inline bool pick_id(const struct frontend *fe, __u32 id, struct choice *to)
{
	to->id = id;
	return read_value(&sl_backends, &id, &to->be, sizeof(to->be), true) &&
	       to->be.frontend_id == fe->id;
}

/* slot_at returns the backend id in a slot; ids start at 1. */
static __always_inline __u32 slot_at(__u32 at)
{
	const __u32 *id = bpf_map_lookup_elem(&sl_slots, &at);

	return id ? *id : 0;
}

/* slot returns the backend id in the i-th slot of fe. */
static __always_inline __u32 slot(const struct frontend *fe, __u32 i)
{
	return slot_at(fe->slot_base + i);
}

/* has_slot says whether a slot of fe holds id. Slots are sorted by it. */
static __always_inline bool has_slot(const struct frontend *fe, __u32 id)
{
	__u32 low = 0, high = fe->slot_count;
	int i;

	for (i = 0; i < MAX_EXTENT_BITS && low < high; i++) {
		__u32 middle = low + (high - low) / 2;
		__u32 have = slot(fe, middle);

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
 * pick_slot chooses the backend in the try-th of MAX_PICKS slots that are
 * spread over fe, beginning with the slot at first. Up to MAX_PICKS slots, that
 * is every one. It is false if the backend is gone.
 */
static __always_inline bool pick_slot(const struct frontend *fe, __u32 first, __u32 try,
				      struct choice *to)
{
	__u32 stride = (fe->slot_count + MAX_PICKS - 1) / MAX_PICKS;

	return pick_id(fe, slot(fe, (first + try * stride) % fe->slot_count), to);
}

/* pick_random chooses any backend of fe. */
static __always_inline enum reason pick_random(const struct frontend *fe, struct choice *to)
{
	__u32 first, try;

	if (!fe->slot_count)
		return fe->flags & FRONTEND_DROP_IF_EMPTY ? REASON_DROP_NO_LOCAL_BACKEND :
							    REASON_REJECT_NO_BACKEND;

	first = random_below(fe->slot_count);
	for (try = 0; try < MAX_PICKS; try++)
		if (pick_slot(fe, first, try, to))
			return REASON_NEXT;
	return REASON_DROP_BACKEND_MISSING;
}

#endif
