/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* From what a client dialled to the frontend that takes it. */
#ifndef SLUICE_FRONTEND_H
#define SLUICE_FRONTEND_H

#include <stdbool.h>

#include "../../maps/maps.h"
#include "addr.h"
#include "read.h"

/*
 * find_frontend finds what has this very address, port and protocol. expected:
 * see read_value; what dials no Service should not pay for it.
 */
static __always_inline bool find_frontend(const struct frontend_key *dialled, bool expected,
					  struct frontend *fe)
{
	return read_value(&sl_frontends, dialled, fe, sizeof(*fe), expected);
}

/* Node ports are written once, at the unspecified address of their family. */
static __always_inline bool find_node_port(const struct frontend_key *dialled, struct frontend *fe)
{
	struct frontend_key key = *dialled;

	key.addr = addr_any(&dialled->addr);
	return find_frontend(&key, true, fe);
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
	return bpf_map_lookup_elem(&sl_frontends, &key);
}

static __always_inline bool is_service_cidr(const struct addr *a)
{
	struct cidr_key key = { .prefix_len = 128, .addr = *a };

	return bpf_map_lookup_elem(&sl_service_cidrs, &key);
}

/* why_no_frontend says what becomes of a client that dialled no frontend. */
static __always_inline enum reason why_no_frontend(const struct frontend_key *dialled)
{
	if (is_cluster_ip(dialled))
		return REASON_REJECT_NO_PORT;
	if (is_service_cidr(&dialled->addr))
		return REASON_DROP_UNALLOCATED;
	return REASON_PASS_NO_FRONTEND;
}

#endif
