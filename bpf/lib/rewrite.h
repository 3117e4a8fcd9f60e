/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Writing a packet. Checksums are updated incrementally, with the kernel's functions, which know
 * whether the device has yet to compute them or already has.
 */
#ifndef SLUICE_REWRITE_H
#define SLUICE_REWRITE_H

#include <stddef.h>
#include <linux/tcp.h>
#include <linux/types.h>
#include <linux/udp.h>
#include <bpf/bpf_core_read.h>

#include "headers.h"
#include "kernel.h"

/*
 * The checksum of SCTP, a CRC-32C of the whole packet. A CRC is linear: when some bytes change, it
 * changes by the CRC of the difference alone, which is the difference times x^8 for each byte from
 * there to the end, modulo the polynomial.
 */

#define CRC32C 0x82f63b78 /* the polynomial; the highest bit is x^0 */

/* The bits of the length of a packet. */
#define MAX_LENGTH_BITS 16

/*
 * crc_times multiplies two polynomials, modulo CRC32C. It is global because what the verifier
 * knows of the factors would keep it from recognizing equal states in crc_change.
 */
__noinline __u32 crc_times(__u32 a, __u32 b)
{
	__u32 product = 0;
	int i;

	for (i = 0; i < 32; i++) {
		product ^= b & -(a >> 31);
		a <<= 1;
		b = (b >> 1) ^ (CRC32C & -(b & 1));
	}
	return product;
}

/*
 * crc_change returns the change of the checksum of a packet when its first four bytes change by
 * diff, both as they lie in memory. len is the number of bytes from the first of these to the end
 * of the packet.
 */
static __noinline __u32 crc_change(__u32 diff, __u32 len)
{
	__u32 power = 0x00800000; /* x^8 */
	int i;

	for (i = 0; i < MAX_LENGTH_BITS; i++) {
		if (len & 1)
			diff = crc_times(diff, power);
		power = crc_times(power, power);
		len >>= 1;
	}
	return diff;
}

/*
 * crc_of_word adds a word, as it lies in memory, to the remainder of the words before. It is global, as
 * crc_times is.
 */
__noinline __u32 crc_of_word(__u32 crc, __u32 word)
{
	int i;

	crc ^= word;
	for (i = 0; i < 32; i++)
		crc = crc >> 1 ^ (CRC32C & -(crc & 1));
	return crc;
}

#ifndef BPF_F_IPV6
#define BPF_F_IPV6 (1ULL << 7)
#endif

#define SCTP_CHECKSUM 8 /* offset */

#define CHECKSUM_PARTIAL 3

/*
 * is_partial reports whether the device will write the transport checksum when the packet leaves.
 */
static __always_inline bool is_partial(struct __sk_buff *ctx)
{
	struct __sk_buff *held = ctx;
	const struct sk_buff *skb;

	/* The verifier only allows single fields of the context to be read, so its
	 * address is copied as a number. */
	if (bpf_probe_read_kernel(&skb, sizeof(skb), &held))
		return false;
	return BPF_CORE_READ_BITFIELD_PROBED(skb, ip_summed) == CHECKSUM_PARTIAL;
}

/*
 * checksum_at returns the offset of the transport checksum if that covers a pseudo header,
 * otherwise 0.
 */
static __always_inline __u32 checksum_at(const struct headers *ip)
{
	switch (ip->key.proto) {
	case IPPROTO_TCP:
		return ip->l4 + offsetof(struct tcphdr, check);
	case IPPROTO_UDP:
		return ip->l4 + offsetof(struct udphdr, check);
	case IPPROTO_ICMPV6:
		return ip->l4 + offsetof(struct icmp6hdr, icmp6_cksum);
	default:
		return 0;
	}
}

/*
 * has_checksum is false for a zero UDP checksum, which means none, and for a fragment without a
 * transport header.
 */
static __always_inline bool has_checksum(struct __sk_buff *ctx, const struct headers *ip)
{
	__u32 at = checksum_at(ip);
	const __u16 *check;

	if (!at || ip->later)
		return false;
	if (ip->key.proto != IPPROTO_UDP)
		return true;
	check = peek(ctx, at, sizeof(*check));
	return check && *check;
}

/* checksum_flags keeps a UDP checksum from becoming zero. */
static __always_inline __u64 checksum_flags(const struct headers *ip)
{
	return ip->key.proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
}

/*
 * note_sum reports a change to the kernel that no checksum in the packet compensates. It matters
 * if the device has summed the whole packet, and is refused otherwise.
 */
static __always_inline void note_sum(struct __sk_buff *ctx, __u32 diff)
{
	bpf_csum_update(ctx, diff);
}

/* addrs_diff returns the difference between the addresses of two tuples, for checksums. */
static __always_inline __u32 addrs_diff(const struct flow_key *from, const struct flow_key *to)
{
	const __u32 *old = (const __u32 *)from, *new = (const __u32 *)to;
	__u64 sum = 0;
	__u32 i;

	for (i = 0; i < 2 * sizeof(struct addr) / sizeof(*old); i++)
		sum += (__u64)(__u32)~old[i] + new[i];
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (sum & 0xffffffff) + (sum >> 32);
}

/* fold returns the 16-bit checksum of a sum. */
static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/*
 * Bytes are written by bpf_skb_store_bytes, never by a pointer to the packet: with one such write, a program would begin
 * with an unsharing of each packet that is a clone, as the segments of this node's sockets are, whether a Service's or not.
 * Each call takes time, so addresses and ports are written at once.
 */

/* ports_follow reports whether the ports of a packet lie behind its addresses. */
static __always_inline bool ports_follow(const struct headers *ip)
{
	return has_ports(ip->key.proto) && !ip->later &&
	       ip->l4 == ip->l3 + (ip->v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));
}

/* What is written of IPv4: from the checksum of its header on. */
struct end_of_v4 {
	__sum16 check;
	__be32 saddr, daddr;
	__be16 ports[2];
} __attribute__((packed));

/* write_v4 writes the addresses, the checksum of the header, and the ports if they follow. */
static __always_inline bool write_v4(struct __sk_buff *ctx, const struct headers *ip,
				     const struct flow_key *to, __u32 diff)
{
	const struct iphdr *hdr = peek(ctx, ip->l3, sizeof(*hdr));
	__u32 at = ip->l3 + offsetof(struct iphdr, check);
	struct end_of_v4 new;

	if (!hdr)
		return false;
	new.check = fold((__u64)(__u16)~hdr->check + diff);
	new.saddr = to->src.words[3];
	new.daddr = to->dst.words[3];
	if (!ports_follow(ip))
		return !bpf_skb_store_bytes(ctx, at, &new, offsetof(struct end_of_v4, ports), 0);
	new.ports[0] = to->src_port;
	new.ports[1] = to->dst_port;
	return !bpf_skb_store_bytes(ctx, at, &new, sizeof(new), 0);
}

/* write_v6 writes the addresses, and the ports if they follow, as they do in a tuple. */
static __always_inline bool write_v6(struct __sk_buff *ctx, const struct headers *ip,
				     const struct flow_key *to)
{
	__u32 at = ip->l3 + offsetof(struct ipv6hdr, saddr);

	_Static_assert(offsetof(struct flow_key, dst) == sizeof(to->src) &&
			       offsetof(struct flow_key, src_port) == 2 * sizeof(to->src) &&
			       offsetof(struct flow_key, proto) == 2 * sizeof(to->src) + 4,
		       "a tuple begins with addresses and ports");
	return !(ports_follow(ip) ?
			 bpf_skb_store_bytes(ctx, at, to, offsetof(struct flow_key, proto), 0) :
			 bpf_skb_store_bytes(ctx, at, to, offsetof(struct flow_key, src_port), 0));
}

/* rewrite_addrs gives the packet the addresses of to, and its ports if they follow the addresses. */
static __always_inline bool rewrite_addrs(struct __sk_buff *ctx, struct packet *pkt,
					  const struct flow_key *to)
{
	const struct headers *ip = &pkt->ip;
	__u32 diff = addrs_diff(&ip->key, to);
	__u64 flags = BPF_F_PSEUDO_HDR | checksum_flags(ip);
	bool checked = has_checksum(ctx, ip);

	if (ip->v6 && config_csum_ipv6)
		flags |= BPF_F_IPV6;
	if (checked && bpf_l4_csum_replace(ctx, checksum_at(ip), 0, diff, flags))
		return false;
	/* IPv6 has no header checksum that compensates a change of its addresses, but
	 * without BPF_F_IPV6 the kernel assumes one. */
	if (ip->v6 && (!checked || !config_csum_ipv6))
		note_sum(ctx, diff);
	return ip->v6 ? write_v6(ctx, ip, to) : write_v4(ctx, ip, to, diff);
}

/* ports_of returns both ports, as they lie in memory. */
static __always_inline __u32 ports_of(const struct flow_key *tuple)
{
	return tuple->src_port | (__u32)tuple->dst_port << 16;
}

/*
 * rewrite_sctp_checksum updates the checksum for a change of ports. A checksum that the device has
 * yet to compute is 0. That of a fragmented packet cannot be updated, because its length is
 * unknown.
 */
static __always_inline bool rewrite_sctp_checksum(struct __sk_buff *ctx, const struct headers *ip,
						  __u32 diff)
{
	const __u32 *crc = peek(ctx, ip->l4 + SCTP_CHECKSUM, sizeof(*crc));
	__u32 old, new;

	if (!crc)
		return false;
	old = *crc;
	if (!old)
		return true;
	if (ip->fragment)
		return false;
	new = old ^ crc_change(diff, ip->end - ip->l4);
	if (bpf_skb_store_bytes(ctx, ip->l4 + SCTP_CHECKSUM, &new, sizeof(new), 0))
		return false;
	note_sum(ctx, bpf_csum_diff(&old, sizeof(old), &new, sizeof(new), 0));
	return true;
}

/* rewrite_ports_checksum updates the checksum for a change of ports. */
static __always_inline bool rewrite_ports_checksum(struct __sk_buff *ctx, const struct headers *ip,
						   __u32 from, __u32 to)
{
	if (has_checksum(ctx, ip))
		return !bpf_l4_csum_replace(ctx, checksum_at(ip), from, to,
					    sizeof(to) | checksum_flags(ip));
	note_sum(ctx, bpf_csum_diff(&from, sizeof(from), &to, sizeof(to), 0));
	return ip->key.proto != IPPROTO_SCTP || rewrite_sctp_checksum(ctx, ip, from ^ to);
}

/* rewrite_ports gives the packet the ports of to, but for writing them if rewrite_addrs does that. */
static __always_inline bool rewrite_ports(struct __sk_buff *ctx, struct packet *pkt,
					  const struct flow_key *to)
{
	const struct headers *ip = &pkt->ip;
	__u32 from = ports_of(&ip->key), ports = ports_of(to);

	if (from == ports || ip->later)
		return true;
	return rewrite_ports_checksum(ctx, ip, from, ports) &&
	       (ports_follow(ip) || !bpf_skb_store_bytes(ctx, ip->l4, &ports, sizeof(ports), 0));
}

/* rewrite gives the packet the tuple to. */
static __always_inline enum reason rewrite(struct __sk_buff *ctx, struct packet *pkt,
					   const struct flow_key *to)
{
	return rewrite_ports(ctx, pkt, to) && rewrite_addrs(ctx, pkt, to) ? REASON_NEXT :
									    REASON_DROP_REWRITE;
}

/* swap_macs swaps the Ethernet addresses. */
static __always_inline bool swap_macs(struct __sk_buff *ctx)
{
	__u8 came[2][ETH_ALEN], goes[2][ETH_ALEN];

	if (!config_ethernet)
		return true;
	if (bpf_skb_load_bytes(ctx, 0, came, sizeof(came)))
		return false;
	__builtin_memcpy(goes[0], came[1], ETH_ALEN);
	__builtin_memcpy(goes[1], came[0], ETH_ALEN);
	return !bpf_skb_store_bytes(ctx, 0, goes, sizeof(goes), 0);
}

#endif
