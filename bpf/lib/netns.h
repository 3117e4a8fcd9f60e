/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Where the network namespace of a socket leads. A socket is translated if packets of its namespace
 * leave it for the node, and if the address that it dials is not one of the namespace itself. What is
 * dialled in a namespace behind that of a pod (a container in a pod, a cluster in a pod) means what
 * that pod makes of it: the program at the pod's device translates what leaves the pod.
 *
 * The devices of a namespace say where it leads, in the kernel's own structures: there is nothing to
 * learn before a new pod connects for the first time.
 */
#ifndef SLUICE_NETNS_H
#define SLUICE_NETNS_H

#include <stdbool.h>
#include <linux/types.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "kernel.h"
#include "sock.h"

/* The inode of the node's network namespace. */
volatile const __u32 config_host_netns_inode = 0;

/* What is found in a network namespace that is not the node's. */
enum netns_find {
	LEADS_TO_DEVICE = 0x1, /* a device whose other end is a device of the node */
	LEADS_PAST_DEVICE = 0x2, /* hardware, or a device above one of the node (macvlan) */
	LEADS_ELSEWHERE = 0x4, /* a device whose other end is in a third namespace */
	HAS_ADDRESS = 0x8, /* the destination is an address of this namespace, or may be */
};

#define LEADS_TO_NODE (LEADS_TO_DEVICE | LEADS_PAST_DEVICE)

/* A node of a cluster in a pod has many addresses on one device (IPVS). */
#define MAX_OWN_ADDRS 16

/* The private data of a device begin behind it. */
#define DEVICE_ALIGN 32

static __always_inline const struct net_device *device_at(const void *place)
{
	const struct net_device *dev = NULL;

	bpf_probe_read_kernel(&dev, sizeof(dev), place);
	return dev;
}

/*
 * peer_of returns the other end of a device that is one of a pair, or NULL. Both kinds of pairs keep
 * it at the beginning of their private data. It is an end only if it leads back.
 */
static __always_inline const struct net_device *peer_of(const struct net_device *dev,
							const struct rtnl_link_ops *ops)
{
	__u32 size = (bpf_core_type_size(struct net_device) + DEVICE_ALIGN - 1) & -DEVICE_ALIGN;
	const struct net_device *peer;
	char kind[8] = {};

	bpf_probe_read_kernel_str(kind, sizeof(kind), BPF_CORE_READ(ops, kind));
	if (__builtin_memcmp(kind, "veth", 5) && __builtin_memcmp(kind, "netkit", 7))
		return NULL;
	peer = device_at((const void *)dev + size);
	return peer && device_at((const void *)peer + size) == dev ? peer : NULL;
}

/* lower_of returns the device that another one is above of (macvlan, ipvlan, VLAN), or NULL. */
static __always_inline const struct net_device *lower_of(const struct net_device *dev)
{
	const struct list_head *at = BPF_CORE_READ(dev, adj_list.lower.next);

	if (!at || at == (void *)dev + bpf_core_field_offset(struct net_device, adj_list.lower))
		return NULL;
	return BPF_CORE_READ(container(at, struct netdev_adjacent, list), dev);
}

/*
 * The functions that follow are global, so that the verifier walks them once: addresses of the
 * kernel's structures are numbers, and so are the halves of an address.
 */

/* leads_of returns where a device leads, of enum netns_find; 0 is to no other namespace. */
__noinline int leads_of(__u64 device)
{
	const struct net_device *dev = (const struct net_device *)device, *other;
	const struct rtnl_link_ops *ops = BPF_CORE_READ(dev, rtnl_link_ops);
	bool pair;
	__u32 to;

	if (!ops) /* no software has made it */
		return BPF_CORE_READ(dev, flags) & DEVICE_LOOPBACK ? 0 : LEADS_PAST_DEVICE;
	other = peer_of(dev, ops);
	pair = other;
	if (!pair)
		other = lower_of(dev);
	if (!other)
		return 0;
	to = BPF_CORE_READ(other, nd_net.net, ns.inum);
	if (to == config_host_netns_inode)
		return pair ? LEADS_TO_DEVICE : LEADS_PAST_DEVICE;
	return to == BPF_CORE_READ(dev, nd_net.net, ns.inum) ? 0 : LEADS_ELSEWHERE;
}

/* has_v4 returns HAS_ADDRESS if an IPv4 address is one of a device, or if that has too many, else 0. */
__noinline int has_v4(__u64 device, __u32 ip)
{
	const struct in_device *in = BPF_CORE_READ((const struct net_device *)device, ip_ptr);
	const struct in_ifaddr *ifa = in ? BPF_CORE_READ(in, ifa_list) : NULL;
	int i;

	for (i = 0; i < MAX_OWN_ADDRS; i++) {
		if (!ifa)
			return 0;
		if (BPF_CORE_READ(ifa, ifa_local) == ip)
			return HAS_ADDRESS;
		ifa = BPF_CORE_READ(ifa, ifa_next);
	}
	return ifa ? HAS_ADDRESS : 0;
}

/* has_v6 is has_v4 for an IPv6 address, in two halves. */
__noinline int has_v6(__u64 device, __u64 first, __u64 last)
{
	const struct inet6_dev *in = BPF_CORE_READ((const struct net_device *)device, ip6_ptr);
	const struct list_head *at;
	__u64 own[2];
	int i;

	if (!in)
		return 0;
	at = BPF_CORE_READ(in, addr_list.next);
	for (i = 0; i < MAX_OWN_ADDRS; i++) {
		if (!at || at == (void *)in + bpf_core_field_offset(struct inet6_dev, addr_list))
			return 0;
		BPF_CORE_READ_INTO(&own, container(at, struct inet6_ifaddr, if_list), addr);
		if (own[0] == first && own[1] == last)
			return HAS_ADDRESS;
		at = BPF_CORE_READ(at, next);
	}
	return HAS_ADDRESS;
}

/* look_around returns what is found of a destination, in two halves, in a struct net. */
__noinline int look_around(__u64 netns, __u64 first, __u64 last)
{
	const struct net *net = (const struct net *)netns;
	const struct list_head *at = BPF_CORE_READ(net, dev_base_head.next);
	bool v4 = !first && (__u32)last == V4_MAPPED;
	int found = 0, i;

	for (i = 0; i < MAX_DEVICES; i++) {
		__u64 device = (__u64)container(at, struct net_device, dev_list);

		if (!at || at == (void *)net + bpf_core_field_offset(struct net, dev_base_head))
			break;
		found |= leads_of(device);
		found |= v4 ? has_v4(device, last >> 32) : has_v6(device, first, last);
		at = BPF_CORE_READ(at, next);
	}
	return found;
}

static __always_inline int find_in_netns(struct bpf_sock_addr *ctx, const struct addr *dst)
{
	const struct sock *sk = sock_of(ctx);
	__u64 halves[2];

	__builtin_memcpy(halves, dst, sizeof(halves));
	return look_around((__u64)BPF_CORE_READ(sk, __sk_common.skc_net.net), halves[0], halves[1]);
}

/*
 * What is known to be translated, so that not every socket looks around. Each is a hash, and holds
 * for up to some seconds: a pod gets other addresses rarely.
 */
#define KNOWN_BITS 10
#define KNOWN_SHIFT 8 /* of the kernel's clock ticks */

static volatile __u64 known[1 << KNOWN_BITS];

static __always_inline bool is_known(__u64 h)
{
	return known[h >> (64 - KNOWN_BITS)] == h + (bpf_jiffies64() >> KNOWN_SHIFT);
}

static __always_inline void note_known(__u64 h)
{
	known[h >> (64 - KNOWN_BITS)] = h + (bpf_jiffies64() >> KNOWN_SHIFT);
}

static __always_inline __u64 hash_of_dial(__u64 netns_cookie, const struct addr *dst)
{
	__u64 h = netns_cookie * 0x9e3779b97f4a7c15, halves[2];

	__builtin_memcpy(halves, dst, sizeof(halves));
	h = ((h ^ h >> 32) + halves[0]) * 0xbf58476d1ce4e5b9;
	h = ((h ^ h >> 29) + halves[1]) * 0x94d049bb133111eb;
	return h ^ h >> 31;
}

/*
 * is_left_to_pod reports whether what a socket dials outside of the node's namespace is not the
 * node's to translate.
 */
static __always_inline bool is_left_to_pod(struct bpf_sock_addr *ctx, const struct addr *dst)
{
	__u64 h = hash_of_dial(bpf_get_netns_cookie(ctx), dst);
	int found;

	if (is_known(h))
		return false;
	found = find_in_netns(ctx, dst);
	if (found & HAS_ADDRESS)
		return true;
	if (found & LEADS_TO_NODE)
		note_known(h);
	return (found & (LEADS_TO_NODE | LEADS_ELSEWHERE)) == LEADS_ELSEWHERE;
}

#endif
