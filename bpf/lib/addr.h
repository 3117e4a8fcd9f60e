/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Addresses: one 128-bit type, IPv4 mapped into ::ffff:0:0/96. */
#ifndef SLUICE_ADDR_H
#define SLUICE_ADDR_H

#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "../../maps/types.h"

#define V4_MAPPED bpf_htonl(0xffff)

static __always_inline struct addr addr_of_v4(__be32 ip)
{
	return (struct addr){ .words = { 0, 0, V4_MAPPED, ip } };
}

/* Comparisons have no branches: each branch would be one more path for the verifier. */

static __always_inline bool addr_is_v4(const struct addr *a)
{
	return !(a->words[0] | a->words[1] | (a->words[2] ^ V4_MAPPED));
}

static __always_inline bool addr_equal(const struct addr *a, const struct addr *b)
{
	return !((a->words[0] ^ b->words[0]) | (a->words[1] ^ b->words[1]) |
		 (a->words[2] ^ b->words[2]) | (a->words[3] ^ b->words[3]));
}

/* addr_any returns the unspecified address of the family of a. */
static __always_inline struct addr addr_any(const struct addr *a)
{
	return (struct addr){ .words = { 0, 0, addr_is_v4(a) ? V4_MAPPED : 0, 0 } };
}

/* addr_is_any reports whether a is 0.0.0.0, its mapped form, or ::. */
static __always_inline bool addr_is_any(const struct addr *a)
{
	return addr_is_v4(a) ? !a->words[3] :
			       !(a->words[0] | a->words[1] | a->words[2] | a->words[3]);
}

/* addr_loopback returns 127.0.0.1 or ::1, in the family of a. */
static __always_inline struct addr addr_loopback(const struct addr *a)
{
	if (addr_is_v4(a))
		return addr_of_v4(bpf_htonl(0x7f000001));
	return (struct addr){ .words = { 0, 0, 0, bpf_htonl(1) } };
}

#endif
