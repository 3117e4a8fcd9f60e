/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The load of backends: see struct backend_load. */
#ifndef SLUICE_LOAD_H
#define SLUICE_LOAD_H

#include "../../maps/maps.h"

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

	return live & ~(live >> 31); /* without a branch: see least_busy */
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

#endif
