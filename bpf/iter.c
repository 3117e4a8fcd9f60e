//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Iterators over the sockets that were translated, in every network namespace. */
#include <stdbool.h>
#include <linux/in.h>
#include <bpf/bpf_core_read.h>

#include "../maps/maps.h"
#include "lib/addr.h"
#include "lib/kernel.h"

#define AF_INET 2
#define TCP_ESTABLISHED 1
#define TCP_CLOSE 7

static __always_inline struct addr addr_of_v6(const struct in6_addr *ip)
{
	return (struct addr){ .words = { ip->s6_addr32[0], ip->s6_addr32[1], ip->s6_addr32[2],
					 ip->s6_addr32[3] } };
}

/* describe returns the addresses and the state of a socket. */
static __always_inline struct translated_sock describe(const struct sock *sk)
{
	struct translated_sock out = {
		.cookie = sk->__sk_common.skc_cookie.counter,
		.netns = sk->__sk_common.skc_net.net->ns.inum,
		.device = sk->__sk_common.skc_bound_dev_if,
		.family = sk->__sk_common.skc_family,
		.source_port = bpf_htons(sk->__sk_common.skc_num),
		.peer_port = sk->__sk_common.skc_dport,
		.proto = sk->sk_protocol,
		.tcp_state = sk->__sk_common.skc_state,
	};

	if (out.family == AF_INET) {
		out.source = addr_of_v4(sk->__sk_common.skc_rcv_saddr);
		out.peer = addr_of_v4(sk->__sk_common.skc_daddr);
	} else {
		out.source = addr_of_v6(&sk->__sk_common.skc_v6_rcv_saddr);
		out.peer = addr_of_v6(&sk->__sk_common.skc_v6_daddr);
	}
	return out;
}

/*
 * cgroup_of returns the id of the cgroup that a socket belongs to, or 0 if the kernel does not know
 * it: before Linux 5.16 not once a socket has a class or priority of a cgroup of version 1.
 */
static __always_inline __u64 cgroup_of(const struct sock *sk)
{
	const struct sock_cgroup_data___val *old = (void *)&sk->sk_cgrp_data;
	const struct cgroup *cg;

	if (bpf_core_field_exists(sk->sk_cgrp_data.cgroup)) {
		cg = BPF_CORE_READ(sk, sk_cgrp_data.cgroup);
	} else {
		__u64 val = BPF_CORE_READ(old, val);

		cg = val & 3 ? NULL : (const struct cgroup *)val;
	}
	return cg ? BPF_CORE_READ(cg, kn, id) : 0;
}

/* add_owner adds what leads to the process and the pod of a socket. */
static __always_inline void add_owner(struct translated_sock *out, const struct sock *sk)
{
	out->inode = BPF_CORE_READ(sk, sk_socket, file, f_inode, i_ino);
	out->cgroup = cgroup_of(sk);
}

static __always_inline void add_tcp(struct translated_sock *out, const struct sock *sk)
{
	const struct tcp_sock *tcp = (const struct tcp_sock *)sk;

	out->bytes_sent = BPF_CORE_READ(tcp, bytes_sent) - BPF_CORE_READ(tcp, bytes_retrans);
	out->bytes_received = BPF_CORE_READ(tcp, bytes_received);
	out->retransmits = BPF_CORE_READ(tcp, total_retrans);
	out->rtt = BPF_CORE_READ(tcp, srtt_us) >> 3;
}

static __always_inline bool is_connected_udp(const struct sock *sk)
{
	return sk->sk_protocol == IPPROTO_UDP && sk->__sk_common.skc_state == TCP_ESTABLISHED;
}

/* The connected UDP sockets, by sock_state: those that may have to be destroyed. */
SEC("iter/bpf_sk_storage_map")
int sluice_socks(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	const struct sock_state *state = ctx->value;
	const struct sock *sk = ctx->sk;
	struct translated_sock out;

	if (!sk || !state || !is_connected_udp(sk))
		return 0;

	out = describe(sk);
	out.state = *state;
	bpf_seq_write(ctx->meta->seq, &out, sizeof(out));
	return 0;
}

/* The connected sockets, by sock_state, with all that an operator asks about them. */
SEC("iter/bpf_sk_storage_map")
int sluice_connected(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	const struct sock_state *state = ctx->value;
	const struct sock *sk = ctx->sk;
	struct translated_sock out;
	bool is_tcp;

	if (!sk || !state)
		return 0;
	is_tcp = sk->sk_protocol == IPPROTO_TCP && sk->__sk_common.skc_state != TCP_CLOSE;
	if (!is_tcp && !is_connected_udp(sk))
		return 0;

	out = describe(sk);
	out.state = *state;
	add_owner(&out, sk);
	if (is_tcp)
		add_tcp(&out, sk);
	bpf_seq_write(ctx->meta->seq, &out, sizeof(out));
	return 0;
}

/* The destinations of UDP sockets that send without connecting, by udp_dials. */
SEC("iter/bpf_sk_storage_map")
int sluice_dials(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	const struct udp_dials *own = ctx->value;
	const struct sock *sk = ctx->sk;
	struct translated_sock out;
	int i;

	if (!sk || !own)
		return 0;

	out = describe(sk);
	out.pinned = own->pinned;
	add_owner(&out, sk);
	for (i = 0; i < UDP_DIALS; i++) {
		const struct udp_dial *dial = &own->dials[i];

		if (!dial->backend_id)
			continue;
		out.state.original_dst = dial->original_dst;
		out.state.backend = dial->backend;
		out.state.original_port = dial->original_port;
		out.state.backend_port = dial->backend_port;
		out.state.service_port_id = dial->service_port_id;
		out.state.backend_id = dial->backend_id;
		out.last_used = dial->last_used;
		bpf_seq_write(ctx->meta->seq, &out, sizeof(out));
	}
	return 0;
}

char iter_license[] SEC("license") = "Dual BSD/GPL";
