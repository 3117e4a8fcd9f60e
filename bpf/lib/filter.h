/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The cheap test that every destination pays: one load. */
#ifndef SLUICE_FILTER_H
#define SLUICE_FILTER_H

#include <stdbool.h>
#include <bpf/bpf_endian.h>

#include "../../maps/maps.h"

/* addr_filter_bit is the number of an address' bit; filterBit in maps/filter.go. */
static __always_inline __u32 addr_filter_bit(const struct addr *a)
{
	__u32 folded = 0, i;

	for (i = 0; i < 4; i++) {
		folded = (folded ^ bpf_ntohl(a->words[i])) * 0x9e3779b1;
		folded ^= folded >> 15;
	}
	/* A product's high bits depend on all bits of its factors. */
	folded *= 0x85ebca6b;
	return (__u64)folded * ADDR_FILTER_BITS >> 32;
}

/* may_be_ours is false for an address that is certainly not in addrs. */
static __always_inline bool may_be_ours(const struct addr *a)
{
	__u32 bit = addr_filter_bit(a), word = bit / 64;
	const __u64 *bits = bpf_map_lookup_elem(&sl_addr_filter, &word);

	return bits && *bits >> bit % 64 & 1;
}

#endif
