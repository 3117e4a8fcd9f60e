/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A socket at a hook: its addresses, its network namespace, and the settings of the socket programs. */
#ifndef SLUICE_SOCK_H
#define SLUICE_SOCK_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "dial.h"
#include "kernel.h"

/* How long a UDP flow keeps its backend without a datagram. */
volatile const __u64 config_udp_idle_ns = 120ULL * 1000 * 1000 * 1000;

/* The cookie of the node's network namespace; 0: that of the kernel's first one. */
volatile const __u64 config_host_netns_cookie = 0;

/* Linux 6.1: connect and sendmsg hooks may set their errno. */
volatile const bool config_has_set_retval = true;

/*
 * Reading and writing the address that a socket hook is called with. v6 is constant in every
 * caller, because the verifier lets a hook access only the fields of its own family.
 */

static __always_inline struct addr hook_addr(struct bpf_sock_addr *ctx, bool v6)
{
	if (v6)
		return (struct addr){ .words = { ctx->user_ip6[0], ctx->user_ip6[1],
						 ctx->user_ip6[2], ctx->user_ip6[3] } };
	return addr_of_v4(ctx->user_ip4);
}

static __always_inline __be16 hook_port(struct bpf_sock_addr *ctx)
{
	return (__be16)ctx->user_port;
}

/*
 * frontend_key_of returns the destination as a key; like the kernel, it treats "any" as loopback.
 */
static __always_inline struct frontend_key frontend_key_of(struct bpf_sock_addr *ctx, bool v6)
{
	struct addr to = hook_addr(ctx, v6);

	return (struct frontend_key){
		.addr = addr_is_any(&to) ? addr_loopback(&to) : to,
		.port = hook_port(ctx),
		.proto = ctx->protocol,
		.scope = SCOPE_INTERNAL,
	};
}

static __always_inline void set_hook_addr(struct bpf_sock_addr *ctx, bool v6, const struct addr *a,
					  __be16 port)
{
	if (v6) {
		ctx->user_ip6[0] = a->words[0];
		ctx->user_ip6[1] = a->words[1];
		ctx->user_ip6[2] = a->words[2];
		ctx->user_ip6[3] = a->words[3];
	} else {
		ctx->user_ip4 = a->words[3];
	}
	ctx->user_port = port;
}

/* is_connected reports whether a UDP socket has a peer, and only receives from that. */
static __always_inline bool is_connected(struct bpf_sock_addr *ctx)
{
	return ctx->sk->state == BPF_TCP_ESTABLISHED;
}

/* is_peer reports whether the socket is connected to this very address. */
static __always_inline bool is_peer(struct bpf_sock_addr *ctx, bool v6, const struct addr *a,
				    __be16 port)
{
	const struct bpf_sock *sk = ctx->sk;
	struct addr peer;

	if (!is_connected(ctx) || sk->dst_port != port)
		return false;
	if (v6)
		peer = (struct addr){ .words = { sk->dst_ip6[0], sk->dst_ip6[1], sk->dst_ip6[2],
						 sk->dst_ip6[3] } };
	else
		peer = addr_of_v4(sk->dst_ip4);
	return addr_equal(&peer, a);
}

/*
 * bound_addr sets a to the source address that the socket is bound to, and is false if there is
 * none.
 */
static __always_inline bool bound_addr(struct bpf_sock_addr *ctx, bool v6, struct addr *a)
{
	const struct bpf_sock *sk = ctx->sk;

	if (!sk)
		return false;
	if (v6)
		*a = (struct addr){ .words = { sk->src_ip6[0], sk->src_ip6[1], sk->src_ip6[2],
					       sk->src_ip6[3] } };
	else
		*a = addr_of_v4(sk->src_ip4);
	return !addr_is_any(a);
}

/* The network namespace of a socket, and the address that the socket has there. */

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

/*
 * chosen_addr is bound_addr for an address that the application has chosen. A UDP socket that was connected before also
 * has one, by which the kernel reached that peer.
 */
static __always_inline bool chosen_addr(struct bpf_sock_addr *ctx, bool v6, struct addr *a)
{
	return bound_addr(ctx, v6, a) && has_chosen_addr(sock_of(ctx));
}

/*
 * is_kernel_socket reports whether a socket belongs to the kernel itself (NFS, ceph). A TCP socket can
 * be read without copying, which is faster.
 */
static __always_inline bool is_kernel_socket(struct bpf_sock_addr *ctx)
{
	const struct sock *sk = (const void *)bpf_skc_to_tcp_sock(ctx->sk);

	if (sk)
		return BPF_CORE_READ_BITFIELD(sk, sk_kern_sock);
	sk = sock_of(ctx);
	return BPF_CORE_READ_BITFIELD_PROBED(sk, sk_kern_sock);
}

/*
 * joins_connection reports whether a socket is a further subflow of a connection of Multipath TCP,
 * which only the backend of the first one can accept: see is_new in flow.h.
 */
static __always_inline bool joins_connection(const struct tcp_sock *tcp)
{
	const struct mptcp_subflow_context *subflow;

	if (!bpf_core_field_exists(tcp->is_mptcp) || !tcp->is_mptcp)
		return false;
	subflow = ((const struct inet_connection_sock *)tcp)->icsk_ulp_data;
	return BPF_CORE_READ_BITFIELD_PROBED(subflow, request_join);
}

/* Fewer hops may not lead to each backend. */
#define ENOUGH_HOPS 32

/*
 * limits_hops reports whether the application has the packets of a socket end on their way, or the answers to them
 * not accepted.
 */
static __always_inline bool limits_hops(const struct tcp_sock *tcp, bool v6)
{
	const struct inet_sock *inet = (const void *)tcp;
	__s16 hops = inet->uc_ttl;
	__s16 six_hops = v6 ? BPF_CORE_READ_BITFIELD_PROBED(inet->pinet6, hop_limit) : -1;

	return (hops >= 0 && hops < ENOUGH_HOPS) || (six_hops >= 0 && six_hops < ENOUGH_HOPS) ||
	       inet->min_ttl || (v6 && BPF_CORE_READ(inet->pinet6, min_hopcount));
}

/* shows_nothing reports whether the outcome of the connection of a socket shows nothing of its backend. */
static __always_inline bool shows_nothing(struct bpf_sock_addr *ctx, bool v6)
{
	const struct tcp_sock *tcp = (const void *)bpf_skc_to_tcp_sock(ctx->sk);

	return tcp && (joins_connection(tcp) || limits_hops(tcp, v6));
}

/*
 * The address of a network namespace is found by global functions, which the verifier walks once.
 * Their arguments and results are addresses of the kernel's structures as numbers; 0 is none. With
 * SEVERAL, there are more than the one.
 */

#define SEVERAL 1ULL

/* v4_addr_of returns the first global struct in_ifaddr of a device. */
static __always_inline __u64 v4_addr_of(const struct net_device *dev)
{
	const struct in_device *in = BPF_CORE_READ(dev, ip_ptr);
	const struct in_ifaddr *ifa = in ? BPF_CORE_READ(in, ifa_list) : NULL;
	__u64 found = 0;
	int i;

	for (i = 0; i < MAX_ADDRS && ifa; i++) {
		if (BPF_CORE_READ(ifa, ifa_scope) == V4_SCOPE_GLOBAL) {
			if (found)
				return found | SEVERAL;
			found = (__u64)ifa;
		}
		ifa = BPF_CORE_READ(ifa, ifa_next);
	}
	return found;
}

/* v6_addr_of returns the first global struct inet6_ifaddr of a device. */
static __always_inline __u64 v6_addr_of(const struct net_device *dev)
{
	const struct inet6_dev *in = BPF_CORE_READ(dev, ip6_ptr);
	const struct inet6_ifaddr *ifa;
	const struct list_head *at;
	__u64 found = 0;
	int i;

	at = in ? BPF_CORE_READ(in, addr_list.next) : NULL;
	for (i = 0; i < MAX_ADDRS && at; i++) {
		if (at == (void *)in + bpf_core_field_offset(struct inet6_dev, addr_list))
			break;
		ifa = container(at, struct inet6_ifaddr, if_list);
		if (BPF_CORE_READ(ifa, scope) == V6_SCOPE_GLOBAL) {
			if (found)
				return found | SEVERAL;
			found = (__u64)ifa;
		}
		at = BPF_CORE_READ(at, next);
	}
	return found;
}

/* addr_of_device is v4_addr_of or v6_addr_of for a device that is up and no loopback, else 0. */
__noinline __u64 addr_of_device(__u64 device, int v4)
{
	const struct net_device *dev = (const struct net_device *)device;
	__u32 flags = BPF_CORE_READ(dev, flags);

	if (!(flags & DEVICE_UP) || flags & DEVICE_LOOPBACK)
		return 0;
	return v4 ? v4_addr_of(dev) : v6_addr_of(dev);
}

/* addr_of_netns returns addr_of_device of the first device of a struct net that has one. */
__noinline __u64 addr_of_netns(__u64 netns, int v4)
{
	const struct net *net = (const struct net *)netns;
	const struct list_head *at = BPF_CORE_READ(net, dev_base_head.next);
	__u64 found = 0;
	int i;

	for (i = 0; i < MAX_DEVICES; i++) {
		__u64 ifa;

		if (at == (void *)net + bpf_core_field_offset(struct net, dev_base_head))
			break;
		ifa = addr_of_device((__u64)container(at, struct net_device, dev_list), v4);
		if (ifa && found)
			return found | SEVERAL;
		if (ifa & SEVERAL)
			return ifa;
		found = ifa ?: found;
		at = BPF_CORE_READ(at, next);
	}
	return found;
}

/* How well the source address of a socket is known before the kernel has chosen one. */
enum source {
	SOURCE_NONE = 0, /* its network namespace has no address */
	SOURCE_ONLY = 1, /* it is bound to this one, or its namespace has no other */
	SOURCE_FIRST = 2, /* the first one of several */
};

/*
 * netns_addr sets a to the first global address, of the family, of the first device that is up in the
 * network namespace of the socket. Connect hooks run before the kernel chooses a source address; a pod
 * with one address will use this one.
 */
static __always_inline enum source netns_addr(struct bpf_sock_addr *ctx, bool v4, struct addr *a)
{
	const struct sock *sk = sock_of(ctx);
	const struct net *net = BPF_CORE_READ(sk, __sk_common.skc_net.net);
	__u64 found = addr_of_netns((__u64)net, v4), ifa = found & ~SEVERAL;

	if (!ifa)
		return SOURCE_NONE;
	if (v4)
		*a = addr_of_v4(BPF_CORE_READ((const struct in_ifaddr *)ifa, ifa_local));
	else
		BPF_CORE_READ_INTO(a, (const struct inet6_ifaddr *)ifa, addr);
	return found & SEVERAL ? SOURCE_FIRST : SOURCE_ONLY;
}

/*
 * The source address of a socket for loadBalancerSourceRanges, before the kernel has chosen one.
 */

static __always_inline enum source source_of(struct bpf_sock_addr *ctx, bool v6,
					     const struct addr *to, struct addr *source)
{
	return bound_addr(ctx, v6, source) ? SOURCE_ONLY : netns_addr(ctx, addr_is_v4(to), source);
}

/*
 * check_source checks the client against loadBalancerSourceRanges. The kernel has not chosen a
 * source address yet: the node's own traffic counts as coming from the node IP, as in kube-proxy's
 * rules, unless the application has chosen another, and a pod's from the address of the pod.
 */
static __always_inline enum reason check_source(struct bpf_sock_addr *ctx, bool v6,
						const struct pool *pool, const struct addr *to)
{
	struct addr source;

	if (!(pool->flags & POOL_SOURCE_RANGES))
		return REASON_NEXT;
	if (is_host_netns(ctx))
		return check_client(pool, chosen_addr(ctx, v6, &source) ? &source : NULL);
	if (!source_of(ctx, v6, to, &source))
		return REASON_DROP_SOURCE_RANGE;
	return check_client(pool, &source);
}

#endif
