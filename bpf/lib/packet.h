/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet at a device: where its headers are, and what they contain. */
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

/* The largest offset at which a header is read. */
#define MAX_OFFSET 1000

#define MAX_EXTENSIONS 6

/* How much of a packet an error quotes: all headers, and a little more. */
#define MAX_QUOTE 128

#define V4_DONT_FRAGMENT bpf_htons(0x4000)
#define V4_FRAGMENT_OFFSET bpf_htons(0x1fff)
#define V4_MORE_FRAGMENTS bpf_htons(0x2000)
#define V6_FRAGMENT_OFFSET bpf_htons(0xfff8)
#define V6_MORE_FRAGMENTS bpf_htons(0x0001)

#define EXTENSION_AUTH 51

/* From linux/icmp.h, which would include half of the C library. */
#define ICMP_DEST_UNREACH 3
#define ICMP_SOURCE_QUENCH 4
#define ICMP_REDIRECT 5
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETERPROB 12
#define ICMP_PORT_UNREACH 3
#define ICMP_FRAG_NEEDED 4

/* The header of an ICMP error, in both families. */
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

/* What a packet means for the connection of its flow. */
enum event {
	EVENT_NONE = 0,
	EVENT_OPEN = 1, /* opens a flow: a SYN, an INIT, or any datagram */
	EVENT_FIN = 2, /* its side closes the connection */
	EVENT_RESET = 3, /* it aborts the connection */
	EVENT_ACCEPT = 4, /* the answer to EVENT_OPEN: a SYN-ACK or an INIT-ACK */
	EVENT_INVALID = 5, /* its numbers or its tag do not fit the flow: it changes nothing */
};

/* The header of a TCP segment, in host byte order. */
struct segment {
	__u32 seq;
	__u32 end; /* the seq of the segment after it */
	__u32 ack;
	bool acks; /* ack is valid */
	bool syn;
	bool stamped; /* stamp is valid; only read from SYN and FIN */
	__u8 stamp; /* the first byte of the timestamp */
	__u8 fin; /* the bits of flow.ending that a FIN sets; 0: no FIN */
};

/* The tags of an SCTP packet. */
struct sctp_tags {
	__u32 tag; /* which its receiver has asked for, or 0 */
	__u32 asks; /* in the first packet of a side: the tag of packets to that side; 0: the packet is too short */
	bool reflects; /* if it ends the association, its tag is that of the packet that it answers */
};

/* Where the headers of an IP packet are, in bytes from the start of the frame, and its tuple. */
struct headers {
	__u32 l3;
	__u32 l4;
	__u32 end; /* of the packet, by its IP header */
	__u32 fragment_id;
	__u32 piece; /* where a fragment's part of the datagram begins */
	struct flow_key key;
	__u8 v6;
	__u8 fragment; /* part of a fragmented datagram */
	__u8 later; /* a fragment other than the first: it has no ports */
	__u8 more; /* a fragment other than the last */
	__u16 offset; /* of a fragment in the datagram */
};

/*
 * A packet on its way through a hook, with all that is known about it. It lies in a map because
 * the verifier does not track the values of map memory, so it does not walk the same code again
 * for each of them.
 */
struct packet {
	struct headers ip;
	struct headers quoted; /* of the packet that an ICMP error quotes */
	struct flow_key came; /* the tuple of the flow that an ICMP error is about */
	struct flow_key to; /* the tuple that the packet gets */
	struct flow_key key; /* scratch: the tuple of an entry */
	struct flow flow; /* the flow that is opened or put back */
	struct flow gone; /* the flow that is deleted */
	struct bpf_sock_tuple tuple; /* scratch for socket and conntrack lookups */
	__be32 quote[MAX_QUOTE / 4]; /* what a generated error quotes */
	__u64 now;
	struct segment tcp; /* not set for a later fragment */
	struct sctp_tags sctp; /* the same */
	__u64 ended; /* last_seen of the oldest ended flow that holds a wanted tuple; 0: none */
	__be16 ended_port; /* the port of that tuple */
	__u32 pos; /* the offset of the next header */
	bool evicts; /* gone has to be deleted */
	__u8 role; /* of the entry at egress: enum flow_role */
	__u8 flags; /* and its flags */
	bool turns; /* it is turned around: it leaves by the device out, to next */
	__u16 mtu; /* of the route, if the packet is too long for it and must not be fragmented; else 0 */
	__u32 out;
	struct bpf_redir_neigh next;
	__u8 event; /* enum event */
	__u8 icmp_type;
	__u8 is_error; /* an ICMP error */
};

/* One for each hook and CPU: no program is interrupted by another run of itself. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, struct packet);
} sl_packet SEC(".maps");

/* packet_at returns the packet at a hook on this CPU; it is never NULL. */
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
		pkt->event = EVENT_NONE;
		pkt->is_error = false;
		pkt->evicts = false;
		pkt->turns = false;
		pkt->mtu = 0;
	}
	return pkt;
}

/* reversed sets to to the tuple of the packets of the other direction. */
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
 * peek returns the len bytes at an offset from the start of the frame, or NULL if the frame is
 * shorter or the offset too large. Bytes outside of the linear part are pulled into it, which
 * invalidates pointers from earlier calls.
 */
static __always_inline void *peek(struct __sk_buff *ctx, __u32 at, __u32 len)
{
	__u64 offset = at;
	void *pos;

	asm volatile("" : "+r"(offset)); /* the verifier needs the bound on this very register */
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

/* skip_vlan skips the VLAN tags inside the frame, and returns the type of what follows. */
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

/* Where the IP header of a frame begins, and its version. */
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
		return REASON_PASS_OTHER_TRAFFIC;
	net->at = sizeof(*eth);
	type = skip_vlan(ctx, eth->h_proto, &net->at);
	net->v6 = type == bpf_htons(ETH_P_IPV6);
	return net->v6 || type == bpf_htons(ETH_P_IP) ? REASON_NEXT : REASON_PASS_OTHER_TRAFFIC;
}

/* read_link finds the IP header. */
static __always_inline enum reason read_link(struct __sk_buff *ctx, struct network *net)
{
	const __u8 *version;

	if (config_ethernet)
		return read_ethernet(ctx, net);
	version = peek(ctx, 0, sizeof(*version));
	if (!version)
		return REASON_PASS_OTHER_TRAFFIC;
	net->at = 0;
	net->v6 = *version >> 4 == 6;
	return net->v6 || *version >> 4 == 4 ? REASON_NEXT : REASON_PASS_OTHER_TRAFFIC;
}

/*
 * packet_end returns where len bytes from at end. The frame may be longer than the packet. A
 * length of 0 is that of a GSO packet which is too long for the length field.
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
	/* Mapped addresses are never on the wire, and would be treated as IPv4. */
	if (addr_is_v4(&ip->key.src) || addr_is_v4(&ip->key.dst))
		return REASON_PASS_OTHER_TRAFFIC;
	ip->key.proto = hdr->nexthdr;
	ip->later = false;
	ip->fragment = false;
	return REASON_NEXT;
}

/* read_ip reads the IP header at an offset, up to the transport protocol of IPv4. */
static __always_inline enum reason read_ip(struct __sk_buff *ctx, struct headers *ip, __u32 at,
					   bool v6)
{
	ip->l3 = at;
	ip->v6 = v6;
	return v6 ? read_v6(ctx, ip) : read_v4(ctx, ip);
}

/* The start of an extension header; offset and id are those of the fragment header. */
struct extension {
	__u8 next;
	__u8 len;
	__be16 offset;
	__be32 id;
};

/*
 * note_v6_fragment records the fields of a fragment header. The fragment begins at the offset at.
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

/* skip_extensions finds the transport header behind the extension headers of IPv6. */
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

/* has_ports reports whether Services can have the protocol. */
static __always_inline bool has_ports(__u8 proto)
{
	return proto == IPPROTO_TCP || proto == IPPROTO_UDP || proto == IPPROTO_SCTP;
}

/* read_ports reads the ports at l4, in a packet that ends at end. */
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

/* The TCP header without options; that of linux/tcp.h has bit fields. */
struct tcp_header {
	__be16 ports[2];
	__be32 seq;
	__be32 ack;
	__u8 length; /* in the upper half, in units of 4 bytes */
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
 * read_stamp looks for the timestamp among the TCP options, up to end, of the packet at a hook. It
 * is global, so that the verifier walks it once.
 */
__noinline int read_stamp(struct __sk_buff *ctx, __u32 hook, __u32 end)
{
	struct packet *pkt = packet_at(hook);
	__u32 at, i;

	if (!pkt)
		return 0;
	at = pkt->ip.l4 + sizeof(struct tcp_header);
	for (i = 0; i < MAX_TCP_OPTIONS && at < end; i++) {
		__u8 option[3]; /* kind, length, and the first byte of the timestamp */

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

static __always_inline enum reason read_tcp_event(struct __sk_buff *ctx, struct packet *pkt)
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
	pkt->tcp.fin = flags & TCP_FIN ? FLOW_FIN_SENT : 0;
	if (flags & (TCP_SYN | TCP_FIN))
		read_stamp(ctx, pkt->ip.key.hook, payload);
	if (flags & TCP_RST)
		pkt->event = EVENT_RESET;
	else if (flags & TCP_FIN)
		pkt->event = EVENT_FIN;
	else if (flags & TCP_SYN && !(flags & TCP_ACK))
		pkt->event = EVENT_OPEN;
	else if (flags & TCP_SYN)
		pkt->event = EVENT_ACCEPT;
	return REASON_NEXT;
}

#define SCTP_INIT 1
#define SCTP_INIT_ACK 2
#define SCTP_ABORT 6
#define SCTP_SHUTDOWN 7
#define SCTP_SHUTDOWN_ACK 8
#define SCTP_SHUTDOWN_COMPLETE 14

#define SCTP_REFLECTS 1 /* flag */
#define SCTP_ASKS 16 /* offset of the initiate tag in SCTP_INIT and SCTP_INIT_ACK */

/* The SCTP header, and that of the first chunk. */
struct sctp_start {
	__be16 ports[2];
	__be32 tag;
	__be32 checksum;
	__u8 chunk;
	__u8 flags;
	__be16 length;
};

static __always_inline enum reason read_sctp_event(struct __sk_buff *ctx, struct packet *pkt)
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
		pkt->event = EVENT_RESET;
	else if (chunk == SCTP_SHUTDOWN || chunk == SCTP_SHUTDOWN_ACK ||
		 chunk == SCTP_SHUTDOWN_COMPLETE)
		pkt->event = EVENT_FIN;
	else if (chunk == SCTP_INIT)
		pkt->event = EVENT_OPEN;
	else if (chunk == SCTP_INIT_ACK)
		pkt->event = EVENT_ACCEPT;
	return REASON_NEXT;
}

/* read_event reads what a packet with ports means for the connection of its flow. */
static __always_inline enum reason read_event(struct __sk_buff *ctx, struct packet *pkt)
{
	if (pkt->ip.later)
		return REASON_NEXT;
	if (pkt->ip.key.proto == IPPROTO_TCP)
		return read_tcp_event(ctx, pkt);
	if (pkt->ip.key.proto == IPPROTO_SCTP)
		return read_sctp_event(ctx, pkt);
	pkt->event = EVENT_OPEN; /* any datagram can open a flow */
	return REASON_NEXT;
}

#endif
