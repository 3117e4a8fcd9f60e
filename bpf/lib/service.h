/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Services: from a destination to its frontend and its pool. */
#ifndef SLUICE_SERVICE_H
#define SLUICE_SERVICE_H

#include <stdbool.h>
#include <linux/in.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>

#include "../../maps/maps.h"
#include "addr.h"
#include "backend.h"
#include "kernel.h"

/*
 * Lookups in the arrays that the agent fills.
 *
 * What a program reads there is right, or recognizably wrong:
 *
 * - The agent writes a place before anything leads to it. It writes the word that leads to it
 *   last, with release order: the pool_id of a frontend, or an element of frontend_ids. Each
 *   lookup here depends on the number that the one before has read, and even arm64 keeps the order
 *   of loads that depend on each other.
 * - Nothing that a frontend leads to is changed afterwards. The agent writes another pool, and
 *   switches pool_id with one store.
 * - The agent reuses a place only when every program that may have read what led to it has ended
 *   (an RCU grace period, which the update of an array of maps waits for).
 * - Elements of frontend_ids are not covered by that: the kernel may give one to another key while
 *   its value is read. So a frontend contains its own key, which find_pool compares.
 * - Ids of backends that are kept for longer than a program runs have a generation, and each place
 *   contains its current one.
 */

static __always_inline const struct frontend *frontend_at(__u32 id)
{
	__u32 chunk = id / CHUNK_FRONTENDS, place = id % CHUNK_FRONTENDS;
	void *places = bpf_map_lookup_elem(&sl_frontends, &chunk);

	return places ? bpf_map_lookup_elem(places, &place) : NULL;
}

static __always_inline const struct pool *pool_at(__u32 id)
{
	__u32 chunk = id / CHUNK_POOLS, place = id % CHUNK_POOLS;
	void *places = bpf_map_lookup_elem(&sl_pools, &chunk);

	return places ? bpf_map_lookup_elem(places, &place) : NULL;
}

/*
 * slot_at returns the backend id in a slot, or 0, which is no backend. It is global, so that the
 * verifier walks it once, and not once for each slot that a loop looks at.
 */
__noinline __u32 slot_at(__u32 slot)
{
	__u32 chunk = slot / CHUNK_SLOTS, place = slot % CHUNK_SLOTS;
	void *places = bpf_map_lookup_elem(&sl_slots, &chunk);
	const __u32 *id = places ? bpf_map_lookup_elem(places, &place) : NULL;

	return id ? read_once(id) : 0;
}

/* From a destination to the frontend and the pool that serves it. */

/*
 * How often an element is looked up again because the kernel gave it to another key during the
 * read.
 */
#define MAX_LOOKUPS 4

/* key_equal compares without branches: each branch would be one more path for the verifier. */
static __always_inline bool key_equal(const struct frontend_key *a, const struct frontend_key *b)
{
	return addr_equal(&a->addr, &b->addr) &
	       !((a->port ^ b->port) | (a->proto ^ b->proto) | (a->scope ^ b->scope));
}

/*
 * find_pool copies the pool that the frontend at key leads to. It returns REASON_PASS_NO_FRONTEND
 * if there is no such frontend: the value of an element never changes, so a lookup never misses
 * one that exists. If frontends are deleted and added faster than they can be read, the client is
 * refused, never let through.
 */
static __always_inline enum reason find_pool(const struct frontend_key *key, struct pool *pool)
{
	const struct frontend *fe;
	const struct pool *at;
	const __u32 *id;
	int try;

	for (try = 0; try < MAX_LOOKUPS; try++) {
		id = bpf_map_lookup_elem(&sl_frontend_ids, key);
		if (!id)
			return REASON_PASS_NO_FRONTEND;
		fe = frontend_at(read_once(id));
		if (!fe || !key_equal(&fe->key, key))
			continue;
		at = pool_at(read_once(&fe->pool_id));
		if (!at)
			break;
		*pool = *at;
		barrier(); /* the copy is complete before it is used */
		return REASON_NEXT;
	}
	return REASON_DROP_BACKEND_MISSING;
}

/*
 * find_node_port is find_pool for node ports, which are stored at the unspecified address of their
 * family.
 */
static __always_inline enum reason find_node_port(const struct frontend_key *original_dst,
						  struct pool *pool)
{
	struct frontend_key key = *original_dst;

	key.addr = addr_any(&original_dst->addr);
	return find_pool(&key, pool);
}

/* addr_flags returns the enum addr_flag bits of an address, or 0. */
static __always_inline __u32 addr_flags(const struct addr *a)
{
	const struct addr_use *use = bpf_map_lookup_elem(&sl_addrs, a);

	return use ? use->flags : 0;
}

static __always_inline bool is_cluster_ip(const struct frontend_key *original_dst)
{
	struct frontend_key key = *original_dst;

	key.port = 0;
	key.proto = 0;
	return bpf_map_lookup_elem(&sl_frontend_ids, &key);
}

/*
 * has_right_to_serve reports whether a socket that is bound to a port is root's, or took a right to
 * bind that not every user of the node has: any user could take the clients of a Service else.
 */
static __always_inline bool has_right_to_serve(const struct bpf_sock *sk, __be16 port)
{
	const struct bpf_sock *volatile at = sk;
	const struct sock *full = NULL;

	/* A number that programs may read from: the verifier admits few fields of a struct bpf_sock. */
	bpf_probe_read_kernel(&full, sizeof(full), (const void *)&at);
	return !BPF_CORE_READ(full, sk_uid.val) ||
	       bpf_ntohs(port) <
		       BPF_CORE_READ(full, __sk_common.skc_net.net, ipv4.sysctl_ip_prot_sock);
}

/*
 * is_served_here reports whether a socket of the hook's network namespace is bound to this very
 * address and port, by root or at a privileged port. ctx is that of any hook which can look up
 * sockets.
 */
static __always_inline bool is_served_here(void *ctx, const struct addr *a, __be16 port, __u8 proto)
{
	bool v4 = addr_is_v4(a), bound;
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *sk = NULL;
	struct addr at;
	__u32 size, i;

	if (v4) {
		tuple.ipv4.daddr = a->words[3];
		tuple.ipv4.dport = port;
	} else {
		__builtin_memcpy(tuple.ipv6.daddr, a, sizeof(*a));
		tuple.ipv6.dport = port;
	}
	size = v4 ? sizeof(tuple.ipv4) : sizeof(tuple.ipv6);
	if (proto == IPPROTO_TCP)
		sk = bpf_sk_lookup_tcp(ctx, &tuple, size, BPF_F_CURRENT_NETNS, 0);
	else if (proto == IPPROTO_UDP)
		sk = bpf_sk_lookup_udp(ctx, &tuple, size, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	/* Read in turn: the verifier allows no pointer to a field that is chosen at run time. */
	at = addr_of_v4(*(volatile const __be32 *)&sk->src_ip4);
	for (i = 0; i < 4 && !v4; i++)
		at.words[i] = *(volatile const __be32 *)&sk->src_ip6[i];
	bound = addr_equal(&at, a) && has_right_to_serve(sk, port);
	bpf_sk_release(sk);
	return bound;
}

/* why_no_frontend returns the reason for a client whose destination is no frontend. */
static __always_inline enum reason why_no_frontend(const struct frontend_key *original_dst)
{
	if (is_cluster_ip(original_dst))
		return REASON_REJECT_NO_PORT;
	if (is_service_cidr(&original_dst->addr))
		return REASON_DROP_UNALLOCATED;
	return REASON_PASS_NO_FRONTEND;
}

/* loadBalancerSourceRanges: which clients may connect to a frontend. */

/* is_in_ranges_of reports whether source_ranges lets src connect to the service port. */
static __always_inline bool is_in_ranges_of(__u32 service_port_id, const struct addr *src)
{
	struct source_range_key key = {
		.prefix_len = 32 + 128,
		.service_port_id = service_port_id,
		.addr = *src,
	};

	return bpf_map_lookup_elem(&sl_source_ranges, &key);
}

/* is_in_ranges reports whether source_ranges lets src connect to the frontends of the pool. */
static __always_inline bool is_in_ranges(const struct pool *pool, const struct addr *src)
{
	return is_in_ranges_of(pool->service_port_id, src);
}

#endif
