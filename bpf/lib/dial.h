/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a process dials: the stages of the socket programs that need to know the client, but not its
 * socket, so that bpf/probe.c can run them without one.
 */
#ifndef SLUICE_DIAL_H
#define SLUICE_DIAL_H

#include <stdbool.h>
#include <bpf/bpf_core_read.h>

#include "kernel.h"
#include "pick.h"

/*
 * Settings that the agent makes before it loads the socket programs. The verifier prunes what they
 * switch off.
 */

/*
 * Which UDP sockets are translated: those of pods by this, and those of the node's own namespace always,
 * because no device sees what they send to an address of the node.
 */
enum udp_mode {
	UDP_OFF = 0, /* none: the device programs translate UDP */
	UDP_ALL = 1, /* each connect(), and each sendto() */
};

volatile const __u32 config_udp_mode = UDP_ALL;

/* Node ports also answer the node's own processes on the loopback address of the family. */
volatile const bool config_localhost_node_ports_v4 = true;
volatile const bool config_localhost_node_ports_v6 = true;

/* translates_udp, _connects and _sends: is_host is set for the node's own namespace. */

static __always_inline enum reason translates_udp(bool is_host)
{
	return config_udp_mode == UDP_ALL || is_host ? REASON_NEXT : REASON_PASS_DISABLED;
}

static __always_inline enum reason translates_connects(__u8 proto, bool is_host)
{
	if (proto == IPPROTO_TCP)
		return REASON_NEXT;
	if (proto != IPPROTO_UDP)
		return REASON_PASS_PROTOCOL;
	return translates_udp(is_host);
}

static __always_inline enum reason translates_sends(__u8 proto, bool is_host)
{
	if (proto != IPPROTO_UDP)
		return REASON_PASS_PROTOCOL;
	return translates_udp(is_host);
}

/*
 * may_be_localhost reports whether node ports answer at the destination if the client is in the
 * node's own network namespace, although it is a loopback address.
 */
static __always_inline bool may_be_localhost(const struct frontend_key *original_dst)
{
	if (!addr_is_loopback(&original_dst->addr))
		return false;
	return addr_is_v4(&original_dst->addr) ? config_localhost_node_ports_v4 :
						 config_localhost_node_ports_v6;
}

/*
 * lookup_dial copies the pool that serves the destination; localhost is set if it is a loopback
 * address of the node's own namespace. A destination that is no Service costs the filter, and the
 * check whether it is in a Service CIDR.
 */
static __always_inline enum reason lookup_dial(const struct frontend_key *original_dst,
					       bool localhost, struct pool *pool)
{
	bool maybe = may_be_ours(addr_hash(&original_dst->addr)), node_ports = false;
	enum reason why;

	if (maybe) {
		why = find_pool(original_dst, pool);
		if (why != REASON_PASS_NO_FRONTEND)
			return why;
		node_ports = addr_flags(&original_dst->addr) & ADDR_NODE_PORT;
	}
	/* Node ports also answer on loopback, but only on that of the node's own namespace. */
	if (addr_is_loopback(&original_dst->addr))
		node_ports = localhost;
	if (node_ports) {
		why = find_node_port(original_dst, pool);
		if (why != REASON_PASS_NO_FRONTEND)
			return why;
	}
	if (maybe && is_cluster_ip(original_dst))
		return REASON_REJECT_NO_PORT;
	return is_service_cidr(&original_dst->addr) ? REASON_DROP_UNALLOCATED :
						      REASON_PASS_NO_FRONTEND;
}

/*
 * is_nodes_cluster_ip reports whether the destination is a ClusterIP that this node has as an
 * address: it is served here, on those ports on which a socket of the node is bound to it.
 */
static __always_inline bool is_nodes_cluster_ip(const struct frontend_key *original_dst)
{
	return addr_flags(&original_dst->addr) & ADDR_NODE && is_cluster_ip(original_dst);
}

/* The application has chosen the address of a socket. */
#define SOCK_BINDADDR_LOCK 4

static __always_inline bool has_chosen_addr(const struct sock *sk)
{
	return BPF_CORE_READ_BITFIELD_PROBED(sk, sk_userlocks) & SOCK_BINDADDR_LOCK;
}

/*
 * node_addr sets a to the address by which processes of this node that are bound to none are a client: that
 * of the node. It is false if the node has none of the family.
 */
static __always_inline bool node_addr(bool v4, struct addr *a)
{
	__u32 node = 0;
	const struct device *dev = bpf_map_lookup_elem(&sl_devices, &node);

	if (!dev)
		return false;
	*a = v4 ? dev->source_v4 : dev->source_v6;
	return !addr_is_any(a);
}

/*
 * seed_of_dial returns the seed of the pool's algorithm; client is the number of the client. A socket that
 * connects has no port yet, so a random number stands for the flow.
 */
static __always_inline __u32 seed_of_dial(const struct pool *pool, __u32 client,
					  const struct frontend_key *original_dst, bool connects)
{
	const struct frontend_key *dst = original_dst;

	switch (pool->algorithm) {
	case ALGORITHM_RR:
		return turn_of(&dst->addr, dst->port, dst->proto, dst->scope) |
		       (connects && dst->proto == IPPROTO_UDP ? TURN_OF_CONNECT : 0);
	case ALGORITHM_SH:
		return client;
	case ALGORITHM_DH:
		return hash(&dst->addr, sizeof(dst->addr));
	case ALGORITHM_RANDOM:
	case ALGORITHM_LC:
	case ALGORITHM_SED:
	case ALGORITHM_NQ:
		return 0; /* these use none */
	default:
		return bpf_get_prandom_u32();
	}
}

/*
 * check_client checks a client against loadBalancerSourceRanges. src is its address, or NULL for a
 * process of the node that is bound to none: it counts as coming from the node IP.
 */
static __always_inline enum reason check_client(const struct pool *pool, const struct addr *src)
{
	bool allowed = src ? is_in_ranges(pool, src) : pool->flags & POOL_NODE_IN_RANGES;

	return allowed ? REASON_NEXT : REASON_DROP_SOURCE_RANGE;
}

#endif
