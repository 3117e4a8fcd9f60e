//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* An iterator over the connected UDP sockets that were translated, in every network namespace. */
#include <linux/in.h>

#include "../maps/maps.h"
#include "lib/addr.h"
#include "lib/kernel.h"

#define AF_INET 2
#define TCP_ESTABLISHED 1

static __always_inline struct addr addr_of_v6(const struct in6_addr *ip)
{
	return (struct addr){ .words = { ip->s6_addr32[0], ip->s6_addr32[1], ip->s6_addr32[2],
					 ip->s6_addr32[3] } };
}

SEC("iter/bpf_sk_storage_map")
int sluice_socks(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	const struct sock_state *state = ctx->value;
	const struct sock *sk = ctx->sk;
	struct translated_sock out = {};

	if (!sk || !state)
		return 0;
	if (sk->sk_protocol != IPPROTO_UDP || sk->__sk_common.skc_state != TCP_ESTABLISHED)
		return 0;

	out.cookie = sk->__sk_common.skc_cookie.counter;
	out.state = *state;
	out.netns = sk->__sk_common.skc_net.net->ns.inum;
	out.device = sk->__sk_common.skc_bound_dev_if;
	out.family = sk->__sk_common.skc_family;
	out.source_port = bpf_htons(sk->__sk_common.skc_num);
	out.peer_port = sk->__sk_common.skc_dport;
	if (out.family == AF_INET) {
		out.source = addr_of_v4(sk->__sk_common.skc_rcv_saddr);
		out.peer = addr_of_v4(sk->__sk_common.skc_daddr);
	} else {
		out.source = addr_of_v6(&sk->__sk_common.skc_v6_rcv_saddr);
		out.peer = addr_of_v6(&sk->__sk_common.skc_v6_daddr);
	}
	bpf_seq_write(ctx->meta->seq, &out, sizeof(out));
	return 0;
}

char iter_license[] SEC("license") = "Dual BSD/GPL";
