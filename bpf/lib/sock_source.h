/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The source address of a socket for loadBalancerSourceRanges, before the kernel has chosen one.
 */
#ifndef SLUICE_SOCK_SOURCE_H
#define SLUICE_SOCK_SOURCE_H

#include <stdbool.h>

#include "netns.h"
#include "sock_addr.h"
#include "source_range.h"

/*
 * check_source checks the client against loadBalancerSourceRanges. The kernel has not chosen a
 * source address yet: the node's own traffic counts as coming from the node IP, as in kube-proxy's
 * rules, and a pod's from the address of the pod.
 */
static __always_inline enum reason check_source(struct bpf_sock_addr *ctx, bool v6,
						const struct pool *pool, const struct addr *to)
{
	struct addr source;

	if (!(pool->flags & POOL_SOURCE_RANGES))
		return REASON_NEXT;
	if (!bound_addr(ctx, v6, &source)) {
		if (is_host_netns(ctx))
			return pool->flags & POOL_NODE_IN_RANGES ? REASON_NEXT :
								   REASON_DROP_SOURCE_RANGE;
		if (!netns_addr(ctx, to, &source))
			return REASON_DROP_SOURCE_RANGE;
	}
	return is_in_ranges(pool, &source) ? REASON_NEXT : REASON_DROP_SOURCE_RANGE;
}

#endif
