/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Times of maps. */
#ifndef SLUICE_CLOCK_H
#define SLUICE_CLOCK_H

#include <bpf/bpf_helpers.h>
#include <linux/types.h>

/*
 * elapsed returns how much later now is than then, in nanoseconds, and 0 if it is not: another CPU
 * may have written then after this one read its clock, and a clock may step back a little.
 */
static __always_inline __u64 elapsed(__u64 now, __u64 then)
{
	__s64 later = now - then;

	return later > 0 ? later : 0;
}

#endif
