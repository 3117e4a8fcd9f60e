/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Answers of servers. A client of the node may have an address and port that are a Service's as well: a
 * node port may be in the range of ports from which it asks. The answer is the client's.
 */
#ifndef SLUICE_ANSWER_H
#define SLUICE_ANSWER_H

#include <stdbool.h>
#include <linux/in.h>

#include "netns.h"
#include "service.h"
#include "sock.h"
#include "udp_dial.h"
#include "udp_pin.h"

/* The application has chosen the port of a socket. */
#define SOCK_BINDPORT_LOCK 8

/* asked_key returns the key of the question from a port of the node to a server of the node. */
static __always_inline struct udp_pin_key asked_key(const struct addr *server, __be16 port,
						    __be16 asks_from)
{
	struct udp_pin_key key = udp_pin_key(0, server, port, UDP_PIN_ASKED);

	key.asks_from = asks_from;
	return key;
}

/* has_asked reports whether a socket of the node that does not connect has sent to a server of the node. */
static __always_inline bool has_asked(const struct frontend_key *asker, const struct addr *server,
				      __be16 port)
{
	struct udp_pin_key key = asked_key(server, port, asker->port);
	const struct udp_pin *pin = live_pin(&key, bpf_ktime_get_ns());

	return pin && addr_equal(&pin->addr, &asker->addr);
}

/* is_connected_to reports whether a socket of the hook's network namespace is connected to another. */
static __always_inline bool is_connected_to(struct bpf_sock_addr *ctx,
					    const struct frontend_key *asker,
					    const struct addr *server)
{
	bool v4 = addr_is_v4(&asker->addr), connected;
	__be16 port = bpf_htons(ctx->sk->src_port);
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *sk;

	if (v4) {
		tuple.ipv4.saddr = server->words[3];
		tuple.ipv4.sport = port;
		tuple.ipv4.daddr = asker->addr.words[3];
		tuple.ipv4.dport = asker->port;
	} else {
		__builtin_memcpy(tuple.ipv6.saddr, server, sizeof(*server));
		tuple.ipv6.sport = port;
		__builtin_memcpy(tuple.ipv6.daddr, &asker->addr, sizeof(asker->addr));
		tuple.ipv6.dport = asker->port;
	}
	sk = bpf_sk_lookup_udp(ctx, &tuple, v4 ? sizeof(tuple.ipv4) : sizeof(tuple.ipv6),
			       BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	connected = sk->dst_port;
	bpf_sk_release(sk);
	return connected;
}

/*
 * source_at_hook returns the address from which a socket sends to an address of this node: the one that the
 * socket, or the datagram at the hook of sendto(), names, or else the destination itself.
 */
static __always_inline struct addr source_at_hook(struct bpf_sock_addr *ctx, bool v6, bool connects,
						  const struct addr *to)
{
	struct addr from = {};

	if (connects)
		bound_addr(ctx, v6, &from);
	else if (v6)
		from = (struct addr){ .words = { ctx->msg_src_ip6[0], ctx->msg_src_ip6[1],
						 ctx->msg_src_ip6[2], ctx->msg_src_ip6[3] } };
	else
		from = addr_of_v4(ctx->msg_src_ip4);
	return addr_is_any(&from) ? *to : from;
}

/* is_of_node reports whether a destination is this node, by an address or by loopback. */
static __always_inline bool is_of_node(const struct addr *to)
{
	return addr_is_loopback(to) || (may_be_nodes(addr_hash(to)) && addr_flags(to) & ADDR_NODE);
}

/* has_dialled reports whether the socket has a flow to original_dst. */
static __always_inline bool has_dialled(struct bpf_sock_addr *ctx,
					const struct frontend_key *original_dst)
{
	const struct udp_dials *own = dials_of(ctx);
	__u64 now = bpf_ktime_get_ns();
	struct udp_pin_key send;

	if (!own)
		return false;
	send = udp_pin_key(bpf_get_socket_cookie(ctx), &original_dst->addr, original_dst->port,
			   UDP_PIN_SEND);
	return has_dial(own, original_dst, now) || (own->pinned && live_pin(&send, now));
}

/*
 * may_serve reports whether a socket of a pod has a port that clients may know, and sends to the node by
 * the pod's device.
 */
static __always_inline bool may_serve(struct bpf_sock_addr *ctx, const struct addr *to)
{
	const struct sock *sk = sock_of(ctx);

	return BPF_CORE_READ_BITFIELD_PROBED(sk, sk_userlocks) & SOCK_BINDPORT_LOCK &&
	       !(find_in_netns(ctx, to) & LEADS_PAST_DEVICE);
}

/*
 * why_awaited returns a reason to pass if what a socket sends to an address of this node, which is a
 * Service's, is an answer: a socket of the node is connected to this one, or has sent to it before. One that
 * is only bound waits for any sender, and proves nothing to a Service. The program at a pod's device finds
 * out whether it is the answer of a server in the pod. REASON_NEXT is none.
 */
static __always_inline enum reason why_awaited(struct bpf_sock_addr *ctx, bool v6, bool connects)
{
	struct frontend_key to = frontend_key_of(ctx, v6);
	struct addr from;

	if (!is_of_node(&to.addr) || (!connects && has_dialled(ctx, &to)))
		return REASON_NEXT;
	if (!is_host_netns(ctx))
		return may_serve(ctx, &to.addr) ? REASON_PASS_DISABLED : REASON_NEXT;
	from = source_at_hook(ctx, v6, connects, &to.addr);
	return is_connected_to(ctx, &to, &from) ||
			       has_asked(&to, &from, bpf_htons(ctx->sk->src_port)) ?
		       REASON_PASS_NO_FRONTEND :
		       REASON_NEXT;
}

/* why_awaited as global functions, which the verifier walks once. */

__noinline int why_awaited_connect_v4(struct bpf_sock_addr *ctx)
{
	return why_awaited(ctx, false, true);
}

__noinline int why_awaited_connect_v6(struct bpf_sock_addr *ctx)
{
	return why_awaited(ctx, true, true);
}

__noinline int why_awaited_send_v4(struct bpf_sock_addr *ctx)
{
	return why_awaited(ctx, false, false);
}

__noinline int why_awaited_send_v6(struct bpf_sock_addr *ctx)
{
	return why_awaited(ctx, true, false);
}

/* why_answers is why_awaited for any socket that connects. One without a port has not been asked. */
static __always_inline enum reason why_answers(struct bpf_sock_addr *ctx, bool v6)
{
	if (ctx->protocol != IPPROTO_UDP || !ctx->sk->src_port)
		return REASON_NEXT;
	return v6 ? why_awaited_connect_v6(ctx) : why_awaited_connect_v4(ctx);
}

/*
 * note_question notes that a socket of the node sends to a server of the node, if its own address and port
 * are those of a Service. Of a socket that does not connect, there is no other trace.
 */
static __always_inline void note_question(struct bpf_sock_addr *ctx, bool v6)
{
	struct frontend_key to = frontend_key_of(ctx, v6), source = to;
	struct udp_pin_key key;
	struct udp_pin pin = {};

	if (!is_of_node(&to.addr) || !is_host_netns(ctx))
		return;
	source.addr = source_at_hook(ctx, v6, false, &to.addr);
	source.port = bpf_htons(ctx->sk->src_port);
	pin.addr = source.addr;
	pin.port = source.port;
	if (!bpf_map_lookup_elem(&sl_frontend_ids, &source)) {
		source.addr = addr_any(&pin.addr);
		if (!bpf_map_lookup_elem(&sl_frontend_ids, &source))
			return;
	}
	pin.last_used = bpf_ktime_get_ns();
	key = asked_key(&to.addr, to.port, pin.port);
	bpf_map_update_elem(&sl_udp_pins, &key, &pin, BPF_ANY);
}

/* note_question as global functions, which the verifier walks once. */

__noinline int note_question_v4(struct bpf_sock_addr *ctx)
{
	note_question(ctx, false);
	return 0;
}

__noinline int note_question_v6(struct bpf_sock_addr *ctx)
{
	note_question(ctx, true);
	return 0;
}

#endif
