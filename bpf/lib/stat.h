/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What each frontend has seen. */
#ifndef SLUICE_STAT_H
#define SLUICE_STAT_H

#include <stdbool.h>

#include "../../maps/maps.h"

/* Whether anybody wants to know. */
volatile const bool config_stats = true;

/*
 * add_stat counts n more of what (enum reason or enum stat) for a frontend. It is
 * global: the verifier looks at it once, and not on each way that leads here.
 */
__noinline int add_stat(__u32 frontend_id, __u32 what, __u64 n)
{
	struct stat_key key = { .frontend_id = frontend_id, .what = what };
	__u64 *have;

	if (!config_stats)
		return 0;
	have = bpf_map_lookup_elem(&sl_stats, &key);
	if (!have) {
		if (!bpf_map_update_elem(&sl_stats, &key, &n, BPF_NOEXIST))
			return 0;
		have = bpf_map_lookup_elem(&sl_stats, &key); /* another CPU was first */
	}
	if (have)
		__sync_fetch_and_add(have, n); /* sockets' hooks are interrupted by devices' */
	return 0;
}

#endif
