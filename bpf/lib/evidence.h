/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a SYN at a device shows of a backend that does not answer it. Any host can send one that the backend
 * has to ignore: some of these are known here, and of the others those that come from near each other
 * count as one client.
 */
#ifndef SLUICE_EVIDENCE_H
#define SLUICE_EVIDENCE_H

#include "flow.h"
#include "health.h"
#include "rewrite.h"

/* The most bytes of a TCP header, with some data. */
#define MAX_TCP_HEADER 60

/* A client sends its SYN again no sooner, unless its connection is re-steered. */
#define SEND_AGAIN_NS (200 * MS)

/*
 * client_of returns the client of a flow: see client_at. A client outside of the node may have all addresses
 * of its network, so clients of one network are not told apart by add_evidence.
 */
static __always_inline __u32 client_of(const struct flow *f)
{
	struct addr network = f->client;
	__u32 client = client_at(&f->client);

	if (f->flags & FLOW_BY_PODS)
		return client;
	if (addr_is_v4(&network))
		network.words[3] &= bpf_htonl(0xffffff00);
	else
		network.words[2] = network.words[3] = 0;
	return (client & ~(CLIENT_BITS - 1)) | (client_at(&network) & (CLIENT_BITS - 1));
}

/*
 * is_plain_ip reports whether the IP header of a packet, which no device of the node has made, is one that no host
 * on its way drops: it has no options, its checksum is right, and it may pass this node.
 */
static __always_inline bool is_plain_ip(struct __sk_buff *ctx, const struct headers *ip)
{
	const struct ipv6hdr *v6;
	const struct iphdr *v4;

	if (ip->v6) {
		v6 = peek(ctx, ip->l3, sizeof(*v6));
		return v6 && ip->l4 == ip->l3 + sizeof(*v6) && v6->hop_limit > 1;
	}
	v4 = peek(ctx, ip->l3, sizeof(*v4));
	return v4 && ip->l4 == ip->l3 + sizeof(*v4) && v4->ttl > 1 &&
	       !fold(bpf_csum_diff(NULL, 0, (void *)v4, sizeof(*v4), 0));
}

/*
 * is_intact reports whether the backend would not drop the SYN at a hook, for what can be seen: the checksums
 * and lengths are right, and it has no signature. A SYN with more than a few bytes of data (TCP Fast Open) is not verified, and
 * shows nothing. It is global, so that the verifier walks it once.
 */
__noinline int is_intact(struct __sk_buff *ctx, __u32 hook)
{
	struct packet *pkt = packet_at(hook);
	__u32 pseudo[2] = { 0, bpf_htonl(IPPROTO_TCP) };
	__u32 header;
	__u64 length;
	__s64 sum;

	if (!pkt || pkt->tcp.signs)
		return false;
	if (is_partial(ctx))
		return true;
	if (!is_plain_ip(ctx, &pkt->ip))
		return false;
	length = pkt->ip.end - pkt->ip.l4;
	pseudo[0] = bpf_htonl(length);
	__builtin_memset(pkt->quote, 0, MAX_TCP_HEADER);
	asm volatile(
		""
		: "+r"(length)); /* the bounds below are for the verifier, and of this register */
	if (length < sizeof(struct tcp_header) || length > MAX_TCP_HEADER ||
	    bpf_skb_load_bytes(ctx, pkt->ip.l4, pkt->quote, length))
		return false;
	header = (((const struct tcp_header *)pkt->quote)->length >> 4) * 4;
	if (header < sizeof(struct tcp_header) || header > length)
		return false;
	/* A mapped address adds up to the IPv4 address in it. */
	sum = bpf_csum_diff(NULL, 0, (void *)&pkt->ip.key, 2 * sizeof(struct addr), 0);
	sum = bpf_csum_diff(NULL, 0, pseudo, sizeof(pseudo), sum);
	return !fold(bpf_csum_diff(NULL, 0, pkt->quote, MAX_TCP_HEADER, sum));
}

/* is_attempt reports whether the first packet of pkt->flow is noted. It is looked at closely if that counts. */
static __always_inline bool is_attempt(struct __sk_buff *ctx, const struct packet *pkt)
{
	const struct flow *f = &pkt->flow;

	if (!config_heal || is_foreign(f))
		return false;
	return f->proto != IPPROTO_TCP ||
	       (!pkt->tcp.joins &&
		(!counts_silence(f->backend_id, pkt->now) || is_intact(ctx, pkt->ip.key.hook)));
}

#endif
