/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Fragments: later ones have no ports, and go where the first one went. */
#ifndef SLUICE_FRAGMENT_H
#define SLUICE_FRAGMENT_H

#include "packet.h"

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
