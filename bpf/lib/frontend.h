/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* From a destination to the frontend and the pool that serves it. */
#ifndef SLUICE_FRONTEND_H
#define SLUICE_FRONTEND_H

#include <stdbool.h>

#include "addr.h"
#include "filter.h"
#include "place.h"

/*
 * How often an element is looked up again because the kernel gave it to another key during the
 * read.
 */
#define MAX_LOOKUPS 4

/* key_equal compares without branches: each branch would be one more path for the verifier. */
static __always_inline bool key_equal(const struct frontend_key *a, const struct frontend_key *b)
{
	return addr_equal(&a->addr, &b->addr) &
	       !((a->port ^ b->port) | (a->proto ^ b->proto) | (a->scope ^ b->scope));
}

/*
 * find_pool copies the pool that the frontend at key leads to. It returns REASON_PASS_NO_FRONTEND
 * if there is no such frontend: the value of an element never changes, so a lookup never misses
 * one that exists. If frontends are deleted and added faster than they can be read, the client is
 * refused, never let through.
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
		barrier(); /* the copy is complete before it is used */
		return REASON_NEXT;
	}
	return REASON_DROP_BACKEND_MISSING;
}

/*
 * find_node_port is find_pool for node ports, which are stored at the unspecified address of their
 * family.
 */
static __always_inline enum reason find_node_port(const struct frontend_key *original_dst,
						  struct pool *pool)
{
	struct frontend_key key = *original_dst;

	key.addr = addr_any(&original_dst->addr);
	return find_pool(&key, pool);
}

/* addr_flags returns the enum addr_flag bits of an address, or 0. */
static __always_inline __u32 addr_flags(const struct addr *a)
{
	const struct addr_use *use = bpf_map_lookup_elem(&sl_addrs, a);

	return use ? use->flags : 0;
}

static __always_inline bool is_cluster_ip(const struct frontend_key *original_dst)
{
	struct frontend_key key = *original_dst;

	key.port = 0;
	key.proto = 0;
	return bpf_map_lookup_elem(&sl_frontend_ids, &key);
}

/* why_no_frontend returns the reason for a client whose destination is no frontend. */
static __always_inline enum reason why_no_frontend(const struct frontend_key *original_dst)
{
	if (is_cluster_ip(original_dst))
		return REASON_REJECT_NO_PORT;
	if (is_service_cidr(&original_dst->addr))
		return REASON_DROP_UNALLOCATED;
	return REASON_PASS_NO_FRONTEND;
}

#endif
