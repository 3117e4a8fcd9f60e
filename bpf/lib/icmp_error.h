/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * ICMP errors about flows. An error quotes a packet of the other direction: where packets a -> b
 * become a' -> b', errors about b -> a become errors about b' -> a'.
 */
#ifndef SLUICE_ICMP_ERROR_H
#define SLUICE_ICMP_ERROR_H

#include "flow.h"
#include "rewrite.h"
#include "route.h"

#define ICMP_CHECKSUM 2 /* offset, in both families */

/* A redirect of IPv6 quotes the packet in an option, perhaps behind another one. */
#define NDISC_REDIRECT 137
#define NDISC_OPTIONS 40 /* offset from the ICMP header */
#define NDISC_LINK_ADDR 2
#define NDISC_QUOTE 4
#define NDISC_QUOTE_HEADER 8

/*
 * is_redirect reports whether a type is a redirect. In IPv6 it is no error, but quotes a packet as
 * well.
 */
static __always_inline bool is_redirect(__u8 type, bool v6)
{
	return type == (v6 ? NDISC_REDIRECT : ICMP_REDIRECT);
}

static __always_inline bool is_error_type(__u8 type, bool v6)
{
	if (is_redirect(type, v6))
		return true;
	if (v6)
		return type == ICMPV6_DEST_UNREACH || type == ICMPV6_PKT_TOOBIG ||
		       type == ICMPV6_TIME_EXCEED || type == ICMPV6_PARAMPROB;
	return type == ICMP_DEST_UNREACH || type == ICMP_SOURCE_QUENCH ||
	       type == ICMP_TIME_EXCEEDED || type == ICMP_PARAMETERPROB;
}

/* read_icmp finds out whether the packet is an error. */
static __always_inline enum reason read_icmp(struct __sk_buff *ctx, struct packet *pkt)
{
	const __u8 *type;

	if (pkt->ip.later)
		return REASON_PASS_FRAGMENT;
	type = peek(ctx, pkt->ip.l4, sizeof(*type));
	if (!type)
		return REASON_PASS_MALFORMED;
	pkt->icmp_type = *type;
	pkt->ip.key.src_port = 0;
	pkt->ip.key.dst_port = 0;
	pkt->is_error = is_error_type(pkt->icmp_type, pkt->ip.v6);
	return REASON_NEXT;
}

/* find_quoted finds the packet that an error quotes. */
static __always_inline bool find_quoted(struct __sk_buff *ctx, const struct packet *pkt, __u32 *at)
{
	const __u8 *option;

	*at = pkt->ip.l4 + sizeof(struct icmp_header);
	if (!pkt->ip.v6 || pkt->icmp_type != NDISC_REDIRECT)
		return true;
	*at = pkt->ip.l4 + NDISC_OPTIONS;
	option = peek(ctx, *at, 2);
	if (option && option[0] == NDISC_LINK_ADDR) {
		*at += option[1] * 8;
		option = peek(ctx, *at, 2);
	}
	if (!option || option[0] != NDISC_QUOTE)
		return false;
	*at += NDISC_QUOTE_HEADER;
	return true;
}

/* read_quoted reads the headers of the packet that an error quotes. */
static __always_inline enum reason read_quoted(struct __sk_buff *ctx, struct packet *pkt,
					       struct headers *quoted)
{
	enum reason why;
	__u32 at;

	if (!find_quoted(ctx, pkt, &at))
		return REASON_PASS_NO_FLOW;
	why = read_ip(ctx, quoted, at, pkt->ip.v6);
	if (!why && quoted->v6)
		why = skip_extensions(ctx, quoted);
	if (why)
		return why;
	if (quoted->l4 > pkt->ip.end)
		return REASON_PASS_MALFORMED;
	if (!has_ports(quoted->key.proto) || quoted->later)
		return REASON_PASS_NO_FLOW;
	return read_ports(ctx, quoted, pkt->ip.end);
}

/* quote_store writes into the quoted packet, and updates the checksum of the error. */
static __always_inline bool quote_store(struct __sk_buff *ctx, struct packet *pkt, __u32 at,
					void *old, void *new, __u32 size)
{
	__s64 diff = bpf_csum_diff(old, size, new, size, 0);

	return !bpf_skb_store_bytes(ctx, at, new, size, 0) &&
	       !bpf_l4_csum_replace(ctx, pkt->ip.l4 + ICMP_CHECKSUM, 0, diff, 0);
}

/*
 * quote_checksum changes a checksum inside the quoted packet by diff. A checksum beyond the end of
 * the quote, and a zero UDP checksum, are left alone.
 */
static __always_inline bool quote_checksum(struct __sk_buff *ctx, struct packet *pkt, __u32 at,
					   __s64 diff, bool udp)
{
	__u32 old = 0, new = 0; /* 16 bits, but bpf_csum_diff takes multiples of 32 */
	__u16 check;

	if (at + sizeof(check) > pkt->ip.end ||
	    bpf_skb_load_bytes(ctx, at, &check, sizeof(check)) || (udp && !check))
		return true;
	old = check;
	new = fold((__u64)(__u16)~check + ((__u64)diff & 0xffffffff));
	if (udp && !new)
		new = 0xffff;
	diff = bpf_csum_diff(&old, sizeof(old), &new, sizeof(new), 0);
	check = new;
	return !bpf_skb_store_bytes(ctx, at, &check, sizeof(check), 0) &&
	       !bpf_l4_csum_replace(ctx, pkt->ip.l4 + ICMP_CHECKSUM, 0, diff, 0);
}

/* rewrite_quoted_addrs writes the addresses, and the IP checksum over them. */
static __always_inline bool rewrite_quoted_addrs(struct __sk_buff *ctx, struct packet *pkt,
						 const struct headers *quoted,
						 const struct flow_key *to, __s64 diff)
{
	__be32 old[2] = { quoted->key.src.words[3], quoted->key.dst.words[3] };
	__be32 new[2] = { to->src.words[3], to->dst.words[3] };

	if (quoted->v6)
		return quote_store(ctx, pkt, quoted->l3 + offsetof(struct ipv6hdr, saddr),
				   (void *)&quoted->key, (void *)to, 2 * sizeof(struct addr));
	return quote_store(ctx, pkt, quoted->l3 + offsetof(struct iphdr, saddr), old, new,
			   sizeof(new)) &&
	       quote_checksum(ctx, pkt, quoted->l3 + offsetof(struct iphdr, check), diff, false);
}

/* rewrite_quoted gives the quoted packet the tuple to. */
static __always_inline bool rewrite_quoted(struct __sk_buff *ctx, struct packet *pkt,
					   const struct headers *quoted, const struct flow_key *to)
{
	__u32 from = ports_of(&quoted->key), ports = ports_of(to);
	__s64 diff = addrs_diff(&quoted->key, to);
	__u32 check = checksum_at(quoted);

	if (!rewrite_quoted_addrs(ctx, pkt, quoted, to, diff))
		return false;
	if (check) {
		diff = bpf_csum_diff(&from, sizeof(from), &ports, sizeof(ports), diff);
		if (!quote_checksum(ctx, pkt, check, diff, quoted->key.proto == IPPROTO_UDP))
			return false;
	}
	return from == ports || quote_store(ctx, pkt, quoted->l4, &from, &ports, sizeof(ports));
}

/*
 * find_error_flow finds the flow that an ICMP error is about, and copies it to pkt->flow. In any case, it sets
 * pkt->came to the tuple of that flow, as far as the error tells. It is global, as begin_flow is.
 */
__noinline int find_error_flow(struct __sk_buff *ctx, __u32 hook)
{
	struct packet *pkt = packet_at(hook);
	const struct flow *f;
	enum reason why;
	bool half_open;

	if (!pkt)
		return REASON_PASS_OTHER_TRAFFIC;
	pkt->came = pkt->ip.key;
	why = read_quoted(ctx, pkt, &pkt->quoted);
	if (why)
		return why;
	if (!addr_equal(&pkt->quoted.key.src, &pkt->ip.key.dst))
		return REASON_PASS_NO_FLOW; /* the receiver of the error did not send the quoted packet */
	reversed(&pkt->quoted.key, &pkt->came);
	pkt->came.hook = pkt->ip.key.hook;
	f = find_flow(pkt, &pkt->came, &half_open);
	if (!f)
		return REASON_PASS_NO_FLOW;
	pkt->flow = *f;
	if (is_stray(f) && !is_client_here(ctx, hook))
		return REASON_PASS_NO_FLOW;
	if (is_redirect(pkt->icmp_type, pkt->ip.v6))
		return REASON_DROP_REDIRECT;
	if (f->state == FLOW_ABANDONED)
		return REASON_DROP_ABANDONED; /* another backend has the connection */
	return REASON_NEXT;
}

/*
 * rewrite_error translates an error about the packets that arrive at a hook as pkt->came and leave
 * it as pkt->to. Its own addresses change only where they are those of the flow: a router on the
 * path keeps its address. It is global, so that the verifier walks it once.
 */
__noinline int rewrite_error(struct __sk_buff *ctx, __u32 hook)
{
	struct packet *pkt = packet_at(hook);
	const struct flow_key *came, *goes;

	if (!pkt)
		return REASON_DROP_REWRITE;
	came = &pkt->came;
	goes = &pkt->to;
	reversed(goes, &pkt->key);
	if (!rewrite_quoted(ctx, pkt, &pkt->quoted, &pkt->key))
		return REASON_DROP_REWRITE;
	pkt->key = pkt->ip.key;
	if (addr_equal(&pkt->key.src, &came->src))
		pkt->key.src = goes->src;
	if (addr_equal(&pkt->key.dst, &came->dst))
		pkt->key.dst = goes->dst;
	return rewrite_addrs(ctx, pkt, &pkt->key) ? REASON_FLOW_ERROR : REASON_DROP_REWRITE;
}

#endif
