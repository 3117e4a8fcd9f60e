/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The algorithms: which backend of a pool a new flow gets. */
#ifndef SLUICE_BALANCE_H
#define SLUICE_BALANCE_H

#include "backend.h"
#include "load.h"

/* The least busy backend is looked for among at most this many, from a random one on. */
#define MAX_COMPARED 64

/* mix spreads a difference in any bit over all bits. */
static __always_inline __u32 mix(__u32 h)
{
	h = (h ^ h >> 16) * 0x85ebca6b;
	h = (h ^ h >> 13) * 0xc2b2ae35;
	return h ^ h >> 16;
}

/* hash returns the same value on every node. */
static __always_inline __u32 hash(const void *bytes, __u32 size)
{
	const __u32 *words = bytes;
	__u32 h = size, i;

	for (i = 0; i < size / sizeof(*words); i++)
		h = mix(h ^ words[i]);
	return h;
}

/*
 * take_turn counts the flows of a service port, for round robin. Two CPUs may get the same number.
 */
static __always_inline __u32 take_turn(__u32 service_port_id)
{
	__u32 first =
		bpf_get_prandom_u32(); /* otherwise every node would start with the same backend */
	__u32 *turn = bpf_map_lookup_elem(&sl_turns, &service_port_id);
	__u32 mine;

	if (!turn) {
		bpf_map_update_elem(&sl_turns, &service_port_id, &first, BPF_NOEXIST);
		turn = bpf_map_lookup_elem(&sl_turns, &service_port_id);
	}
	if (!turn)
		return first;
	mine = *turn;
	__sync_fetch_and_add(turn, 1);
	return mine;
}

/* less_busy returns the one of two random backends that has fewer connections. */
static __always_inline __u32 less_busy(__u32 base, __u32 count)
{
	__u32 first = random_below(count);
	__u32 second = first + 1 + random_below(count - 1);
	__u32 a = slot_at(base + first), b;

	if (count < 2)
		return a;
	b = slot_at(base + (second < count ? second : second - count));
	return live_connections(b) < live_connections(a) ? b : a;
}

/*
 * load_and_index returns the connections of the backend in a slot in its upper half, and i in its
 * lower one. It is global, so that the verifier walks it once, and not once for each of 64
 * backends and each state that it has derived from those before.
 */
__noinline __s64 load_and_index(__u32 slot, __u32 i)
{
	return (__s64)live_connections(slot_at(slot)) << 32 | i;
}

/*
 * least_busy returns the backend with the fewest connections or, with any_idle, the first that has
 * none. Of several it takes the first from a random place on, so that nodes do not all favour the
 * same backend. It compares without branches, because the verifier would walk every order of 64
 * backends.
 */
static __always_inline __u32 least_busy(__u32 base, __u32 count, bool any_idle)
{
	__s64 best = 0x7fffffffffffffff; /* see load_and_index */
	__u32 first = random_below(count), i;

	for (i = 0; i < MAX_COMPARED && i < count; i++) {
		__s64 other = load_and_index(base + (first + i) % count, i);

		best += (other - best) & ((other - best) >> 63);
		if (any_idle && !(other >> 32))
			break;
	}
	return slot_at(base + (first + (__u32)best) % count);
}

/*
 * choose returns the id of the backend that an algorithm chooses among the count slots from base
 * on. seed is a service port id for RR, and otherwise a hash. It is global, so that the verifier
 * walks it once.
 */
__noinline __u32 choose(__u32 base, __u32 count, __u32 algorithm, __u32 seed)
{
	switch (algorithm) {
	case ALGORITHM_RR:
		return slot_at(base + take_turn(seed) % count);
	case ALGORITHM_LC:
		return less_busy(base, count);
	case ALGORITHM_SED:
		return least_busy(base, count, false);
	case ALGORITHM_NQ:
		return least_busy(base, count, true);
	default:
		return slot_at(base + (((__u64)seed * count) >> 32));
	}
}

/* pick_new returns a backend for a new flow, or NULL. seed: see choose. */
static __always_inline const struct backend *pick_new(const struct pool *pool, __u32 seed)
{
	const struct backend *be;
	__u32 base = pool->table_size ? pool->table_base : pool->slot_base;
	__u32 count = pool->table_size ?: pool->slot_count;

	if (pool->algorithm != ALGORITHM_RANDOM && count) {
		be = pick_id(pool, choose(base, count, pool->algorithm, seed));
		if (be)
			return be;
	}
	return pick_random(pool);
}

#endif
