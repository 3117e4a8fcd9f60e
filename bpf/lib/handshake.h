/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* TCP handshakes of sockets that were translated: see struct handshakes. */
#ifndef SLUICE_HANDSHAKE_H
#define SLUICE_HANDSHAKE_H

#include <stdbool.h>

#include "../../maps/maps.h"

/* Durations are compared in units of 2^-UNIT_BITS seconds. A nanosecond has NS_UNITS / 2^24 units. */
#define UNIT_BITS 30
#define NS_UNITS 18014399ULL
#define MAX_NS ((1ULL << HISTOGRAM_MOST) * 1000000000)

static __always_inline struct handshakes *handshakes_of(__u32 service_port_id)
{
	__u32 chunk = (service_port_id & INDEX_MASK) / CHUNK_COUNTS;
	__u32 place = (service_port_id & INDEX_MASK) % CHUNK_COUNTS;
	void *places = bpf_map_lookup_elem(&sl_handshakes, &chunk);

	return places ? bpf_map_lookup_elem(places, &place) : NULL;
}

/* The handshakes of each backend are counted. */
volatile const bool config_backend_handshakes = false;

static __always_inline struct backend_handshakes *backend_handshakes_of(__u32 backend_id)
{
	__u32 chunk = (backend_id & INDEX_MASK) / CHUNK_BACKENDS;
	__u32 place = (backend_id & INDEX_MASK) % CHUNK_BACKENDS;
	void *places;

	if (!config_backend_handshakes)
		return NULL;
	places = bpf_map_lookup_elem(&sl_be_handshake, &chunk);
	return places ? bpf_map_lookup_elem(places, &place) : NULL;
}

/* log2_of returns the number of the highest bit of v that is set. */
static __always_inline __u32 log2_of(__u64 v)
{
	__u32 bit = 0, step;

	for (step = 32; step; step /= 2) {
		if (v >> step) {
			v >>= step;
			bit += step;
		}
	}
	return bit;
}

/* histogram_bucket returns the bucket of a duration: see enum histogram. */
static __always_inline __u32 histogram_bucket(__u64 ns)
{
	__u64 units = ((ns < MAX_NS ? ns : MAX_NS) * NS_UNITS) >> 24, fraction;
	__u32 octave, quarter;

	/* A bound belongs to the bucket below it. */
	if (units)
		units--;
	if (units >> (UNIT_BITS - HISTOGRAM_LEAST) == 0)
		return 0;
	octave = log2_of(units);
	/* In [2^63, 2^64), where the bounds are 2^63 times powers of the fourth root of two. */
	fraction = units << (63 - octave);
	quarter = (fraction >= 10968499650544839024ULL) + (fraction >= 13043817825332782213ULL) +
		  (fraction >= 15511800964685064949ULL);
	octave -= UNIT_BITS - HISTOGRAM_LEAST;
	return 1 + (octave << HISTOGRAM_SCHEMA) + quarter;
}

_Static_assert(HISTOGRAM_SCHEMA == 2, "histogram_bucket compares with the bounds of quarters");

/* count_handshake counts a handshake that was answered, or has failed, after this time. */
static __always_inline void count_handshake(const struct sock_state *state, bool answered, __u64 ns)
{
	struct backend_handshakes *be = backend_handshakes_of(state->backend_id);
	struct handshakes *counts = handshakes_of(state->service_port_id);
	__u32 again = state->syn_retransmits, bucket;

	if (be && answered) {
		__sync_fetch_and_add(&be->answered, 1);
		__sync_fetch_and_add(&be->time, ns);
	} else if (be) {
		__sync_fetch_and_add(&be->failed, 1);
	}
	if (!counts)
		return;
	if (again) {
		bucket = again > 1 ? log2_of(again - 1) + 1 : 0;
		if (bucket >= HISTOGRAM_SYN_BUCKETS)
			bucket = HISTOGRAM_SYN_BUCKETS - 1;
		__sync_fetch_and_add(&counts->syn_buckets[bucket], 1);
	}
	if (!answered) {
		__sync_fetch_and_add(&counts->failed, 1);
		return;
	}
	bucket = histogram_bucket(ns);
	if (bucket >= HISTOGRAM_BUCKETS) /* the exact limit can be rounded up */
		bucket = HISTOGRAM_BUCKETS - 1;
	__sync_fetch_and_add(&counts->buckets[bucket], 1);
	__sync_fetch_and_add(&counts->time, ns);
}

/* count_retransmission counts a segment that a client sends again: its SYN, or a later one. */
static __always_inline void count_retransmission(struct sock_state *state, bool syn)
{
	struct handshakes *counts = handshakes_of(state->service_port_id);
	struct backend_handshakes *be;

	if (syn) {
		state->syn_retransmits++;
		be = backend_handshakes_of(state->backend_id);
		if (be)
			__sync_fetch_and_add(&be->syn_retransmits, 1);
	}
	if (counts)
		__sync_fetch_and_add(syn ? &counts->syn_retransmits : &counts->retransmits, 1);
}

#endif
