/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Pods behind a bridge. A packet to a Service goes to the node, which is their
 * router; the backend's reply, if it is behind the same bridge, goes directly to
 * the client. Netfilter would see only one of the two, and take the third packet
 * for INVALID. So the first one goes directly, too.
 */
#ifndef SLUICE_BRIDGE_H
#define SLUICE_BRIDGE_H

#include "route.h"

/* shortcut sends a packet to a backend behind the bridge of this device right there. */
static __always_inline bool shortcut(struct __sk_buff *ctx, const struct flow_key *to)
{
	__u32 port = ctx->ifindex;
	const struct device *dev;
	struct route way;

	if (!config_bridge_port || !config_ethernet || addr_equal(&to->src, &to->dst))
		return true;
	dev = bpf_map_lookup_elem(&sl_devices, &port);
	if (!dev || !dev->bridge)
		return true;
	if (!find_route(ctx, &to->src, &to->dst, &way))
		return true;
	if (way.ifindex != dev->bridge || !way.neighbour)
		return true;
	return !bpf_skb_store_bytes(ctx, 0, way.mac, sizeof(way.mac), 0);
}

#endif
