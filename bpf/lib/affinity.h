/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Session affinity: a client keeps its backend. */
#ifndef SLUICE_AFFINITY_H
#define SLUICE_AFFINITY_H

#include <stdbool.h>

#include "../../maps/maps.h"
#include "balance.h"

#define NS_PER_SECOND 1000000000ULL

/* netns_client is all sockets of one network namespace. */
static __always_inline struct affinity_key netns_client(const struct frontend *fe, __u64 cookie)
{
	struct affinity_key client = { .frontend_id = fe->id, .client_kind = CLIENT_NETNS };

	/* Not in the initializer: that would leave the rest of the union as it is. */
	client.netns_cookie = cookie;
	return client;
}

/*
 * pick_remembered chooses the backend that client had, if new flows may still
 * choose it and the client was here within the timeout.
 */
static __always_inline bool pick_remembered(const struct frontend *fe,
					    const struct affinity_key *client, __u64 now,
					    struct choice *to)
{
	struct affinity *had = bpf_map_lookup_elem(&sl_affinity, client);

	if (!had || now - had->last_used >= fe->affinity_seconds * NS_PER_SECOND)
		return false;
	if (!has_slot(fe, had->backend_id) || !pick_id(fe, had->backend_id, to))
		return false;

	had->last_used = now;
	return true;
}

/*
 * pick_backend chooses for a new flow of client; seed: see choose. Two CPUs may
 * choose for a new client at once; the later one is remembered.
 */
static __always_inline enum reason pick_backend(const struct frontend *fe,
						const struct affinity_key *client, __u32 seed,
						__u64 now, struct choice *to)
{
	struct affinity has = { .last_used = now };
	enum reason why;

	if (!fe->affinity_seconds)
		return pick_new(fe, seed, to);
	if (pick_remembered(fe, client, now, to))
		return REASON_NEXT;

	why = pick_new(fe, seed, to);
	if (why)
		return why;

	has.backend_id = to->id;
	bpf_map_update_elem(&sl_affinity, client, &has, BPF_ANY);
	return REASON_NEXT;
}

#endif
