/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Refusals: a connection that its backend refuses is tried elsewhere before the client knows.
 *
 * The RST becomes an ACK that acknowledges nothing. A client that waits for an answer to its SYN
 * does not accept that (RFC 9293, 3.10.7.3): it sends an RST, by which no flow ends, and waits on.
 * Linux, since 5.6, sends its SYN again two ticks later if it has not done so before, others as they
 * would anyway. That SYN goes to another backend: see resteer.h. If it cannot, the next RST passes.
 *
 * An ICMP error says that the host of the backend cannot be reached. It is dropped, and the SYN is sent again when
 * its timeout ends.
 *
 * A refusal is only hidden if there is another backend that has not refused as well, and for one of
 * REFUSAL_PRICE connections. So a Service that refuses as a whole gets few SYNs more, and its clients
 * their errors.
 */
#ifndef SLUICE_REFUSAL_H
#define SLUICE_REFUSAL_H

#include "icmp_error.h"
#include "resteer.h"
#include "rewrite.h"
#include "tuple.h"

/*
 * owe_refusal makes later connections of a client and its group to a service port pay for a refusal, and is
 * false if they owe too much.
 */
static __always_inline bool owe_refusal(__u32 service_port_id, __u32 client)
{
	__s32 *debt = refusal_debt(service_port_id, client);

	if (!debt || *debt > MAX_REFUSAL_DEBT - REFUSAL_PRICE)
		return false;
	__sync_fetch_and_add(debt, REFUSAL_PRICE);
	return true;
}

/* acknowledge_nothing turns an RST into an ACK of the number before the one that it acknowledges. */
static __always_inline bool acknowledge_nothing(struct __sk_buff *ctx, struct packet *pkt)
{
	__be32 had = bpf_htonl(pkt->tcp.ack);
	const struct tcp_header *tcp = peek(ctx, pkt->ip.l4, sizeof(*tcp));
	__u32 check = checksum_at(&pkt->ip);
	struct {
		__be32 ack;
		__be16 flags; /* and the length of the header */
	} __attribute__((packed)) new;
	__be16 rst;

	if (!tcp)
		return false;
	rst = tcp->length | (__u16)tcp->flags << 8;
	new.ack = bpf_htonl(pkt->tcp.ack - 1);
	new.flags = rst & ~(TCP_RST << 8);
	return !bpf_l4_csum_replace(ctx, check, had, new.ack, sizeof(had)) &&
	       !bpf_l4_csum_replace(ctx, check, rst, new.flags, sizeof(rst)) &&
	       !bpf_skb_store_bytes(ctx, pkt->ip.l4 + offsetof(struct tcp_header, ack), &new,
				    sizeof(new), 0);
}

/*
 * refused_socket returns the state of the socket, of this node or in the pod behind the device at hand,
 * whose SYN the packet that becomes pkt->to refuses, or NULL if there is none that was translated.
 */
static __always_inline struct sock_state *refused_socket(struct __sk_buff *ctx, struct packet *pkt)
{
	struct sock_state *state = NULL;
	__u64 netns = BPF_F_CURRENT_NETNS;
	__u32 ifindex = ctx->ifindex;
	const struct device *dev;
	struct bpf_tcp_sock *tcp;
	struct bpf_sock *sk;
	__u32 size;

	if (!pkt->tcp.acks)
		return NULL;
	if (resteers_sockets()) {
		dev = bpf_map_lookup_elem(&sl_devices, &ifindex);
		if (!dev || !dev->peer_netns)
			return NULL;
		netns = dev->peer_netns - 1;
	}
	size = tuple_of(&pkt->to, &pkt->tuple);
	sk = bpf_sk_lookup_tcp(ctx, &pkt->tuple, size, netns, 0);
	if (!sk)
		return NULL;
	tcp = bpf_tcp_sock(sk);
	/* If the backend is near, the kernel has yet to update snd_nxt. */
	if (tcp && sk->state == BPF_TCP_SYN_SENT && tcp->snd_una == pkt->tcp.ack - 1)
		state = bpf_sk_storage_get(&sl_sock_state, sk, NULL, 0);
	bpf_sk_release(sk);
	return state;
}

/*
 * hide hides the refusal at a hook, an RST or an error, from the client, a hash, if its connection can be tried
 * elsewhere, and returns 1, or 0 if the refusal has to pass. pkt->key has what the client has dialled, as the destination,
 * and pkt->flow the backend that refuses. It is global, so that the verifier walks it once.
 */
__noinline int hide(struct __sk_buff *ctx, __u32 hook, __u32 client)
{
	struct frontend_key original_dst = { .proto = IPPROTO_TCP };
	struct packet *pkt = packet_at(hook);
	const struct flow *f;
	struct pool *pool;

	if (!pkt)
		return 0;
	f = &pkt->flow;
	pool = &pkt->pool;
	original_dst.addr = pkt->key.dst;
	original_dst.port = pkt->key.dst_port;
	original_dst.scope = f->flags & FLOW_BY_PODS ? SCOPE_INTERNAL : SCOPE_EXTERNAL;
	if (!find_pool_of(&original_dst, f->service_port_id, pool) ||
	    pool->flags & POOL_NO_RESTEER ||
	    !instead_of(pool->slot_base, pool->slot_count, f->backend_id, pkt->now) ||
	    !owe_refusal(pool->service_port_id, client) ||
	    !(pkt->is_error || acknowledge_nothing(ctx, pkt)))
		return 0;
	count_hidden_refusal(pool->service_port_id);
	note_refusal(f->backend_id, pool->service_port_id, client,
		     pkt->is_error ? HEALTH_UNREACHABLE : HEALTH_REFUSED, pkt->now);
	return 1;
}

/*
 * hide_from_socket hides the refusal at a hook, which belongs to no flow, from the socket that it would end,
 * if that can be re-steered: see resteer. It returns 1, or 0 if the refusal has to pass. pkt->to is the tuple of the
 * backend's answers. It is global, so that the verifier walks it once.
 */
__noinline int hide_from_socket(struct __sk_buff *ctx, __u32 hook)
{
	struct packet *pkt = packet_at(hook);
	struct sock_state *state;

	if (!pkt)
		return 0;
	pkt->now = bpf_ktime_get_ns();
	state = refused_socket(ctx, pkt);
	reversed(&pkt->to, &pkt->key);
	if (!state || state->refused || state->resteered || state->shows_nothing ||
	    (config_bridge_port && is_beside(ctx, &pkt->key)))
		return 0;
	pkt->key.dst = state->original_dst;
	pkt->key.dst_port = state->original_port;
	pkt->flow = (struct flow){
		.service_port_id = state->service_port_id,
		.backend_id = state->backend_id,
		.flags = FLOW_BY_PODS,
	};
	if (!hide(ctx, hook, state->client))
		return 0;
	state->refused = 1;
	return 1;
}

/*
 * hide_from_client hides the refusal at a hook, which belongs to pkt->flow, from the client, and returns 1,
 * or 0 if it has to pass. It is global, so that the verifier walks it once.
 */
__noinline int hide_from_client(struct __sk_buff *ctx, __u32 hook)
{
	struct packet *pkt = packet_at(hook);
	const struct sock_state *state;
	struct flow *f, *from, *answers;

	if (!pkt)
		return 0;
	f = &pkt->flow;
	from = entry_of(pkt, f, FLOW_FROM_CLIENT);
	answers = entry_of(pkt, f, answers_role(f));
	if (!from || !answers || from->state != FLOW_NEW || from->end != pkt->tcp.ack ||
	    (from->ending | answers->ending) & FLOW_REFUSED)
		return 0;
	pkt->key.dst = f->original_dst;
	pkt->key.dst_port = f->original_port;
	if (f->flags & FLOW_RESTEERED) {
		state = resteers_sockets() || (resteers_own() && is_of_node(f)) ?
				refused_socket(ctx, pkt) :
				NULL;
		if (!state)
			return 0;
		pkt->key.dst = state->original_dst;
		pkt->key.dst_port = state->original_port;
	}
	if (!hide(ctx, hook, client_of(f)))
		return 0;
	answers->ending |= FLOW_REFUSED;
	return 1;
}

/*
 * hides_refusal reports whether the packet of f was the RST that refuses a connection, where it first
 * comes to the flow, and is now hidden from the client.
 */
static __always_inline bool hides_refusal(struct __sk_buff *ctx, struct packet *pkt,
					  const struct flow *f, bool half_open)
{
	if (!config_resteer || !half_open || pkt->event != EVENT_RESET || !pkt->tcp.acks ||
	    f->proto != IPPROTO_TCP || f->state != FLOW_NEW || f->role != answers_role(f) ||
	    is_foreign(f))
		return false;
	pkt->flow = *f;
	return hide_from_client(ctx, pkt->ip.key.hook);
}

/*
 * is_unreachable reports whether an ICMP error says that no way leads to the host of the backend. Other errors, such
 * as those of a firewall, are about the client as well.
 */
static __always_inline bool is_unreachable(struct __sk_buff *ctx, const struct packet *pkt)
{
	const struct icmp_header *icmp = peek(ctx, pkt->ip.l4, sizeof(*icmp));

	if (!icmp)
		return false;
	if (pkt->ip.v6)
		return icmp->type == ICMPV6_DEST_UNREACH &&
		       (icmp->code == ICMPV6_NOROUTE || icmp->code == ICMPV6_ADDR_UNREACH);
	return icmp->type == ICMP_DEST_UNREACH &&
	       (icmp->code == ICMP_NET_UNREACH || icmp->code == ICMP_HOST_UNREACH);
}

/*
 * hide_error is called after find_error_flow, whose outcome is why: it returns 1 if the error at a hook is about the SYN
 * of a connection that can be tried elsewhere, and is to be dropped, or 0 if it has to pass. An error that does not
 * quote the number of the SYN is left to the client. It is global, so that the verifier walks it once.
 */
__noinline int hide_error(struct __sk_buff *ctx, __u32 hook, __u32 why)
{
	struct packet *pkt = packet_at(hook);
	const struct flow *f;
	__be32 seq;

	if (!pkt || pkt->quoted.key.proto != IPPROTO_TCP || !is_unreachable(ctx, pkt) ||
	    bpf_skb_load_bytes(ctx, pkt->quoted.l4 + offsetof(struct tcp_header, seq), &seq,
			       sizeof(seq)))
		return 0;
	pkt->now = bpf_ktime_get_ns();
	pkt->tcp.ack = bpf_ntohl(seq) + 1;
	pkt->tcp.acks = true;
	if (why == REASON_PASS_NO_FLOW) {
		pkt->to = pkt->came;
		return (hook == HOOK_INGRESS ? resteers_own() : resteers_sockets()) &&
		       hide_from_socket(ctx, hook);
	}
	f = &pkt->flow;
	return !why && f->state == FLOW_NEW && f->role == answers_role(f) && !is_foreign(f) &&
	       hide_from_client(ctx, hook);
}

#endif
