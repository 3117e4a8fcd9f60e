/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Pods behind a bridge. A packet to a Service goes to the node, which is their router, but the
 * reply of a backend behind the same bridge goes directly to the client. Netfilter would see only
 * one direction, and treat the third packet as INVALID. So the first packet is sent to the backend
 * directly, too.
 */
#ifndef SLUICE_BRIDGE_H
#define SLUICE_BRIDGE_H

#include "route.h"

/*
 * is_behind reports whether the route from src to dst leaves by this device. way->mac is the next
 * hop on it.
 */
static __always_inline bool is_behind(struct __sk_buff *ctx, __u32 device, const struct addr *src,
				      const struct addr *dst, struct route *way)
{
	return find_route(ctx, src, dst, way) && way->ifindex == device;
}

/*
 * shortcut addresses the frame to the backend itself if client and backend are behind the bridge
 * of this device. It is false if the frame could not be written.
 */
static __always_inline bool shortcut(struct __sk_buff *ctx, const struct flow_key *to)
{
	__u32 port = ctx->ifindex;
	const struct device *dev;
	struct route way;
	__u32 bridge;

	if (!config_bridge_port || !config_ethernet || config_device_class != DEVICE_PODS ||
	    addr_equal(&to->src, &to->dst))
		return true;
	dev = bpf_map_lookup_elem(&sl_devices, &port);
	bridge = dev ? dev->bridge : 0;
	if (!bridge || !is_behind(ctx, bridge, &to->dst, &to->src, &way) ||
	    !is_behind(ctx, bridge, &to->src, &to->dst, &way) || !way.neighbour)
		return true;
	return !bpf_skb_store_bytes(ctx, 0, way.mac, sizeof(way.mac), 0);
}

#endif
