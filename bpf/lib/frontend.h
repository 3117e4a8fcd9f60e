/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* From what a client dials to the pool that serves it. */
#ifndef SLUICE_FRONTEND_H
#define SLUICE_FRONTEND_H

#include <stdbool.h>

#include "addr.h"
#include "filter.h"
#include "place.h"

/* How often an element is looked up that the kernel gives to another key while we read it. */
#define MAX_LOOKUPS 4

/* key_equal compares without branches: each would be one more path to verify. */
static __always_inline bool key_equal(const struct frontend_key *a, const struct frontend_key *b)
{
	return addr_equal(&a->addr, &b->addr) &
	       !((a->port ^ b->port) | (a->proto ^ b->proto) | (a->scope ^ b->scope));
}

/*
 * find_pool copies the pool that the frontend at key has now. It returns
 * REASON_PASS_NO_FRONTEND if there is no such frontend: the value of an element never
 * changes, so a lookup never misses one that is there. If frontends are deleted and added
 * faster than we look, the client is refused, never let through.
 */
static __always_inline enum reason find_pool(const struct frontend_key *key, struct pool *pool)
{
	const struct frontend *fe;
	const struct pool *at;
	const __u32 *id;
	int try;

	for (try = 0; try < MAX_LOOKUPS; try++) {
		id = bpf_map_lookup_elem(&sl_frontend_ids, key);
		if (!id)
			return REASON_PASS_NO_FRONTEND;
		fe = frontend_at(read_once(id));
		if (!fe || !key_equal(&fe->key, key))
			continue;
		at = pool_at(read_once(&fe->pool_id));
		if (!at)
			break;
		*pool = *at;
		barrier(); /* from now on the copy is read */
		return REASON_NEXT;
	}
	return REASON_DROP_BACKEND_MISSING;
}

/* Node ports are written once, at the unspecified address of their family. */
static __always_inline enum reason find_node_port(const struct frontend_key *dialled,
						  struct pool *pool)
{
	struct frontend_key key = *dialled;

	key.addr = addr_any(&dialled->addr);
	return find_pool(&key, pool);
}

/* addr_flags returns what an address is to us: enum addr_flags, or 0. */
static __always_inline __u32 addr_flags(const struct addr *a)
{
	const struct addr_use *use = bpf_map_lookup_elem(&sl_addrs, a);

	return use ? use->flags : 0;
}

static __always_inline bool is_cluster_ip(const struct frontend_key *dialled)
{
	struct frontend_key key = *dialled;

	key.port = 0;
	key.proto = 0;
	return bpf_map_lookup_elem(&sl_frontend_ids, &key);
}

/* why_no_frontend returns the outcome of a client that dials no frontend. */
static __always_inline enum reason why_no_frontend(const struct frontend_key *dialled)
{
	if (is_cluster_ip(dialled))
		return REASON_REJECT_NO_PORT;
	if (is_service_cidr(&dialled->addr))
		return REASON_DROP_UNALLOCATED;
	return REASON_PASS_NO_FRONTEND;
}

#endif
