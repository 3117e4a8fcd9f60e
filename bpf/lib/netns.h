/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The network namespace of a socket, and the address that the socket has there. */
#ifndef SLUICE_NETNS_H
#define SLUICE_NETNS_H

#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "config.h"
#include "kernel.h"

/* A pod has lo, eth0 and, with tunnel modules loaded, a dozen idle devices. */
#define MAX_DEVICES 32
#define MAX_ADDRS 4

#define DEVICE_UP 0x1
#define DEVICE_LOOPBACK 0x8
#define V4_SCOPE_GLOBAL 0
#define V6_SCOPE_GLOBAL 0

/* container returns the structure of this type around a list's link. */
#define container(link, type, member) \
	((const type *)((void *)(link) - bpf_core_field_offset(type, member)))

static __always_inline bool is_host_netns(struct bpf_sock_addr *ctx)
{
	__u64 host = config_host_netns_cookie ?: bpf_get_netns_cookie(NULL);

	return bpf_get_netns_cookie(ctx) == host;
}

/*
 * sock_of returns the kernel's structure of the socket, or NULL. The verifier only allows single
 * fields of a context's socket to be read, so its address is copied as a number.
 */
static __always_inline const struct sock *sock_of(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *held = ctx->sk;
	const struct sock *sk = NULL;

	bpf_probe_read_kernel(&sk, sizeof(sk), &held);
	return sk;
}

/* is_kernel_socket reports whether a socket belongs to the kernel itself (NFS, ceph). */
static __always_inline bool is_kernel_socket(struct bpf_sock_addr *ctx)
{
	const struct sock *sk = sock_of(ctx);

	return BPF_CORE_READ_BITFIELD_PROBED(sk, sk_kern_sock);
}

static __always_inline bool device_v4_addr(const struct net_device *dev, struct addr *a)
{
	const struct in_device *in = BPF_CORE_READ(dev, ip_ptr);
	const struct in_ifaddr *ifa;
	int i;

	if (!in)
		return false;
	ifa = BPF_CORE_READ(in, ifa_list);
	for (i = 0; i < MAX_ADDRS && ifa; i++) {
		if (BPF_CORE_READ(ifa, ifa_scope) == V4_SCOPE_GLOBAL) {
			*a = addr_of_v4(BPF_CORE_READ(ifa, ifa_local));
			return true;
		}
		ifa = BPF_CORE_READ(ifa, ifa_next);
	}
	return false;
}

static __always_inline bool device_v6_addr(const struct net_device *dev, struct addr *a)
{
	const struct inet6_dev *in = BPF_CORE_READ(dev, ip6_ptr);
	const struct list_head *at;
	int i;

	if (!in)
		return false;
	at = BPF_CORE_READ(in, addr_list.next);
	for (i = 0; i < MAX_ADDRS; i++) {
		const struct inet6_ifaddr *ifa;

		if (at == (void *)in + bpf_core_field_offset(struct inet6_dev, addr_list))
			break;
		ifa = container(at, struct inet6_ifaddr, if_list);
		if (BPF_CORE_READ(ifa, scope) == V6_SCOPE_GLOBAL) {
			BPF_CORE_READ_INTO(a, ifa, addr);
			return true;
		}
		at = BPF_CORE_READ(at, next);
	}
	return false;
}

/*
 * netns_addr sets a to the first global address, in the family of to, of the first device that is
 * up in the network namespace of the socket. Connect hooks run before the kernel chooses a source
 * address; a pod with one address will use this one.
 */
static __always_inline bool netns_addr(struct bpf_sock_addr *ctx, const struct addr *to,
				       struct addr *a)
{
	const struct sock *sk = sock_of(ctx);
	const struct list_head *at;
	const struct net *net;
	int i;

	net = BPF_CORE_READ(sk, __sk_common.skc_net.net);
	at = BPF_CORE_READ(net, dev_base_head.next);
	for (i = 0; i < MAX_DEVICES; i++) {
		const struct net_device *dev;
		__u32 flags;

		if (at == (void *)net + bpf_core_field_offset(struct net, dev_base_head))
			break;
		dev = container(at, struct net_device, dev_list);
		flags = BPF_CORE_READ(dev, flags);
		if (flags & DEVICE_UP && !(flags & DEVICE_LOOPBACK) &&
		    (addr_is_v4(to) ? device_v4_addr(dev, a) : device_v6_addr(dev, a)))
			return true;
		at = BPF_CORE_READ(at, next);
	}
	return false;
}

#endif
