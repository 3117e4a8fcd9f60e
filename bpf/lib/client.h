/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * A socket as a client, by its address: the one that devices and backends see, so that a client is the same
 * for both, and on every node.
 */
#ifndef SLUICE_CLIENT_H
#define SLUICE_CLIENT_H

#include <stdbool.h>

#include "dial.h"
#include "health.h"
#include "netns.h"
#include "sock.h"

/*
 * own_chosen_addr is chosen_addr for an address that the network namespace has. Any socket can be bound to others
 * (IP_FREEBIND), and send nothing from there. That a namespace has an address is known for up to some seconds. The
 * cookie is inverted, so that its hash differs from that of an address which a socket has dialed.
 */
static __always_inline bool own_chosen_addr(struct bpf_sock_addr *ctx, bool v6, struct addr *a)
{
	__u64 h;

	if (!chosen_addr(ctx, v6, a) || addr_is_loopback(a))
		return false;
	if (is_host_netns(ctx))
		return may_be_nodes(addr_hash(a)) && addr_flags(a) & ADDR_NODE;
	h = hash_of_dial(~bpf_get_netns_cookie(ctx), a);
	if (is_known(h))
		return true;
	if (!(find_in_netns(ctx, a) & HAS_ADDRESS))
		return false;
	note_known(h);
	return true;
}

/*
 * client_addr sets a to the address of a socket, of IPv4 or IPv6, before the kernel has chosen one: what the
 * application has bound it to, or else that of the node for the node's own processes, and the first of its network
 * namespace for others. It is false if there is none.
 */
static __always_inline bool client_addr(struct bpf_sock_addr *ctx, bool v6, bool v4, struct addr *a)
{
	if (own_chosen_addr(ctx, v6, a))
		return true;
	return is_host_netns(ctx) ? node_addr(v4, a) : netns_addr(ctx, v4, a);
}

/*
 * The numbers of network namespaces as clients, so that not every socket looks for the address. The upper
 * half of each says whose it is, and that for up to some seconds.
 */
static volatile __u64 clients[1 << KNOWN_BITS];

/* client_number is client_of. */
static __always_inline __u32 client_number(struct bpf_sock_addr *ctx, bool v6, bool v4)
{
	__u64 cookie = bpf_get_netns_cookie(ctx), h, has;
	struct addr a = {};
	__u32 whose, number;

	if (own_chosen_addr(ctx, v6, &a))
		return client_at(&a);
	h = (2 * cookie + v4) * 0x9e3779b97f4a7c15;
	whose = h + (bpf_jiffies64() >> KNOWN_SHIFT);
	has = clients[h >> (64 - KNOWN_BITS)];
	if (has >> 32 == whose)
		return has;
	number = client_addr(ctx, v6, v4, &a) ? client_at(&a) : hash(&cookie, sizeof(cookie));
	clients[h >> (64 - KNOWN_BITS)] = (__u64)whose << 32 | number;
	return number;
}

/* client_number as global functions, which the verifier walks once. */

__noinline __u32 client_of_v4(struct bpf_sock_addr *ctx)
{
	return client_number(ctx, false, true);
}

__noinline __u32 client_of_v6(struct bpf_sock_addr *ctx, int v4)
{
	return client_number(ctx, true, v4);
}

/*
 * client_of returns the number of a socket as a client of what it dials, by its address of that family: see
 * client_at.
 */
static __always_inline __u32 client_of(struct bpf_sock_addr *ctx, bool v6, const struct addr *to)
{
	return v6 ? client_of_v6(ctx, addr_is_v4(to)) : client_of_v4(ctx);
}

/*
 * set_affinity_key sets key to that of a socket as a client. The address is copied by the kernel, so that the
 * verifier follows one way on from here, and not one for each way in which it was found.
 */
static __always_inline void set_affinity_key(struct bpf_sock_addr *ctx, bool v6, bool v4,
					     __u32 service_port_id, struct affinity_key *key)
{
	struct affinity_key found = {
		.service_port_id = service_port_id,
		.client_kind = CLIENT_ADDR,
	};

	if (!client_addr(ctx, v6, v4, &found.addr)) {
		found.client_kind = CLIENT_NETNS;
		found.addr = (struct addr){};
		found.netns_cookie = bpf_get_netns_cookie(ctx);
	}
	bpf_probe_read_kernel(key, sizeof(*key), &found);
}

/* set_affinity_key as functions of their own, for the reasons of is_left_to_others_v4. */

static __noinline void set_affinity_key_v4(struct bpf_sock_addr *ctx, __u32 service_port_id,
					   struct affinity_key *key)
{
	set_affinity_key(ctx, false, true, service_port_id, key);
}

static __noinline void set_affinity_key_v6(struct bpf_sock_addr *ctx, bool v4,
					   __u32 service_port_id, struct affinity_key *key)
{
	set_affinity_key(ctx, true, v4, service_port_id, key);
}

/* affinity_key_of sets key to that of a socket as a client of what it dials. */
static __always_inline void affinity_key_of(struct bpf_sock_addr *ctx, bool v6,
					    const struct addr *to, __u32 service_port_id,
					    struct affinity_key *key)
{
	if (v6)
		set_affinity_key_v6(ctx, addr_is_v4(to), service_port_id, key);
	else
		set_affinity_key_v4(ctx, service_port_id, key);
}

#endif
