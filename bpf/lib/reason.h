/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Reasons: their classes, and the counts of every outcome. */
#ifndef SLUICE_REASON_H
#define SLUICE_REASON_H

#include <stdbool.h>

#include "../../maps/maps.h"

static __always_inline void count(enum reason why)
{
	__u32 key = why;
	__u64 *n = bpf_map_lookup_elem(&sl_reasons, &key);

	if (n)
		*n += 1;
}

/* The bits of a range of reasons. One test of a bit is one path for the verifier. */
#define REASONS(first, last) ((2U << (last)) - (1U << (first)))

_Static_assert(REASON_COUNT <= 32, "a class of reasons is a word of bits");

/* is_pass reports whether the packet or the call is not for a Service, and goes on as it is. */
static __always_inline bool is_pass(enum reason why)
{
	__u32 pass = REASONS(REASON_PASS_PROTOCOL, REASON_PASS_NO_FRONTEND) |
		     REASONS(REASON_PASS_OTHER_TRAFFIC, REASON_PASS_MALFORMED);

	return pass >> why & 1;
}

#define REJECTS                                                     \
	(REASONS(REASON_REJECT_NO_BACKEND, REASON_REJECT_NO_PORT) | \
	 REASONS(REASON_REJECT_NO_FLOW, REASON_REJECT_NO_FLOW))

/* is_reject reports whether the client gets an error: ECONNREFUSED, port unreachable, or a reset. */
static __always_inline bool is_reject(enum reason why)
{
	__u32 reject = REJECTS;

	return reject >> why & 1;
}

/* is_drop reports whether the packet is dropped, or the call fails. All later reasons but rejects are drops. */
static __always_inline bool is_drop(enum reason why)
{
	__u32 drop = REASONS(REASON_DROP_NO_LOCAL_BACKEND, REASON_DROP_BACKEND_MISSING) |
		     (REASONS(REASON_REJECT_LIMITED, REASON_COUNT - 1) & ~REJECTS);

	return drop >> why & 1;
}

/* Per-Service counts are enabled. */
volatile const bool config_stats = true;

static __always_inline struct port_counts *counts_of(__u32 service_port_id)
{
	__u32 chunk = (service_port_id & INDEX_MASK) / CHUNK_COUNTS;
	__u32 place = (service_port_id & INDEX_MASK) % CHUNK_COUNTS;
	void *places = bpf_map_lookup_elem(&sl_port_counts, &chunk);

	return places ? bpf_map_lookup_elem(places, &place) : NULL;
}

/* count_refusal counts for service port 0 where there is no room to count for one of its own. */
static __always_inline void count_refusal(__u32 service_port_id, enum reason why)
{
	struct refusal_key key = { .service_port_id = service_port_id, .reason = why };
	__u64 one = 1, *have = bpf_map_lookup_elem(&sl_refusals, &key);

	if (!have) {
		if (!bpf_map_update_elem(&sl_refusals, &key, &one, BPF_NOEXIST))
			return;
		have = bpf_map_lookup_elem(&sl_refusals, &key); /* another CPU was first */
	}
	if (!have) {
		key.service_port_id = 0;
		have = bpf_map_lookup_elem(&sl_refusals, &key);
	}
	if (have)
		__sync_fetch_and_add(have, 1);
}

/*
 * count_new counts the outcome of a new flow. It is global, so that the verifier walks it once. It
 * adds to per-CPU values atomically, because device programs interrupt socket programs.
 */
__noinline int count_new(__u32 service_port_id, __u32 why)
{
	struct port_counts *counts;

	if (!config_stats)
		return 0;
	if (why != REASON_NEXT && why != REASON_TRANSLATED) {
		count_refusal(service_port_id, why);
		return 0;
	}
	counts = counts_of(service_port_id);
	if (counts)
		__sync_fetch_and_add(&counts->connections, 1);
	return 0;
}

/* count_hidden_refusal counts a refusal that a client of a service port is not told of. */
static __always_inline void count_hidden_refusal(__u32 service_port_id)
{
	struct port_counts *counts = config_stats ? counts_of(service_port_id) : NULL;

	if (counts)
		__sync_fetch_and_add(&counts->hidden_refusals, 1);
}

/* count_bytes adds to the bytes of a service port's clients. */
__noinline int count_bytes(__u32 service_port_id, __u64 sent, __u64 received)
{
	struct port_counts *counts;

	if (!config_stats)
		return 0;
	counts = counts_of(service_port_id);
	if (!counts)
		return 0;
	__sync_fetch_and_add(&counts->bytes_sent, sent);
	__sync_fetch_and_add(&counts->bytes_received, received);
	return 0;
}

#endif
