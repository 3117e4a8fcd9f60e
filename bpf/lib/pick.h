/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Picks: which backend of its pool a new flow gets. */
#ifndef SLUICE_PICK_H
#define SLUICE_PICK_H

#include "health.h"
#include "service.h"

/* The load of backends: see struct backend_load. */

static __always_inline struct backend_load *load_of(__u32 backend_id)
{
	__u32 chunk = (backend_id & INDEX_MASK) / CHUNK_BACKENDS;
	__u32 place = (backend_id & INDEX_MASK) % CHUNK_BACKENDS;
	void *places = bpf_map_lookup_elem(&sl_backend_load, &chunk);

	return places ? bpf_map_lookup_elem(places, &place) : NULL;
}

/*
 * live_connections returns the current connections of a backend. What evicted flows leave behind
 * can make the sum negative until the agent repairs it.
 */
static __always_inline __s32 live_connections(__u32 backend_id)
{
	const struct backend_load *load = load_of(backend_id);
	__s32 live = load ? load->sockets + load->flows : 0;

	return live > 0 ? live : 0;
}

static __always_inline void add_sockets(__u32 backend_id, __s32 n)
{
	struct backend_load *load = load_of(backend_id);

	if (load)
		__sync_fetch_and_add(&load->sockets, n);
}

static __always_inline void add_flows(__u32 backend_id, __s32 n)
{
	struct backend_load *load = load_of(backend_id);

	if (load)
		__sync_fetch_and_add(&load->flows, n);
}

/* Picking a backend of a pool. */

/* A pool has at most 2^MAX_POOL_BITS slots, so a binary search takes up to MAX_POOL_BITS + 1 steps. */
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

/*
 * halve returns the half of the slots, from low to before high, in which id would be: the new low is in
 * the upper half of the result, and the new high in the lower one. It is global, so that the verifier
 * walks it once, and does not follow the bounds of every search.
 */
__noinline __u64 halve(__u32 low, __u32 high, __u32 id)
{
	__u32 middle = low + (high - low) / 2;

	if (slot_at(middle) < id)
		low = middle + 1;
	else
		high = middle;
	return (__u64)low << 32 | high;
}

/*
 * has_slot reports whether one of the count slots from base on holds id. Slots are sorted by id. It
 * is global, so that the verifier walks it once.
 */
__noinline int has_slot(__u32 base, __u32 count, __u32 id)
{
	__u32 low = base, high = base + count;
	int i;

	for (i = 0; i <= MAX_POOL_BITS && low < high; i++) {
		__u64 half = halve(low, high, id);

		low = half >> 32;
		high = half;
	}
	return low < base + count && slot_at(low) == id;
}

/* random_below returns a number in [0, n), each with the same probability. */
static __always_inline __u32 random_below(__u32 n)
{
	return ((__u64)bpf_get_prandom_u32() * n) >> 32;
}

/*
 * spread_slot returns the id in the try-th of MAX_PICKS slots that are spread over the count slots
 * from base on, starting with the slot at first. Of up to MAX_PICKS slots, these are all.
 */
static __always_inline __u32 spread_slot(__u32 base, __u32 count, __u32 first, __u32 try)
{
	__u32 stride = (count + MAX_PICKS - 1) / MAX_PICKS;

	return slot_at(base + (first + try * stride) % count);
}

/*
 * random_backend returns the id of a random backend of the service port among the count slots from
 * base on, or 0. It is global, so that the verifier walks it once.
 */
__noinline __u32 random_backend(__u32 base, __u32 count, __u32 service_port_id)
{
	__u32 first = random_below(count), try;

	for (try = 0; count && try < MAX_PICKS; try++) {
		__u32 id = spread_slot(base, count, first, try);
		const struct backend *be = backend_at(id);

		if (be && be->service_port_id == service_port_id)
			return id;
	}
	return 0;
}

/*
 * pick_random returns a random backend of the pool, or NULL. The backend may be removed after it
 * was found, but its place stays what it is until the program has ended.
 */
static __always_inline const struct backend *pick_random(const struct pool *pool)
{
	__u32 id = random_backend(pool->slot_base, pool->slot_count, pool->service_port_id);

	return id ? backend_place(id) : NULL;
}

/* passes_through reports whether packets to a frontend of the pool go where routes lead them. */
static __always_inline bool passes_through(const struct pool *pool)
{
	return pool->flags & POOL_PASS_IF_EMPTY && !pool->slot_count;
}

/* why_no_backend returns the reason for a client for which no backend could be picked. */
static __always_inline enum reason why_no_backend(const struct pool *pool)
{
	if (pool->slot_count)
		return REASON_DROP_BACKEND_MISSING;
	return pool->flags & POOL_DROP_IF_EMPTY ? REASON_DROP_NO_LOCAL_BACKEND :
						  REASON_REJECT_NO_BACKEND;
}

/* The algorithms: which backend of a pool a new flow gets. */

/* The least busy backend is looked for among all, or among this many at random. */
#define MAX_COMPARED 64

/*
 * A turn for round robin that may be given up again: connect() of a UDP socket takes it, and nothing
 * may be sent (programs sort addresses that way). Such turns are counted apart.
 */
#define TURN_OF_CONNECT 1

/* turn_of returns the key of a frontend in sl_turns, as it is dialled. */
static __always_inline __u32 turn_of(const struct addr *dst, __be16 port, __u8 proto, __u8 scope)
{
	__u32 rest = (__u32)port << 16 | (__u32)proto << 8 | scope;

	return mix(hash(dst, sizeof(*dst)) ^ rest) & ~TURN_OF_CONNECT;
}

/* take_turn counts the flows of a turn, for round robin. Two CPUs may get the same number. */
static __always_inline __u32 take_turn(__u32 key)
{
	__u32 first =
		bpf_get_prandom_u32(); /* otherwise every node would start with the same backend */
	__u32 *turn = bpf_map_lookup_elem(&sl_turns, &key);
	__u32 mine;

	if (!turn) {
		bpf_map_update_elem(&sl_turns, &key, &first, BPF_NOEXIST);
		turn = bpf_map_lookup_elem(&sl_turns, &key);
	}
	if (!turn)
		return first;
	mine = *turn;
	__sync_fetch_and_add(turn, 1);
	return mine;
}

/*
 * next_in_turn returns which of count backends is next. Each round of TURN_OF_CONNECT begins with
 * another backend, so that those who take every second turn get all of them.
 */
static __always_inline __u32 next_in_turn(__u32 key, __u32 count)
{
	__u32 turn = take_turn(key), start = turn / count * 0x9e3779b1;

	if (key & TURN_OF_CONNECT)
		turn = turn % count + (((__u64)start * count) >> 32);
	return turn % count;
}

/*
 * pressure returns the current connections of a backend, and the maximum for a suspect whose pause
 * goes on beyond now.
 */
static __always_inline __s32 pressure(__u32 backend_id, __u64 now)
{
	if (config_heal && now != NEVER && is_paused(backend_id, now))
		return 0x7fffffff;
	return live_connections(backend_id);
}

/* less_busy returns the one of two random backends that has fewer connections. */
static __always_inline __u32 less_busy(__u32 base, __u32 count, __u64 now)
{
	__u32 first = random_below(count);
	__u32 second = first + 1 + random_below(count - 1);
	__u32 a = slot_at(base + first), b;

	if (count < 2)
		return a;
	b = slot_at(base + (second < count ? second : second - count));
	return pressure(b, now) < pressure(a, now) ? b : a;
}

/*
 * compared returns the i-th of those of count that are compared, below MAX_COMPARED: of more, each is one at
 * random. In the lower half is its rank, with i in the lowest bits: the lowest of equals is the choice. It is
 * global, so that the verifier walks it once.
 */
__noinline __u64 compared(__u32 count, __u32 random, __u32 i)
{
	__u64 which = count > MAX_COMPARED ? ((__u64)mix(random + i) * count) >> 32 : i;

	return which << 32 | (mix(~random - i) & -MAX_COMPARED) | i;
}

/*
 * less_loaded returns the lesser of best and the backend in a slot: its connections are in the upper half,
 * and its rank in the lower one. It is global, so that the verifier walks it once, and not once for
 * each of 64 backends and each state that it has derived from those before.
 */
__noinline __s64 less_loaded(__s64 best, __u32 slot, __u32 rank, __u64 now)
{
	__s64 other = (__s64)pressure(slot_at(slot), now) << 32 | rank;

	return other < best ? other : best;
}

/*
 * least_busy returns the backend with the fewest connections, and any of several with equal chances. It is
 * an idle one at once, if most are.
 */
static __always_inline __u32 least_busy(__u32 base, __u32 count, __u64 now)
{
	__s64 best = 0x7fffffffffffffff; /* see less_loaded */
	__u32 any = base + random_below(count), random, i;
	__u64 next;

	if (!less_loaded(best, any, 0, now))
		return slot_at(any);
	random = bpf_get_prandom_u32();
	for (i = 0; i < MAX_COMPARED && i < count; i++) {
		next = compared(count, random, i);
		best = less_loaded(best, base + (next >> 32), next, now);
	}
	return slot_at(base + (compared(count, random, (__u32)best % MAX_COMPARED) >> 32));
}

/*
 * choose returns the id of the backend that an algorithm chooses among the count slots from base
 * on. seed is a key of sl_turns for RR, and otherwise a hash. Those that compare loads avoid suspects
 * whose pause goes on beyond now. It is global, so that the verifier walks it once.
 */
__noinline __u32 choose(__u32 base, __u32 count, __u32 algorithm, __u32 seed, __u64 now)
{
	switch (algorithm) {
	case ALGORITHM_RR:
		return slot_at(base + (count ? next_in_turn(seed, count) : 0));
	case ALGORITHM_LC:
		return less_busy(base, count, now);
	case ALGORITHM_SED:
	case ALGORITHM_NQ:
		return least_busy(base, count, now);
	default:
		return slot_at(base + (((__u64)seed * count) >> 32));
	}
}

/* pick_any returns a backend for a new flow, suspects included, or NULL. seed: see choose. */
static __always_inline const struct backend *pick_any(const struct pool *pool, __u32 seed)
{
	const struct backend *be;
	__u32 base = pool->table_size ? pool->table_base : pool->slot_base;
	__u32 count = pool->table_size ?: pool->slot_count;

	if (pool->algorithm != ALGORITHM_RANDOM && count) {
		be = pick_id(pool, choose(base, count, pool->algorithm, seed, NEVER));
		if (be)
			return be;
	}
	return pick_random(pool);
}

/* Passing over suspects: see health.h. */

/*
 * is_suspect_at returns 1 if the backend in a slot is a suspect, else 0. It is global, so that the
 * verifier walks it once, and not once for each slot and each state that it has derived from those
 * before.
 */
__noinline int is_suspect_at(__u32 slot)
{
	return is_suspect(slot_at(slot));
}

/*
 * are_few_suspects reports whether at most half of the count slots from base on have suspects. Of
 * more than MAX_COMPARED it looks at that many, which are spread over all: those side by side may have come, and gone,
 * together. It is global, so that the verifier walks it once.
 */
__noinline int are_few_suspects(__u32 base, __u32 count)
{
	__u32 first = count > MAX_COMPARED ? random_below(count) : 0, suspects = 0, i;
	__u32 step = (count + MAX_COMPARED - 1) / MAX_COMPARED;

	for (i = 0; i < MAX_COMPARED && i < count; i++)
		suspects += is_suspect_at(base + (first + i * step) % count);
	return 2 * suspects <= i;
}

/*
 * is_passed_over reports whether a backend of the count slots from base on must not get a new flow. A
 * suspect whose pause has ended gets this one, as a probe, and pauses again. If more than half of
 * them are suspects, the Service, this node or its network is the reason: none is passed over, and
 * pauses end, so that what remains of the suspects afterwards is probed at once. It is global, so that
 * the verifier walks it once.
 */
__noinline int is_passed_over(__u32 base, __u32 count, __u32 id, __u64 now)
{
	struct backend_health *h = health_place(id);

	if (!h || h->id != id || !h->suspected)
		return false;
	if (!are_few_suspects(base, count)) {
		if (ACTS)
			h->until = now;
		return false;
	}
	if (now >= h->until) {
		if (ACTS)
			begin_pause(h, now);
		return false;
	}
	if (ACTS)
		__sync_fetch_and_add(&h->passed_over, 1);
	return true;
}

static __always_inline bool passes_over(const struct pool *pool, __u32 id, __u64 now)
{
	return config_heal && !(pool->flags & POOL_NO_EJECT) && is_suspect(id) &&
	       is_passed_over(pool->slot_base, pool->slot_count, id, now);
}

/* leaves reports whether the next datagram of a flow goes to another backend than those before. */
static __always_inline bool leaves(const struct pool *pool, __u32 id, __u64 now)
{
	return config_resteer && !(pool->flags & POOL_NO_RESTEER) && passes_over(pool, id, now);
}

/*
 * well_backend returns the id of a backend among the count slots from base on that is no suspect: one
 * that follows from the seed, if they are a table, so that all others get even parts of what the suspect
 * would have got, and each client the same backend on every node; else a random one. It returns 0 if it
 * finds none. It is global, so that the verifier walks it once.
 */
__noinline __u32 well_backend(__u32 base, __u32 count, __u32 seed, __u32 is_table)
{
	__u32 i, slot;

	for (i = 1; i <= MAX_COMPARED && count; i++) {
		seed = is_table ? seed * 0x9e3779b1 + 1 : bpf_get_prandom_u32();
		slot = base + (((__u64)seed * count) >> 32);
		if (!is_suspect_at(slot))
			return slot_at(slot);
	}
	return 0;
}

/*
 * pick_other returns a backend for a new flow that passes over the one it would get, or NULL: again by
 * the pool's algorithm, if that compares loads or hashes, else a random one.
 */
static __always_inline const struct backend *pick_other(const struct pool *pool, __u32 seed,
							__u64 now)
{
	__u32 base = pool->table_size ? pool->table_base : pool->slot_base;
	__u32 count = pool->table_size ?: pool->slot_count;
	__u32 id = 0;

	if (pool->algorithm >= ALGORITHM_LC && pool->algorithm <= ALGORITHM_NQ && count)
		id = choose(base, count, pool->algorithm, seed, now);
	if (!id || is_suspect(id))
		id = well_backend(base, count, seed, pool->table_size);
	return pick_id(pool, id);
}

/* pick_new returns a backend for a new flow, or NULL. seed: see choose. */
static __always_inline const struct backend *pick_new(const struct pool *pool, __u32 seed,
						      __u64 now)
{
	const struct backend *be = pick_any(pool, seed), *other;

	if (!be || !passes_over(pool, be->id, now))
		return be;
	other = pick_other(pool, seed, now);
	return other ?: be;
}

/* Session affinity: a client keeps its backend. */

#define NS_PER_SECOND 1000000000ULL

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
	if (!had || elapsed(now, had->last_used) >= pool->affinity_seconds * NS_PER_SECOND)
		return NULL;
	if (!has_slot(pool->slot_base, pool->slot_count, had->backend_id))
		return NULL;
	if (passes_over(pool, had->backend_id, now))
		return NULL;
	return pick_id(pool, had->backend_id);
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
		return pick_new(pool, seed, now);
	had = bpf_map_lookup_elem(&sl_affinity, client);
	be = pick_previous(pool, had, now);
	if (be && assured)
		had->last_used = now;
	if (be)
		return be;
	if (!assured)
		be = pick_previous(pool, bpf_map_lookup_elem(&sl_claims, client), now);
	if (!be)
		be = pick_new(pool, seed, now);
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
