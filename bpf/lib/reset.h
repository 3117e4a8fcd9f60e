/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Resets: a packet of no connection becomes the answer of its destination (RFC 9293, 3.5.2; RFC 9260, 8.4). The
 * transport header stays where it is in memory, because a device may have yet to write its checksum.
 */
#ifndef SLUICE_RESET_H
#define SLUICE_RESET_H

#include "rewrite.h"

#define RESET_TTL 64

/*
 * is_answered reports whether a packet of no connection gets an answer: none that resets, or that may answer a
 * reset itself, and no datagram.
 */
static __always_inline bool is_answered(const struct packet *pkt)
{
	__u32 silent = 1U << SCTP_ABORT | 1U << SCTP_ERROR | 1U << SCTP_COOKIE_ACK |
		       1U << SCTP_SHUTDOWN_COMPLETE;
	__u8 chunk = pkt->sctp.chunk;

	if (pkt->is_error || pkt->ip.later || pkt->event == EVENT_RESET)
		return false;
	if (pkt->ip.key.proto == IPPROTO_SCTP)
		return chunk > 31 || !(silent >> chunk & 1);
	return pkt->ip.key.proto == IPPROTO_TCP;
}

/* write_reset_ip writes the IP header of a reset, whose transport header has this length. */
static __always_inline bool write_reset_ip(struct __sk_buff *ctx, const struct headers *ip,
					   __u32 length)
{
	struct iphdr v4 = {
		.version = 4,
		.ihl = 5,
		.tot_len = bpf_htons(sizeof(v4) + length),
		.frag_off = V4_DONT_FRAGMENT,
		.ttl = RESET_TTL,
		.protocol = ip->key.proto,
		.saddr = ip->key.dst.words[3],
		.daddr = ip->key.src.words[3],
	};
	struct ipv6hdr v6 = {
		.version = 6,
		.payload_len = bpf_htons(length),
		.nexthdr = ip->key.proto,
		.hop_limit = RESET_TTL,
	};

	if (ip->v6) {
		__builtin_memcpy(&v6.saddr, &ip->key.dst, sizeof(v6.saddr));
		__builtin_memcpy(&v6.daddr, &ip->key.src, sizeof(v6.daddr));
		return !bpf_skb_store_bytes(ctx, ip->l3, &v6, sizeof(v6), BPF_F_RECOMPUTE_CSUM);
	}
	v4.check = fold(bpf_csum_diff(NULL, 0, (void *)&v4, sizeof(v4), 0));
	return !bpf_skb_store_bytes(ctx, ip->l3, &v4, sizeof(v4), BPF_F_RECOMPUTE_CSUM);
}

/*
 * write_reset_tcp writes an RST: with the number that the segment acknowledges, or else as the acknowledgement of
 * the segment. If partial, the device adds the header to the checksum, which is that of the pseudo header.
 */
static __always_inline bool write_reset_tcp(struct __sk_buff *ctx, struct packet *pkt, bool partial)
{
	struct headers *ip = &pkt->ip;
	const struct segment *had = &pkt->tcp;
	__be32 pseudo[2] = { bpf_htonl(sizeof(struct tcp_header)), bpf_htonl(IPPROTO_TCP) };
	struct tcp_header tcp = {
		.ports = { ip->key.dst_port, ip->key.src_port },
		.seq = had->acks ? bpf_htonl(had->ack) : 0,
		.ack = had->acks ? 0 : bpf_htonl(had->end),
		.length = sizeof(tcp) / 4 << 4,
		.flags = had->acks ? TCP_RST : TCP_RST | TCP_ACK,
	};
	__s64 sum;

	/* A mapped address adds up to the IPv4 address in it. */
	sum = bpf_csum_diff(NULL, 0, (void *)&ip->key, 2 * sizeof(struct addr), 0);
	sum = bpf_csum_diff(NULL, 0, pseudo, sizeof(pseudo), sum);
	tcp.checksum =
		partial ? ~fold(sum) : fold(bpf_csum_diff(NULL, 0, (void *)&tcp, sizeof(tcp), sum));
	return !bpf_skb_store_bytes(ctx, ip->l4, &tcp, sizeof(tcp), BPF_F_RECOMPUTE_CSUM);
}

/*
 * write_reset_sctp writes an ABORT, or for a SHUTDOWN ACK a SHUTDOWN COMPLETE, with the tag of the packet that it
 * answers. If partial, the device computes the checksum.
 */
static __always_inline bool write_reset_sctp(struct __sk_buff *ctx, struct packet *pkt,
					     bool partial)
{
	bool completes = pkt->sctp.chunk == SCTP_SHUTDOWN_ACK;
	struct headers *ip = &pkt->ip;
	struct sctp_start sctp = {
		.ports = { ip->key.dst_port, ip->key.src_port },
		.tag = pkt->sctp.tag,
		.chunk = completes ? SCTP_SHUTDOWN_COMPLETE : SCTP_ABORT,
		.flags = SCTP_REFLECTS,
		.length = bpf_htons(sizeof(sctp) - offsetof(struct sctp_start, chunk)),
	};
	__u32 words[sizeof(sctp) / 4];
	__u32 crc = ~0U, i;

	__builtin_memcpy(words, &sctp, sizeof(words));
	for (i = 0; i < sizeof(words) / sizeof(*words); i++)
		crc = crc_of_word(crc, words[i]);
	sctp.checksum = partial ? 0 : ~crc;
	return !bpf_skb_store_bytes(ctx, ip->l4, &sctp, sizeof(sctp), BPF_F_RECOMPUTE_CSUM);
}

/*
 * make_reset turns the packet at ingress into the answer to it, without options and extension headers, and returns
 * 1, or 0 if it cannot. It is global, so that the verifier walks it once.
 */
__noinline int make_reset(struct __sk_buff *ctx)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	bool tcp, partial = is_partial(ctx);
	struct headers *ip;
	__s32 options;
	__u32 length, l4;

	if (!pkt)
		return false;
	ip = &pkt->ip;
	tcp = ip->key.proto == IPPROTO_TCP;
	length = tcp ? sizeof(struct tcp_header) : sizeof(struct sctp_start);
	l4 = ip->l3 + (ip->v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));
	options = ip->l4 - l4;
	if (bpf_skb_change_tail(ctx, ip->l4 + length, 0))
		return false;
	if (options && bpf_skb_adjust_room(ctx, -options, BPF_ADJ_ROOM_MAC, 0))
		return false;
	ip->l4 = l4;
	return write_reset_ip(ctx, ip, length) &&
	       (tcp ? write_reset_tcp(ctx, pkt, partial) : write_reset_sctp(ctx, pkt, partial)) &&
	       swap_macs(ctx);
}

#endif
