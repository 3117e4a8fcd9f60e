/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Addresses, and the filters that tell other traffic from that of Services. */
#ifndef SLUICE_ADDR_H
#define SLUICE_ADDR_H

#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "../../maps/maps.h"

/* An address is one 128-bit type, with IPv4 mapped into ::ffff:0:0/96. */

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

/* addr_is_loopback reports whether a is in 127.0.0.0/8, or ::1. */
static __always_inline bool addr_is_loopback(const struct addr *a)
{
	struct addr loopback = addr_loopback(a);

	if (addr_is_v4(a))
		return (a->words[3] & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
	return addr_equal(a, &loopback);
}

/* mix spreads a difference in any bit over all bits. */
static __always_inline __u32 mix(__u32 h)
{
	h = (h ^ h >> 16) * 0x85ebca6b;
	h = (h ^ h >> 13) * 0xc2b2ae35;
	return h ^ h >> 16;
}

/* What clients do not know of hash. All nodes have the same; the agent sets it before it loads programs. */
volatile const __u32 config_hash_seed = 0;

/*
 * hash returns the same value on every node. The seed comes before all bytes: equal hashes with one seed are
 * not equal with another.
 */
static __always_inline __u32 hash(const void *bytes, __u32 size)
{
	const __u32 *words = bytes;
	__u32 h = size ^ config_hash_seed, i;

	for (i = 0; i < size / sizeof(*words); i++)
		h = mix(h ^ words[i]);
	return h;
}

/*
 * Filters: all that packets and sockets of no Service pay for, one or two array loads before any
 * hash map.
 *
 * Each filter answers "certainly not a Service's" or "maybe", and "maybe" costs the lookups that
 * follow. There are no false negatives: a filter is written before the entry that it stands for,
 * and cleared only by the agent, once that entry is gone and every program that may have seen it
 * has ended.
 */

/* addr_hash returns the same hash as addrHash in maps/filter.go. */
static __always_inline __u32 addr_hash(const struct addr *a)
{
	__u32 folded = 0, i;

	for (i = 0; i < 4; i++) {
		folded = (folded ^ bpf_ntohl(a->words[i])) * 0x9e3779b1;
		folded ^= folded >> 15;
	}
	/* The high bits of a product depend on all bits of its factors. */
	return folded * 0x85ebca6b;
}

/* may_be_ours is false for the hash of an address that is certainly not in addrs. */
static __always_inline bool may_be_ours(__u32 hash)
{
	__u32 bit = (__u64)hash * ADDR_FILTER_BITS >> 32, word = bit / 64;
	const __u64 *bits = bpf_map_lookup_elem(&sl_addr_filter, &word);

	return bits && *bits >> bit % 64 & 1;
}

/* may_be_nodes is false for the hash of an address that this node certainly does not have. */
static __always_inline bool may_be_nodes(__u32 hash)
{
	return may_be_ours(~hash);
}

/* may_be_service_cidr is false for an address that is certainly in no Service CIDR. */
static __always_inline bool may_be_service_cidr(const struct addr *a)
{
	__u32 only = 0, i;
	const struct cidr_covers *covers = bpf_map_lookup_elem(&sl_cidr_covers, &only);
	__u64 begin = addr_is_v4(a) ? (__u64)bpf_ntohl(a->words[3]) << 32 :
				      (__u64)bpf_ntohl(a->words[0]) << 32 | bpf_ntohl(a->words[1]);
	bool covered = false;

	if (!covers)
		return true;
	for (i = 0; i < CIDR_COVERS; i++) {
		__u64 prefix = *(volatile const __u64 *)&covers->prefixes[i];

		/* Covered addresses differ from it only below the 1 that ends the prefix. */
		covered |= (begin ^ prefix) >> 1 < (prefix & -prefix);
	}
	return covered;
}

/*
 * is_service_cidr reports whether an address is in a Service CIDR, and not that of a Service which
 * another proxy serves.
 */
static __always_inline bool is_service_cidr(const struct addr *a)
{
	struct cidr_key key = { .prefix_len = 128, .addr = *a };
	const __u32 *use;

	if (!may_be_service_cidr(a))
		return false;
	use = bpf_map_lookup_elem(&sl_service_cidrs, &key);
	return use && *use == CIDR_OF_SERVICES;
}

/*
 * No packet has port 0. Its byte in port_filter is set if there has been a direct connection to a
 * backend with a flow of its own, or a flow beside which a datagram may begin one, or that it ends: see open_beside.
 */
#define DIRECT_PORT 0

static __always_inline struct port_line *port_line(__be16 port)
{
	__u32 line = bpf_ntohs(port) / PORTS_PER_LINE;

	return bpf_map_lookup_elem(&sl_port_filter, &line);
}

/*
 * may_be_our_port is false for a port of this node that is certainly no node port, and that no
 * flow has.
 */
static __always_inline bool may_be_our_port(__be16 port)
{
	const struct port_line *line = port_line(port);

	return !line || line->used[bpf_ntohs(port) % PORTS_PER_LINE];
}

/* note_port marks a port of this node, before an entry for packets to it is put. */
static __always_inline void note_port(__be16 port)
{
	struct port_line *line = port_line(port);
	__u32 at = bpf_ntohs(port) % PORTS_PER_LINE;

	if (line && !line->used[at])
		line->used[at] = 1;
}

static __always_inline struct source_line *source_line(__u32 hash)
{
	__u32 line = (__u64)hash * SOURCE_LINES >> 32;

	return bpf_map_lookup_elem(&sl_source_filter, &line);
}

/* source_cell returns the same cell as sourceCell in maps/filter.go. */
static __always_inline __u32 source_cell(__be16 port)
{
	__u32 cell = (__u16)(bpf_ntohs(port) * 0x9e37) / (65536 / SOURCE_CELLS);

	return cell + (cell == SOURCE_CELL_ALL);
}

/*
 * may_be_of_flow is false for the hash and the port of a source at egress for which certainly no
 * flow has an entry.
 */
static __always_inline bool may_be_of_flow(__u32 hash, __be16 port)
{
	const struct source_line *line = source_line(hash);

	return !line ||
	       line->cells[SOURCE_CELL_ALL] | line->cells[source_cell(port) % SOURCE_CELLS];
}

/* note_cell writes the time, unless it has been written recently. */
static __always_inline void note_cell(__u32 *cell, __u32 now)
{
	if (!*cell || *cell + SOURCE_CELL_FRESH <= now)
		*cell = now;
}

/*
 * note_source marks a source before an entry for its packets at egress is put: with this port, or
 * with any. Clients use many ports, and nearly all packets that leave a node from a client's
 * address belong to its flows, so all ports of a client share one cell. Until a flow is confirmed, its client may
 * be any address that another host has made up: then the cell of its port is marked, or a flood of first packets would
 * let all packets pass the filter.
 */
static __always_inline void note_source(const struct addr *src, __be16 port, bool any, __u64 now)
{
	struct source_line *line = source_line(addr_hash(src));
	__u32 cell = any ? SOURCE_CELL_ALL : source_cell(port);

	if (line)
		note_cell(&line->cells[cell % SOURCE_CELLS], (now >> SOURCE_CELL_SHIFT) + 1);
}

#endif
