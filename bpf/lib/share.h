/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The shares of connections and of UDP in the table of flows.
 *
 * The table is an LRU map, which never refuses an entry: it would evict a connection that has been
 * idle for an hour for the answer to a datagram. So programs put no more entries into it than it
 * holds without eviction. Half of these are reserved for connections and a quarter for UDP; the
 * rest is first come, first served. A flow without a share stays in half_open, where it works, but
 * may be evicted.
 */
#ifndef SLUICE_SHARE_H
#define SLUICE_SHARE_H

#include <stdbool.h>
#include <linux/in.h>

#include "../../maps/maps.h"
#include "device_config.h"

/* The most entries that a flow has. */
#define FLOW_ENTRIES 4

/* kind_of returns the kind in which flows of a protocol are counted. */
static __always_inline enum flow_kind kind_of(__u8 proto)
{
	return proto == IPPROTO_UDP ? FLOWS_UDP : FLOWS_CONNECTED;
}

static __always_inline __u64 *usage_of(enum flow_kind kind)
{
	__u32 key = kind;

	return bpf_map_lookup_elem(&sl_flow_usage, &key);
}

/* count_usage counts entries of a protocol that were put into flows, or deleted. */
static __always_inline void count_usage(__u8 proto, __s64 entries)
{
	__u64 *used = usage_of(kind_of(proto));

	if (used)
		__sync_fetch_and_add(used, entries);
}

/* has_share reports whether there is room in flows for another flow of a protocol. */
static __always_inline bool has_share(__u8 proto)
{
	bool udp = proto == IPPROTO_UDP;
	const __u64 *used = usage_of(udp ? FLOWS_UDP : FLOWS_CONNECTED);
	const __u64 *others = usage_of(udp ? FLOWS_CONNECTED : FLOWS_UDP);
	__s64 kept = udp ? config_flows_room >> 1 : config_flows_room >> 2;

	if (!used || !others)
		return false;
	if ((__s64)*others > kept)
		kept = *others;
	return (__s64)*used + FLOW_ENTRIES + kept <= config_flows_room;
}

#endif
