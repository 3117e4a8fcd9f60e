/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Whether a tuple is in use by a socket of this node, or by netfilter. */
#ifndef SLUICE_TAKEN_H
#define SLUICE_TAKEN_H

#include <linux/netfilter/nf_conntrack_common.h>
#include <linux/netfilter/nf_conntrack_tcp.h>

#include "flow.h"
#include "kernel.h"

/* The kernel has these if config_conntrack is set. */
struct conntrack_options {
	__s32 netns;
	__s32 error;
	__u8 proto;
	__u8 reserved[3];
};

extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *ctx, struct bpf_sock_tuple *tuple,
					 __u32 tuple_size, struct conntrack_options *options,
					 __u32 options_size)
	__attribute__((section(".ksyms"), weak));
extern void bpf_ct_release(struct nf_conn *ct) __attribute__((section(".ksyms"), weak));

/*
 * tuple_of converts a key to the tuple that socket and conntrack lookups take, and returns its
 * size.
 */
static __always_inline __u32 tuple_of(const struct flow_key *key, struct bpf_sock_tuple *tuple)
{
	if (addr_is_v4(&key->src)) {
		tuple->ipv4.saddr = key->src.words[3];
		tuple->ipv4.daddr = key->dst.words[3];
		tuple->ipv4.sport = key->src_port;
		tuple->ipv4.dport = key->dst_port;
		return sizeof(tuple->ipv4);
	}
	__builtin_memcpy(tuple->ipv6.saddr, &key->src, sizeof(key->src));
	__builtin_memcpy(tuple->ipv6.daddr, &key->dst, sizeof(key->dst));
	tuple->ipv6.sport = key->src_port;
	tuple->ipv6.dport = key->dst_port;
	return sizeof(tuple->ipv6);
}

/* has_socket reports whether a socket of this node would receive the packets of a tuple. */
static __always_inline bool has_socket(struct __sk_buff *ctx, struct bpf_sock_tuple *tuple,
				       __u32 size, __u8 proto)
{
	struct bpf_sock *sk = NULL;

	if (proto == IPPROTO_TCP)
		sk = bpf_skc_lookup_tcp(ctx, tuple, size, BPF_F_CURRENT_NETNS, 0);
	else if (proto == IPPROTO_UDP)
		sk = bpf_sk_lookup_udp(ctx, tuple, size, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	bpf_sk_release(sk);
	return true;
}

/*
 * is_tracked reports whether netfilter tracks a connection with packets of a tuple; with
 * only_established, whether that was answered and has not ended.
 */
static __always_inline bool is_tracked(struct __sk_buff *ctx, struct bpf_sock_tuple *tuple,
				       __u32 size, __u8 proto, bool only_established)
{
	struct conntrack_options options = { .netns = BPF_F_CURRENT_NETNS, .proto = proto };
	bool established = true;
	struct nf_conn *ct;

	if (!config_conntrack)
		return false;
	ct = bpf_skb_ct_lookup(ctx, tuple, size, &options, sizeof(options));
	if (!ct)
		return false;
	if (proto == IPPROTO_TCP)
		established = ct->proto.tcp.state == TCP_CONNTRACK_ESTABLISHED;
	else
		established = ct->status & IPS_SEEN_REPLY;
	bpf_ct_release(ct);
	return established || !only_established;
}

/*
 * is_taken reports whether the replies to the flow of the packet, as the entry of this role
 * matches them, could be those of another connection.
 *
 * A masquerade must not use a tuple of a socket of this node, or one that netfilter has assigned.
 * A client that has connected to the backend directly, from the same port, keeps that connection;
 * netfilter also keeps flows that have ended, as connections that are unanswered or closed.
 */
__noinline int is_taken(struct __sk_buff *ctx, __u32 role)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	__u32 size;
	__u8 proto;

	if (!pkt)
		return false;
	comes_as(&pkt->flow, role, &pkt->key);
	proto = pkt->flow.proto;
	if (proto != IPPROTO_TCP && proto != IPPROTO_UDP)
		return false;
	size = tuple_of(&pkt->key, &pkt->tuple);
	if (role == FLOW_FROM_BACKEND && has_socket(ctx, &pkt->tuple, size, proto))
		return true;
	return is_tracked(ctx, &pkt->tuple, size, proto, role == FLOW_TO_CLIENT);
}

#endif
