/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet at a device: where its headers are, and what they say. */
#ifndef SLUICE_PACKET_H
#define SLUICE_PACKET_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/icmpv6.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include "../../maps/maps.h"
#include "addr.h"
#include "device_config.h"

#define MAX_VLAN_TAGS 2

/* Where the last header that we read may begin. */
#define MAX_OFFSET 1000

#define MAX_EXTENSIONS 6

/* How much of a packet our errors quote: all headers, and a little more. */
#define MAX_QUOTE 128

#define V4_DONT_FRAGMENT bpf_htons(0x4000)
#define V4_FRAGMENT_OFFSET bpf_htons(0x1fff)
#define V4_MORE_FRAGMENTS bpf_htons(0x2000)
#define V6_FRAGMENT_OFFSET bpf_htons(0xfff8)
#define V6_MORE_FRAGMENTS bpf_htons(0x0001)

#define EXTENSION_AUTH 51

/* linux/icmp.h has these, and half of the C library. */
#define ICMP_DEST_UNREACH 3
#define ICMP_SOURCE_QUENCH 4
#define ICMP_REDIRECT 5
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETERPROB 12
#define ICMP_PORT_UNREACH 3
#define ICMP_FRAG_NEEDED 4

/* The header of an ICMP error, of both families. */
struct icmp_header {
	__u8 type;
	__u8 code;
	__u16 checksum;
	__be32 rest;
};

/* __sk_buff.pkt_type */
#define PACKET_HOST 0
#define PACKET_BROADCAST 1
#define PACKET_MULTICAST 2
#define PACKET_OTHERHOST 3

/* What a packet says about the flow that it is of. */
enum signal {
	SIGNAL_NONE = 0,
	SIGNAL_FIRST = 1, /* opens a flow */
	SIGNAL_FIN = 2, /* nothing will follow */
	SIGNAL_RESET = 3, /* it is over */
	SIGNAL_ACCEPT = 4, /* agrees to open one */
	SIGNAL_DOUBTED = 5, /* nothing, for its numbers or its tag are not those of the flow */
};

/* What the header of TCP says, in host byte order. */
struct segment {
	__u32 seq;
	__u32 end; /* seq of what follows it */
	__u32 ack;
	bool acks; /* ack is one */
	bool syn;
	bool stamped; /* stamp is one; looked for in SYN and FIN only */
	__u8 stamp; /* the first byte of the timestamp */
	__u8 fin; /* what a FIN makes of flow.ending; 0: it is none */
};

/* The tags of a packet of SCTP. */
struct sctp_tags {
	__u32 tag; /* which the other side has asked for, or 0 */
	__u32 asks; /* if it is the first one of its side: what those to it are to bear; 0: it is too short */
	bool reflects; /* if it ends something, the tag is that of what it answers */
};

/* Where the headers of an IP packet are, from the start of the frame, and who sends it to whom. */
struct headers {
	__u32 l3;
	__u32 l4;
	__u32 end; /* of the packet, as the IP header has it */
	__u32 fragment_id;
	__u32 piece; /* where a fragment's part of the datagram begins */
	struct flow_key key;
	__u8 v6;
	__u8 fragment; /* of a datagram in several */
	__u8 later; /* and not the first one: no ports here */
	__u8 more; /* it is not the last one */
	__u16 offset; /* of its part in the datagram */
};

/*
 * A packet on its way through a hook, and what is found out about it. It lies in
 * a map: what the verifier does not know of its fields, it need not tell apart.
 */
struct packet {
	struct headers ip;
	struct headers quoted; /* of the packet that an ICMP error is about */
	struct flow_key came; /* the flow that it is about */
	struct flow_key to; /* what the packet becomes */
	struct flow_key key; /* of the entry at hand */
	struct flow flow; /* the entry at hand */
	struct flow gone; /* a flow that is forgotten */
	struct bpf_sock_tuple tuple; /* that another part of the node may have */
	__be32 quote[MAX_QUOTE / 4]; /* what an error of ours quotes */
	__u64 now;
	struct segment tcp; /* unless it is a later fragment */
	struct sctp_tags sctp; /* as well */
	__u64 ended; /* when the oldest flow was seen that has ended, and holds a tuple that we want; 0: none */
	__be16 ended_port; /* of that tuple, where the replies go */
	__u32 pos; /* what take(ctx) takes next */
	bool evicts; /* gone has to be forgotten */
	__u8 role; /* of the entry at egress: an enum flow_role */
	__u8 flags; /* and its flags */
	bool turns; /* it leaves by the device out, to next, and does not enter the stack */
	__u16 mtu; /* of the way of a packet that is too long for it, and may not be cut; 0: it is not */
	__u32 out;
	struct bpf_redir_neigh next;
	__u8 signal; /* enum signal */
	__u8 icmp_type;
	__u8 is_error; /* an ICMP error */
};

/* One for each hook, and CPU: a program is not interrupted by itself. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, struct packet);
} sl_packet SEC(".maps");

/* packet_at returns the packet that is at a hook of this CPU; it is never NULL. */
static __always_inline struct packet *packet_at(enum hook hook)
{
	__u32 key = hook - HOOK_INGRESS;

	return bpf_map_lookup_elem(&sl_packet, &key);
}

static __always_inline struct packet *new_packet(enum hook hook)
{
	struct packet *pkt = packet_at(hook);

	if (pkt) {
		pkt->ip.key.hook = hook;
		pkt->ip.key.reserved = 0;
		pkt->signal = SIGNAL_NONE;
		pkt->is_error = false;
		pkt->evicts = false;
		pkt->turns = false;
		pkt->mtu = 0;
	}
	return pkt;
}

/* reversed is the tuple of the packets that those of a tuple answer, or are answered by. */
static __always_inline void reversed(const struct flow_key *tuple, struct flow_key *to)
{
	to->src = tuple->dst;
	to->dst = tuple->src;
	to->src_port = tuple->dst_port;
	to->dst_port = tuple->src_port;
	to->proto = tuple->proto;
	to->reserved = 0;
}

/*
 * peek returns the len bytes at an offset from the start of the frame, or NULL if
 * there are none, or so far away that we do not look. A device may have left them
 * where programs cannot read them: then it pulls them, and what was peeked before
 * is void.
 */
static __always_inline void *peek(struct __sk_buff *ctx, __u32 at, __u32 len)
{
	__u64 offset = at;
	void *pos;

	asm volatile(
		""
		: "+r"(offset)); /* the bound below is for the verifier, and of this register */
	if (offset > MAX_OFFSET)
		return NULL;
	pos = (void *)(long)ctx->data + offset;
	if (pos + len <= (void *)(long)ctx->data_end)
		return pos;
	if (bpf_skb_pull_data(ctx, offset + len))
		return NULL;
	pos = (void *)(long)ctx->data + offset;
	return pos + len <= (void *)(long)ctx->data_end ? pos : NULL;
}

/* skip_vlan steps over the tags that are still in the frame, and returns the type of what follows. */
static __always_inline __be16 skip_vlan(struct __sk_buff *ctx, __be16 type, __u32 *at)
{
	const __be16 *tag;
	int i;

	for (i = 0; i < MAX_VLAN_TAGS; i++) {
		if (type != bpf_htons(ETH_P_8021Q) && type != bpf_htons(ETH_P_8021AD))
			break;
		tag = peek(ctx, *at, 2 * sizeof(*tag));
		if (!tag)
			return 0;
		type = tag[1];
		*at += 2 * sizeof(*tag);
	}
	return type;
}

/* Where the IP header of a frame begins, and of which version it is. */
struct network {
	__u32 at;
	bool v6;
};

/* read_ethernet finds the IP header behind the Ethernet header. */
static __always_inline enum reason read_ethernet(struct __sk_buff *ctx, struct network *net)
{
	const struct ethhdr *eth = peek(ctx, 0, sizeof(*eth));
	__be16 type;

	if (!eth)
		return REASON_PASS_BYSTANDER;
	net->at = sizeof(*eth);
	type = skip_vlan(ctx, eth->h_proto, &net->at);
	net->v6 = type == bpf_htons(ETH_P_IPV6);
	return net->v6 || type == bpf_htons(ETH_P_IP) ? REASON_NEXT : REASON_PASS_BYSTANDER;
}

/* read_link finds the IP header. */
static __always_inline enum reason read_link(struct __sk_buff *ctx, struct network *net)
{
	const __u8 *version;

	if (config_ethernet)
		return read_ethernet(ctx, net);
	version = peek(ctx, 0, sizeof(*version));
	if (!version)
		return REASON_PASS_BYSTANDER;
	net->at = 0;
	net->v6 = *version >> 4 == 6;
	return net->v6 || *version >> 4 == 4 ? REASON_NEXT : REASON_PASS_BYSTANDER;
}

/*
 * packet_end is where len bytes end. A frame may go on behind the packet; and
 * one that is to be cut into several has no length, if it is longer than can be
 * said.
 */
static __always_inline __u32 packet_end(struct __sk_buff *ctx, __u32 at, __u32 len)
{
	return len ? at + len : ctx->len;
}

static __always_inline enum reason read_v4(struct __sk_buff *ctx, struct headers *ip)
{
	const struct iphdr *hdr = peek(ctx, ip->l3, sizeof(*hdr));

	if (!hdr || hdr->version != 4 || hdr->ihl < 5)
		return REASON_PASS_MALFORMED;
	ip->l4 = ip->l3 + hdr->ihl * 4;
	ip->end = packet_end(ctx, ip->l3, bpf_ntohs(hdr->tot_len));
	ip->key.src = addr_of_v4(hdr->saddr);
	ip->key.dst = addr_of_v4(hdr->daddr);
	ip->key.proto = hdr->protocol;
	ip->later = !!(hdr->frag_off & V4_FRAGMENT_OFFSET);
	ip->fragment = !!(hdr->frag_off & (V4_FRAGMENT_OFFSET | V4_MORE_FRAGMENTS));
	ip->fragment_id = hdr->id;
	ip->piece = ip->l4;
	ip->more = !!(hdr->frag_off & V4_MORE_FRAGMENTS);
	ip->offset = bpf_ntohs(hdr->frag_off & V4_FRAGMENT_OFFSET) * 8;
	return REASON_NEXT;
}

static __always_inline enum reason read_v6(struct __sk_buff *ctx, struct headers *ip)
{
	const struct ipv6hdr *hdr = peek(ctx, ip->l3, sizeof(*hdr));

	if (!hdr || hdr->version != 6)
		return REASON_PASS_MALFORMED;
	ip->end = packet_end(ctx, ip->l3 + sizeof(*hdr), bpf_ntohs(hdr->payload_len));
	__builtin_memcpy(&ip->key.src, &hdr->saddr, sizeof(ip->key.src));
	__builtin_memcpy(&ip->key.dst, &hdr->daddr, sizeof(ip->key.dst));
	/* No router lets these pass: they would be taken for IPv4. */
	if (addr_is_v4(&ip->key.src) || addr_is_v4(&ip->key.dst))
		return REASON_PASS_BYSTANDER;
	ip->key.proto = hdr->nexthdr;
	ip->later = false;
	ip->fragment = false;
	return REASON_NEXT;
}

/* read_ip reads the IP header at an offset: who sends to whom. */
static __always_inline enum reason read_ip(struct __sk_buff *ctx, struct headers *ip, __u32 at,
					   bool v6)
{
	ip->l3 = at;
	ip->v6 = v6;
	return v6 ? read_v6(ctx, ip) : read_v4(ctx, ip);
}

/* The beginning of an extension header; but for the first two bytes, of that of a fragment. */
struct extension {
	__u8 next;
	__u8 len;
	__be16 offset;
	__be32 id;
};

/*
 * note_v6_fragment takes the fragment header, but for its first two bytes. Behind it, at an
 * offset, is what was cut.
 */
static __always_inline void note_v6_fragment(struct headers *ip, __u32 at, __be16 offset, __be32 id)
{
	ip->later = !!(offset & V6_FRAGMENT_OFFSET);
	ip->fragment = !!(offset & (V6_FRAGMENT_OFFSET | V6_MORE_FRAGMENTS));
	ip->fragment_id = id;
	ip->piece = at;
	ip->more = !!(offset & V6_MORE_FRAGMENTS);
	ip->offset = bpf_ntohs(offset & V6_FRAGMENT_OFFSET);
}

static __always_inline bool is_extension(__u8 proto)
{
	return proto == IPPROTO_HOPOPTS || proto == IPPROTO_ROUTING || proto == IPPROTO_DSTOPTS ||
	       proto == IPPROTO_FRAGMENT || proto == EXTENSION_AUTH;
}

/* skip_extensions goes on to the transport header, through the extension headers of IPv6. */
static __always_inline enum reason skip_extensions(struct __sk_buff *ctx, struct headers *ip)
{
	__u32 at = ip->l3 + sizeof(struct ipv6hdr);
	__u8 proto = ip->key.proto;
	const struct extension *ext;
	int i;

	for (i = 0; i < MAX_EXTENSIONS; i++) {
		if (!is_extension(proto))
			break;
		ext = peek(ctx, at, sizeof(*ext));
		if (!ext)
			return REASON_PASS_MALFORMED;
		if (proto == IPPROTO_FRAGMENT) {
			at += sizeof(*ext);
			note_v6_fragment(ip, at, ext->offset, ext->id);
		} else if (proto == EXTENSION_AUTH) {
			at += (ext->len + 2) * 4;
		} else {
			at += (ext->len + 1) * 8;
		}
		proto = ext->next;
		if (ip->later)
			break;
	}
	ip->key.proto = proto;
	ip->l4 = at;
	return i < MAX_EXTENSIONS ? REASON_NEXT : REASON_PASS_MALFORMED;
}

/* has_ports is true of the protocols that Services have. */
static __always_inline bool has_ports(__u8 proto)
{
	return proto == IPPROTO_TCP || proto == IPPROTO_UDP || proto == IPPROTO_SCTP;
}

/* read_ports reads the ports at l4, of a packet that is there up to end. */
static __always_inline enum reason read_ports(struct __sk_buff *ctx, struct headers *ip, __u32 end)
{
	const __be16 *ports = peek(ctx, ip->l4, 2 * sizeof(*ports));

	if (!ports || ip->l4 + 2 * sizeof(*ports) > end)
		return REASON_PASS_MALFORMED;
	ip->key.src_port = ports[0];
	ip->key.dst_port = ports[1];
	return REASON_NEXT;
}

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

/* The header of TCP, without its options. linux/tcp.h has it in bit fields. */
struct tcp_header {
	__be16 ports[2];
	__be32 seq;
	__be32 ack;
	__u8 length; /* in the upper half, in words */
	__u8 flags;
	__be16 window;
	__be16 checksum;
	__be16 urgent;
};

#define TCP_OPTION_END 0
#define TCP_OPTION_NOP 1
#define TCP_OPTION_STAMP 8
#define MAX_TCP_OPTIONS 12

/*
 * read_stamp looks for the timestamp among the options of the packet at a hook, which go up to
 * end. It is global, so that the verifier looks at it once.
 */
__noinline int read_stamp(struct __sk_buff *ctx, __u32 hook, __u32 end)
{
	struct packet *pkt = packet_at(hook);
	__u32 at, i;

	if (!pkt)
		return 0;
	at = pkt->ip.l4 + sizeof(struct tcp_header);
	for (i = 0; i < MAX_TCP_OPTIONS && at < end; i++) {
		__u8 option[3]; /* kind, length, and the first byte of a timestamp */

		if (bpf_skb_load_bytes(ctx, at, option, sizeof(option)) ||
		    option[0] == TCP_OPTION_END)
			break;
		if (option[0] == TCP_OPTION_STAMP) {
			pkt->tcp.fin |= pkt->tcp.fin ? FLOW_STAMPED : 0;
			pkt->tcp.stamped = true;
			pkt->tcp.stamp = option[2];
			break;
		}
		at += option[0] == TCP_OPTION_NOP ? 1 : option[1];
	}
	return 0;
}

static __always_inline enum reason read_tcp_signal(struct __sk_buff *ctx, struct packet *pkt)
{
	const struct tcp_header *tcp = peek(ctx, pkt->ip.l4, sizeof(*tcp));
	__u32 payload;
	__u8 flags;

	if (!tcp || pkt->ip.l4 + sizeof(*tcp) > pkt->ip.end)
		return REASON_PASS_MALFORMED;
	flags = tcp->flags;
	payload = pkt->ip.l4 + (tcp->length >> 4) * 4;
	pkt->tcp.seq = bpf_ntohl(tcp->seq);
	pkt->tcp.ack = bpf_ntohl(tcp->ack);
	pkt->tcp.acks = flags & TCP_ACK;
	pkt->tcp.syn = flags & TCP_SYN;
	pkt->tcp.end = pkt->tcp.seq + pkt->ip.end - payload + pkt->tcp.syn + (flags & TCP_FIN);
	pkt->tcp.stamped = false;
	pkt->tcp.fin = flags & TCP_FIN ? FLOW_LAST : 0;
	if (flags & (TCP_SYN | TCP_FIN))
		read_stamp(ctx, pkt->ip.key.hook, payload);
	if (flags & TCP_RST)
		pkt->signal = SIGNAL_RESET;
	else if (flags & TCP_FIN)
		pkt->signal = SIGNAL_FIN;
	else if (flags & TCP_SYN && !(flags & TCP_ACK))
		pkt->signal = SIGNAL_FIRST;
	else if (flags & TCP_SYN)
		pkt->signal = SIGNAL_ACCEPT;
	return REASON_NEXT;
}

#define SCTP_INIT 1
#define SCTP_INIT_ACK 2
#define SCTP_ABORT 6
#define SCTP_SHUTDOWN 7
#define SCTP_SHUTDOWN_ACK 8
#define SCTP_SHUTDOWN_COMPLETE 14

#define SCTP_REFLECTS 1 /* flag */
#define SCTP_ASKS 16 /* offset of the tag in SCTP_INIT and SCTP_INIT_ACK */

/* The header of SCTP, and that of its first chunk. */
struct sctp_start {
	__be16 ports[2];
	__be32 tag;
	__be32 checksum;
	__u8 chunk;
	__u8 flags;
	__be16 length;
};

static __always_inline enum reason read_sctp_signal(struct __sk_buff *ctx, struct packet *pkt)
{
	const struct sctp_start *sctp = peek(ctx, pkt->ip.l4, sizeof(*sctp));
	__u8 chunk;

	if (!sctp || pkt->ip.l4 + sizeof(*sctp) > pkt->ip.end)
		return REASON_PASS_MALFORMED;
	chunk = sctp->chunk;
	pkt->sctp.tag = sctp->tag;
	bpf_skb_load_bytes(ctx, pkt->ip.l4 + SCTP_ASKS, &pkt->sctp.asks, sizeof(pkt->sctp.asks));
	pkt->sctp.reflects = sctp->flags & SCTP_REFLECTS;
	if (chunk == SCTP_ABORT)
		pkt->signal = SIGNAL_RESET;
	else if (chunk == SCTP_SHUTDOWN || chunk == SCTP_SHUTDOWN_ACK ||
		 chunk == SCTP_SHUTDOWN_COMPLETE)
		pkt->signal = SIGNAL_FIN;
	else if (chunk == SCTP_INIT)
		pkt->signal = SIGNAL_FIRST;
	else if (chunk == SCTP_INIT_ACK)
		pkt->signal = SIGNAL_ACCEPT;
	return REASON_NEXT;
}

/* read_signal reads what a packet with ports says about its flow. */
static __always_inline enum reason read_signal(struct __sk_buff *ctx, struct packet *pkt)
{
	if (pkt->ip.later)
		return REASON_NEXT;
	if (pkt->ip.key.proto == IPPROTO_TCP)
		return read_tcp_signal(ctx, pkt);
	if (pkt->ip.key.proto == IPPROTO_SCTP)
		return read_sctp_signal(ctx, pkt);
	pkt->signal = SIGNAL_FIRST; /* any datagram may open a flow */
	return REASON_NEXT;
}

#endif
