/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* loadBalancerSourceRanges: which clients may connect to a frontend. */
#ifndef SLUICE_SOURCE_RANGE_H
#define SLUICE_SOURCE_RANGE_H

#include <stdbool.h>

#include "../../maps/maps.h"

/* is_in_ranges reports whether source_ranges lets src connect to the frontends of the pool. */
static __always_inline bool is_in_ranges(const struct pool *pool, const struct addr *src)
{
	struct source_range_key key = {
		.prefix_len = 32 + 128,
		.service_port_id = pool->service_port_id,
		.addr = *src,
	};

	return bpf_map_lookup_elem(&sl_source_ranges, &key);
}

#endif
