/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Reading what the agent may replace at the same moment. */
#ifndef SLUICE_READ_H
#define SLUICE_READ_H

#include <stdbool.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

/* How often an element is read until two copies agree, or the last one has to do. */
#define MAX_READS 8

/* same compares without branches: each would be one more path to verify. */
static __always_inline bool same(const __u32 *a, const __u32 *b, __u32 size)
{
	__u32 differ = 0, i;

	for (i = 0; i < size / sizeof(*a); i++)
		differ |= a[i] ^ b[i];
	return !differ;
}

/*
 * read_value copies the value at key, and is false if there is none.
 *
 * Hash maps give the element that an update replaces or a delete removes to
 * the next update at once (Linux 6.1, no preallocation), also while a program
 * reads it: under our eyes, one Service's frontend can become another's. So we
 * look it up and read it until two copies agree. (That the second lookup finds
 * the same element says little: two updates later, it is back.)
 *
 * For the same reason a lookup can miss a key whose element is being replaced:
 * it meets the old one when that has another key already, and is in no other
 * bucket yet. Where the key is expected to be there, one miss does not count.
 */
static __always_inline bool read_value(void *map, const void *key, void *value, __u32 size,
				       bool expected)
{
	const void *at = bpf_map_lookup_elem(map, key);
	int i;

	if (!at && expected)
		at = bpf_map_lookup_elem(map, key);
	if (!at)
		return false;
	__builtin_memcpy(value, at, size);
	for (i = 1; i < MAX_READS; i++) {
		at = bpf_map_lookup_elem(map, key);
		if (!at)
			continue;
		if (same(value, at, size))
			break;
		__builtin_memcpy(value, at, size);
	}
	return true;
}

#endif
