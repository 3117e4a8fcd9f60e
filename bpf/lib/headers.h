/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Reading the headers of a packet, from Ethernet to the transport, and what they mean for a flow. */
#ifndef SLUICE_HEADERS_H
#define SLUICE_HEADERS_H

#include "packet.h"

#define MAX_VLAN_TAGS 2
#define MAX_EXTENSIONS 6

#define V4_DONT_FRAGMENT bpf_htons(0x4000)
#define V4_FRAGMENT_OFFSET bpf_htons(0x1fff)
#define V4_MORE_FRAGMENTS bpf_htons(0x2000)
#define V6_FRAGMENT_OFFSET bpf_htons(0xfff8)
#define V6_MORE_FRAGMENTS bpf_htons(0x0001)

#define EXTENSION_AUTH 51

/* From linux/icmp.h, which would include half of the C library. */
#define ICMP_DEST_UNREACH 3
#define ICMP_NET_UNREACH 0
#define ICMP_HOST_UNREACH 1
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

/* Where the IP header of a frame is, and what the first check of a packet needs of it. */
struct network {
	__u32 at;
	__u32 l4; /* 0: behind extension headers, or in another fragment */
	__u32 hash; /* of the address that peek_network has read */
	__u8 proto; /* if l4 is set */
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

/*
 * peek_network reads the source or the destination address of a packet, and where its ports are.
 * The full reading is left to read_ip, for the few packets that pass the first check.
 */
static __always_inline enum reason peek_network(struct __sk_buff *ctx, struct network *net,
						bool from, struct addr *a)
{
	const struct ipv6hdr *v6;
	const struct iphdr *v4;
	enum reason why;

	why = read_link(ctx, net);
	if (why)
		return why;
	if (net->v6) {
		v6 = peek(ctx, net->at, sizeof(*v6));
		if (!v6)
			return REASON_PASS_MALFORMED;
		__builtin_memcpy(a, from ? &v6->saddr : &v6->daddr, sizeof(*a));
		net->hash = addr_hash(a);
		net->proto = v6->nexthdr;
		net->l4 = is_extension(v6->nexthdr) ? 0 : net->at + sizeof(*v6);
	} else {
		v4 = peek(ctx, net->at, sizeof(*v4));
		if (!v4)
			return REASON_PASS_MALFORMED;
		*a = addr_of_v4(from ? v4->saddr : v4->daddr);
		net->hash = addr_hash(a); /* here, most of the words are constant */
		net->proto = v4->protocol;
		net->l4 = v4->frag_off & V4_FRAGMENT_OFFSET ? 0 : net->at + v4->ihl * 4;
	}
	return REASON_NEXT;
}

/* peek_dst reads the destination address of a packet whose source was read. */
static __always_inline bool peek_dst(struct __sk_buff *ctx, const struct network *net,
				     struct addr *dst)
{
	const struct ipv6hdr *v6 = net->v6 ? peek(ctx, net->at, sizeof(*v6)) : NULL;
	const struct iphdr *v4 = net->v6 ? NULL : peek(ctx, net->at, sizeof(*v4));

	if (v6)
		__builtin_memcpy(dst, &v6->daddr, sizeof(*dst));
	else if (v4)
		*dst = addr_of_v4(v4->daddr);
	return v6 || v4;
}

/*
 * peek_port reads the source or the destination port, 0 if that takes more than a look. It is
 * false for a packet whose protocol has no ports and reports no errors, so that it is certainly
 * not a Service's.
 */
static __always_inline bool peek_port(struct __sk_buff *ctx, const struct network *net, bool from,
				      __be16 *port)
{
	const __be16 *ports;

	*port = 0;
	if (!net->l4)
		return true;
	if (!has_ports(net->proto))
		return net->proto == (net->v6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP);
	ports = peek(ctx, net->l4, 2 * sizeof(*ports));
	if (ports)
		*port = ports[from ? 0 : 1];
	return true;
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

/* peek_flags reports whether those of mask that a TCP segment has are these flags. */
static __always_inline bool peek_flags(struct __sk_buff *ctx, const struct network *net, __u8 mask,
				       __u8 flags)
{
	const struct tcp_header *tcp;

	if (net->proto != IPPROTO_TCP || !net->l4)
		return false;
	tcp = peek(ctx, net->l4, sizeof(*tcp));
	return tcp && (tcp->flags & mask) == flags;
}

/* peek_syn reports whether a packet opens a TCP connection. */
static __always_inline bool peek_syn(struct __sk_buff *ctx, const struct network *net)
{
	return peek_flags(ctx, net, TCP_SYN | TCP_ACK, TCP_SYN);
}

/* peek_refusal reports whether a packet may refuse a TCP connection. */
static __always_inline bool peek_refusal(struct __sk_buff *ctx, const struct network *net)
{
	return peek_flags(ctx, net, TCP_RST | TCP_ACK, TCP_RST | TCP_ACK);
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

#define TCP_OPTION_END 0
#define TCP_OPTION_NOP 1
#define TCP_OPTION_STAMP 8
#define TCP_OPTION_MD5 19
#define TCP_OPTION_AO 29
#define TCP_OPTION_MULTIPATH 30
#define MAX_TCP_OPTIONS 12

#define MULTIPATH_JOIN 1 /* the upper half of the byte after the length */

/*
 * read_options reads the TCP options, up to end, of the packet at a hook: the timestamp and, of a
 * SYN, whether it joins a connection of Multipath TCP, and is signed. It is global, so that the verifier walks it
 * once.
 */
__noinline int read_options(struct __sk_buff *ctx, __u32 hook, __u32 end)
{
	struct packet *pkt = packet_at(hook);
	__u32 at, i;

	if (!pkt)
		return 0;
	at = pkt->ip.l4 + sizeof(struct tcp_header);
	for (i = 0; i < MAX_TCP_OPTIONS && at < end; i++) {
		__u8 option[3]; /* kind, length, and the first byte of the value */

		if (bpf_skb_load_bytes(ctx, at, option, sizeof(option)) ||
		    option[0] == TCP_OPTION_END)
			break;
		if (option[0] == TCP_OPTION_STAMP) {
			pkt->tcp.fin |= pkt->tcp.fin ? FLOW_STAMPED : 0;
			pkt->tcp.stamped = true;
			pkt->tcp.stamp = option[2];
			if (!pkt->tcp.syn)
				break;
		} else if (option[0] == TCP_OPTION_MULTIPATH) {
			pkt->tcp.joins = option[2] >> 4 == MULTIPATH_JOIN;
		} else if (option[0] == TCP_OPTION_MD5 || option[0] == TCP_OPTION_AO) {
			pkt->tcp.signs = true;
		}
		at += option[0] == TCP_OPTION_NOP ? 1 : option[1];
	}
	if (i == MAX_TCP_OPTIONS && at < end)
		pkt->tcp.signs = true; /* perhaps, further on */
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
	pkt->tcp.joins = false;
	pkt->tcp.signs = false;
	pkt->tcp.fin = flags & TCP_FIN ? FLOW_FIN_SENT : 0;
	if (flags & (TCP_SYN | TCP_FIN))
		read_options(ctx, pkt->ip.key.hook, payload);
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
#define SCTP_ERROR 9
#define SCTP_COOKIE_ACK 11
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
	pkt->sctp.chunk = chunk;
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

/* Fragments: later ones have no ports, and go where the first one went. */

/* How long a datagram waits for its fragments: the default of net.ipv4.ipfrag_time. */
#define FRAGMENT_NS (30 * 1000000000ULL)

static __always_inline struct fragment_key fragment_key(const struct headers *ip)
{
	return (struct fragment_key){
		.src = ip->key.src,
		.dst = ip->key.dst,
		.id = ip->fragment_id,
		.proto = ip->key.proto,
		.hook = ip->key.hook,
	};
}

/*
 * missing_after returns the change of the number of missing bytes of its datagram by a fragment.
 */
static __always_inline __s32 missing_after(const struct headers *ip)
{
	__s32 length = ip->end - ip->piece;

	return ip->more ? -length : ip->offset;
}

/*
 * remember_fragment stores the ports of a first fragment. Senders reuse fragment ids, so it
 * replaces what an earlier datagram has left.
 */
static __always_inline void remember_fragment(const struct headers *ip)
{
	struct fragment_key key = fragment_key(ip);
	struct fragment ports = {
		.src_port = ip->key.src_port,
		.dst_port = ip->key.dst_port,
		.missing = missing_after(ip),
		.since = bpf_ktime_get_ns(),
	};

	bpf_map_update_elem(&sl_fragments, &key, &ports, BPF_ANY);
}

/*
 * recall_fragment gives a later fragment the ports of the first one. It deletes them once all
 * fragments have come, because the next one with that id belongs to another datagram.
 */
static __always_inline enum reason recall_fragment(struct headers *ip)
{
	struct fragment_key key = fragment_key(ip);
	struct fragment *ports = bpf_map_lookup_elem(&sl_fragments, &key);

	if (!ports || bpf_ktime_get_ns() - ports->since > FRAGMENT_NS)
		return REASON_PASS_FRAGMENT;
	ip->key.src_port = ports->src_port;
	ip->key.dst_port = ports->dst_port;
	__sync_fetch_and_add(&ports->missing, missing_after(ip));
	if (!ports->missing)
		bpf_map_delete_elem(&sl_fragments, &key);
	return REASON_NEXT;
}

/* forget_fragment lets the later fragments of a first one, which passes untranslated, pass as well. */
static __always_inline void forget_fragment(const struct headers *ip)
{
	struct fragment_key key = fragment_key(ip);

	if (ip->fragment)
		bpf_map_delete_elem(&sl_fragments, &key);
}

/* read_transport reads or recalls the ports of a packet that may be a fragment. */
static __always_inline enum reason read_transport(struct __sk_buff *ctx, struct headers *ip)
{
	enum reason why;

	if (ip->later)
		return recall_fragment(ip);
	why = read_ports(ctx, ip, ip->end);
	if (!why && ip->fragment)
		remember_fragment(ip);
	return why;
}

#endif
