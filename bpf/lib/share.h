/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Who may have how much of the table of flows.
 *
 * It is an LRU map, which never refuses: it would push out a connection that has been idle for an
 * hour for the answer to a datagram. So no more is put into it than it holds without doing so.
 * Of that, a half is for connections and a quarter for UDP, whatever the other has; the rest is for
 * whoever comes first. What has no share stays in half_open, where it works, but may be pushed out.
 */
#ifndef SLUICE_SHARE_H
#define SLUICE_SHARE_H

#include <stdbool.h>
#include <linux/in.h>

#include "../../maps/maps.h"
#include "device_config.h"

/* A flow has four entries at most. */
#define FLOW_ENTRIES 4

/* kind_of returns as what flows of a protocol count. */
static __always_inline enum flow_kind kind_of(__u8 proto)
{
	return proto == IPPROTO_UDP ? FLOWS_UDP : FLOWS_CONNECTED;
}

static __always_inline __u64 *usage_of(enum flow_kind kind)
{
	__u32 key = kind;

	return bpf_map_lookup_elem(&sl_flow_usage, &key);
}

/* count_usage counts entries of a protocol that are put into flows, or deleted. */
static __always_inline void count_usage(__u8 proto, __s64 entries)
{
	__u64 *used = usage_of(kind_of(proto));

	if (used)
		__sync_fetch_and_add(used, entries);
}

/* has_share reports whether another flow of a protocol may have its place in flows. */
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
