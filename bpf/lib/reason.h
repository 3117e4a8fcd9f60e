/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Counting the reasons of every outcome. */
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

/* is_pass reports whether the destination of a socket is not that of a Service. */
static __always_inline bool is_pass(enum reason why)
{
	return why == REASON_PASS_PROTOCOL || why == REASON_PASS_DISABLED ||
	       why == REASON_PASS_NO_FRONTEND;
}

#endif
