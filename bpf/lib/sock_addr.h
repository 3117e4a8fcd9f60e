/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Reading and writing the address that a socket hook is called with. v6 is constant in every
 * caller, because the verifier lets a hook access only the fields of its own family.
 */
#ifndef SLUICE_SOCK_ADDR_H
#define SLUICE_SOCK_ADDR_H

#include <stdbool.h>
#include <linux/bpf.h>

#include "addr.h"

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

#endif
