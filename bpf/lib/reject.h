/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The verdict on a packet; refusing it with an ICMP error, or a reset, that goes back the way it came. */
#ifndef SLUICE_REJECT_H
#define SLUICE_REJECT_H

#include "clock.h"
#include "icmp_error.h"
#include "monitor.h"
#include "reason.h"
#include "reset.h"
#include "route.h"
#include "service.h"

/*
 * The kernel's rate limit of errors to one host (icmp_ratelimit): one per second, a burst of six.
 */
#define CLIENT_TOKEN_NS 1000000000ULL
#define CLIENT_TOKENS 6

#define TOS_ERROR 0xc0 /* internetwork control, as in the kernel's errors */
#define ERROR_TTL 64

/* The headers of an error. */
struct error_v4 {
	struct iphdr ip;
	struct icmp_header icmp;
};

struct error_v6 {
	struct ipv6hdr ip;
	struct icmp_header icmp;
};

/*
 * take_token takes a token of a bucket that gets one each token_ns and holds at most most, and is
 * false if there is none. CPUs that ask at once take no token twice: each adds its own before it looks
 * whether that was there, and gives it back if not. Only that a bucket has rested is written over by
 * several: one that is interrupted between its look and its write gives back what the others have taken, up to all that
 * the bucket holds.
 */
static __always_inline bool take_token(const struct addr *owner, __u64 now, __u64 token_ns,
				       __u64 most)
{
	struct icmp_budget *budget = bpf_map_lookup_elem(&sl_icmp_budgets, owner);
	struct icmp_budget rested = { .full = now };
	__u64 empty = now + most * token_ns;

	if (!budget) {
		bpf_map_update_elem(&sl_icmp_budgets, owner, &rested, BPF_NOEXIST);
		budget = bpf_map_lookup_elem(&sl_icmp_budgets, owner);
	}
	if (!budget)
		return false;
	if (elapsed(now, budget->full))
		*(volatile __u64 *)&budget->full = now;
	if (elapsed(budget->full + token_ns, empty))
		return false;
	__sync_fetch_and_add(&budget->full, token_ns);
	if (!elapsed(*(volatile __u64 *)&budget->full, empty))
		return true;
	__sync_fetch_and_add(&budget->full, -token_ns);
	return false;
}

/*
 * may_answer takes a token of the client, and one of those that all clients share, and is false if there is none:
 * sources can be forged, and the answer goes to the real owner of the address. The bucket of all clients is
 * that of the unspecified address, which no client has. Of the client, a reset takes none: all of its connections
 * may have come from another node at once, and each has to be reset.
 */
static __always_inline bool may_answer(const struct addr *client, __u64 now, bool resets)
{
	const struct addr all = {};

	return (resets || take_token(client, now, CLIENT_TOKEN_NS, CLIENT_TOKENS)) &&
	       (!config_icmp_token_ns ||
		take_token(&all, now, config_icmp_token_ns, config_icmp_tokens));
}

/*
 * is_unicast reports whether errors may be sent to a: not to the unspecified address, a group, or
 * loopback.
 */
static __always_inline bool is_unicast(const struct addr *a)
{
	__u32 v4 = bpf_ntohl(a->words[3]);

	if (addr_is_any(a))
		return false;
	if (!addr_is_v4(a))
		return a->bytes[0] != 0xff;
	return v4 >> 28 < 0xe && v4 >> 24 != 0x7f;
}

/*
 * is_to_one_host reports whether the frame was unicast: a broadcast is never answered with an
 * error.
 */
static __always_inline bool is_to_one_host(struct __sk_buff *ctx)
{
	return ctx->pkt_type != PACKET_BROADCAST && ctx->pkt_type != PACKET_MULTICAST;
}

/*
 * quote_sum adds up the quoted packet. If the device has yet to write the transport checksum, it
 * will write it into the quote; with a checksum of zero before, the whole transport part then adds
 * up to nothing.
 */
static __always_inline bool quote_sum(struct __sk_buff *ctx, struct packet *pkt, __u32 len,
				      __s64 *sum)
{
	__u32 check = checksum_at(&pkt->ip);
	__u16 none = 0;
	__u64 size;

	if (check && is_partial(ctx)) {
		if (bpf_skb_store_bytes(ctx, check, &none, sizeof(none), 0))
			return false;
		len = pkt->ip.l4 - pkt->ip.l3;
	}
	size = len;
	__builtin_memset(pkt->quote, 0, sizeof(pkt->quote));
	asm volatile(
		""
		: "+r"(size)); /* the bounds below are for the verifier, and of this register */
	if (size < sizeof(struct iphdr) || size > MAX_QUOTE ||
	    bpf_skb_load_bytes(ctx, pkt->ip.l3, pkt->quote, size))
		return false;
	*sum = bpf_csum_diff(NULL, 0, pkt->quote, sizeof(pkt->quote), 0);
	return true;
}

/*
 * error_source sets source to the sender of an error: the original destination if it is this node,
 * or else the node's address on the route to the client.
 */
static __always_inline void error_source(struct __sk_buff *ctx, const struct packet *pkt,
					 struct addr *source)
{
	struct route way;

	*source = pkt->ip.key.dst;
	if (addr_flags(&pkt->ip.key.dst) & ADDR_NODE)
		return;
	if (find_route(ctx, source, &pkt->ip.key.src, &way) && !addr_is_any(&way.source))
		*source = way.source;
}

static __always_inline bool write_error_v4(struct __sk_buff *ctx, struct packet *pkt,
					   const struct addr *from, __u32 quoted, __s64 sum)
{
	struct error_v4 hdr = {
		.ip = {
			.version = 4,
			.ihl = 5,
			.tos = TOS_ERROR,
			.tot_len = bpf_htons(sizeof(hdr) + quoted),
			.ttl = ERROR_TTL,
			.protocol = IPPROTO_ICMP,
			.saddr = from->words[3],
			.daddr = pkt->ip.key.src.words[3],
		},
		.icmp = {
			.type = ICMP_DEST_UNREACH,
			.code = pkt->mtu ? ICMP_FRAG_NEEDED : ICMP_PORT_UNREACH,
			.rest = bpf_htonl(pkt->mtu),
		},
	};

	hdr.ip.check = fold(bpf_csum_diff(NULL, 0, (void *)&hdr.ip, sizeof(hdr.ip), 0));
	hdr.icmp.checksum = fold(bpf_csum_diff(NULL, 0, (void *)&hdr.icmp, sizeof(hdr.icmp), sum));
	return !bpf_skb_store_bytes(ctx, pkt->ip.l3, &hdr, sizeof(hdr), 0);
}

static __always_inline bool write_error_v6(struct __sk_buff *ctx, struct packet *pkt,
					   const struct addr *from, __u32 quoted, __s64 sum)
{
	__u16 payload = sizeof(struct icmp_header) + quoted;
	__be32 pseudo[2] = { bpf_htonl(payload), bpf_htonl(IPPROTO_ICMPV6) };
	struct error_v6 hdr = {
		.ip = {
			.version = 6,
			.priority = TOS_ERROR >> 4,
			.payload_len = bpf_htons(payload),
			.nexthdr = IPPROTO_ICMPV6,
			.hop_limit = ERROR_TTL,
		},
		.icmp = {
			.type = pkt->mtu ? ICMPV6_PKT_TOOBIG : ICMPV6_DEST_UNREACH,
			.code = pkt->mtu ? 0 : ICMPV6_PORT_UNREACH,
			.rest = bpf_htonl(pkt->mtu),
		},
	};

	__builtin_memcpy(&hdr.ip.saddr, from, sizeof(hdr.ip.saddr));
	__builtin_memcpy(&hdr.ip.daddr, &pkt->ip.key.src, sizeof(hdr.ip.daddr));
	sum = bpf_csum_diff(NULL, 0, (void *)&hdr.ip.saddr, 2 * sizeof(hdr.ip.saddr), sum);
	sum = bpf_csum_diff(NULL, 0, pseudo, sizeof(pseudo), sum);
	hdr.icmp.checksum = fold(bpf_csum_diff(NULL, 0, (void *)&hdr.icmp, sizeof(hdr.icmp), sum));
	return !bpf_skb_store_bytes(ctx, pkt->ip.l3, &hdr, sizeof(hdr), 0);
}

/* make_error turns the packet into the error about it. */
static __always_inline bool make_error(struct __sk_buff *ctx, struct packet *pkt,
				       const struct addr *from)
{
	__u32 room = pkt->ip.v6 ? sizeof(struct error_v6) : sizeof(struct error_v4);
	__u32 quoted = pkt->ip.end - pkt->ip.l3;
	__s64 sum;

	if (quoted > MAX_QUOTE)
		quoted = MAX_QUOTE;
	if (bpf_skb_change_tail(ctx, pkt->ip.l3 + quoted, 0) || !quote_sum(ctx, pkt, quoted, &sum))
		return false;
	if (bpf_skb_adjust_room(ctx, room, BPF_ADJ_ROOM_MAC, 0) || !swap_macs(ctx))
		return false;
	return pkt->ip.v6 ? write_error_v6(ctx, pkt, from, quoted, sum) :
			    write_error_v4(ctx, pkt, from, quoted, sum);
}

/*
 * refuse turns the packet into a reset, if it is of no flow, or else into an error to its sender: that
 * it is too big, if pkt->mtu is set. It returns why, or REASON_REJECT_LIMITED if the packet is to be
 * dropped silently. Like the kernel, it does not limit the rate of errors about packets that are too
 * big. It is for ingress, or for the copy there of what leaves, and global, so that the verifier walks it once.
 */
__noinline int refuse(struct __sk_buff *ctx, int why)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	bool resets = why == REASON_REJECT_NO_FLOW;
	const struct addr *client;
	struct addr from;

	if (!pkt)
		return REASON_REJECT_LIMITED;
	client = &pkt->ip.key.src;
	if (pkt->ip.later || !is_to_one_host(ctx) || !is_unicast(client) ||
	    (!pkt->mtu && !may_answer(client, pkt->now, resets)))
		return REASON_REJECT_LIMITED;
	if (resets)
		return make_reset(ctx) ? why : REASON_DROP_REWRITE;
	error_source(ctx, pkt, &from);
	return make_error(ctx, pkt, &from) ? why : REASON_DROP_REWRITE;
}

/* pass counts the reason for a packet that is not looked at any further, and lets it go on. */
static __always_inline int pass(enum reason why)
{
	count(why);
	return VERDICT_NEXT;
}

/*
 * report reports a new flow or a refusal to `sluice monitor`. It is global, so that the verifier walks
 * it once.
 */
__noinline int report(struct __sk_buff *ctx, __u32 hook, __u32 why)
{
	struct packet *pkt = packet_at(hook);
	__u64 now = bpf_ktime_get_ns();
	bool refused = is_refusal(why);
	const struct flow_key *came;
	struct monitor_event e = {};

	if (!pkt || !is_wanted(why, now))
		return 0;
	if (!refused && !pkt->service_port_id)
		return 0; /* a direct connection: see open_beside */
	came = &pkt->ip.key;
	e.time = now;
	e.client = came->src;
	e.original_dst = came->dst;
	e.client_port = came->src_port;
	e.original_port = came->dst_port;
	e.service_port_id = pkt->service_port_id;
	e.backend_id = refused ? 0 : pkt->flow.backend_id;
	e.ifindex = ctx->ifindex;
	e.kind = refused ? MONITOR_REFUSED : MONITOR_TRANSLATED;
	e.reason = why;
	e.proto = came->proto;
	e.place = hook;
	publish(&e);
	return 0;
}

/* finish reports and counts the reason, and returns the verdict for it. */
static __always_inline int finish(struct __sk_buff *ctx, enum hook hook, enum reason why,
				  bool refused)
{
	if (is_refusal(why) || (why == REASON_TRANSLATED && is_listening()))
		report(ctx, hook, why);
	if (refused)
		why = refuse(ctx, why);
	count(why);
	if (is_drop(why))
		return VERDICT_DROP;
	/* The packet of a process of this node was about to leave: the error goes back to the stack. */
	return refused ? bpf_redirect(ctx->ifindex, hook == HOOK_EGRESS ? BPF_F_INGRESS : 0) :
			 VERDICT_NEXT;
}

#endif
