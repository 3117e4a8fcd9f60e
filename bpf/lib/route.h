/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The route by which the node would send a packet, and the source address that it would use. */
#ifndef SLUICE_ROUTE_H
#define SLUICE_ROUTE_H

#include <stdbool.h>

#include "packet.h"

#ifndef BPF_FIB_LOOKUP_SRC
#define BPF_FIB_LOOKUP_SRC (1U << 4)
#endif

#define AF_INET 2
#define AF_INET6 10

struct route {
	__u32 ifindex; /* of the device by which the packet leaves */
	bool neighbour; /* mac is that of the next hop */
	__u8 mac[ETH_ALEN];
	struct addr source; /* the address of this node on that route, or unspecified */
};

static __always_inline bool is_link_local(const struct addr *a)
{
	if (addr_is_v4(a))
		return (a->words[3] & bpf_htonl(0xffff0000)) == bpf_htonl(0xa9fe0000);
	return (a->words[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000);
}

static __always_inline void set_fib_addrs(struct bpf_fib_lookup *fib, const struct addr *src,
					  const struct addr *dst)
{
	if (addr_is_v4(dst)) {
		fib->family = AF_INET;
		fib->ipv4_src = src->words[3];
		fib->ipv4_dst = dst->words[3];
	} else {
		fib->family = AF_INET6;
		__builtin_memcpy(fib->ipv6_src, src, sizeof(*src));
		__builtin_memcpy(fib->ipv6_dst, dst, sizeof(*dst));
	}
}

/*
 * device_source sets source to the address that this node uses on a device, if the device is
 * known.
 */
static __always_inline void device_source(__u32 ifindex, bool v4, struct addr *source)
{
	const struct device *dev = bpf_map_lookup_elem(&sl_devices, &ifindex);

	if (dev)
		*source = v4 ? dev->source_v4 : dev->source_v6;
}

/*
 * device_in returns the device on which the stack sees a packet arrive: the bridge, not its port.
 */
static __always_inline __u32 device_in(struct __sk_buff *ctx)
{
	__u32 ifindex = ctx->ifindex;
	const struct device *dev;

	if (!config_bridge_port)
		return ifindex;
	dev = bpf_map_lookup_elem(&sl_devices, &ifindex);
	return dev && dev->bridge ? dev->bridge : ifindex;
}

/*
 * find_route looks up the route from src to dst, and is false if there is none, or if dst is this
 * node.
 */
static __noinline bool find_route(struct __sk_buff *ctx, const struct addr *src,
				  const struct addr *dst, struct route *to)
{
	/* One byte: the stack handles packets that are longer than the MTU of the route. */
	struct bpf_fib_lookup fib = { .ifindex = device_in(ctx), .tot_len = 1 };
	bool v4 = addr_is_v4(dst);
	long found;

	set_fib_addrs(&fib, src, dst);
	found = bpf_fib_lookup(ctx, &fib, sizeof(fib), config_fib_source ? BPF_FIB_LOOKUP_SRC : 0);
	if (found == BPF_FIB_LKUP_RET_UNSUPP_LWT || found == BPF_FIB_LKUP_RET_FWD_DISABLED) {
		/* There is a route, but the kernel does not return it. */
		*to = (struct route){};
		device_source(device_in(ctx), v4, &to->source);
		return true;
	}
	if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return false;

	to->ifindex = fib.ifindex;
	to->neighbour = found == BPF_FIB_LKUP_RET_SUCCESS;
	__builtin_memcpy(to->mac, fib.dmac, sizeof(to->mac));
	if (!config_fib_source)
		to->source = addr_any(dst);
	else if (v4)
		to->source = addr_of_v4(fib.ipv4_src);
	else
		__builtin_memcpy(&to->source, fib.ipv6_src, sizeof(to->source));
	if (addr_is_any(&to->source) || is_link_local(&to->source))
		device_source(to->ifindex, v4, &to->source);
	return true;
}

#endif
