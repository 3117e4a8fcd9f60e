/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Fragments: those that follow have no ports, and go where the first one went. */
#ifndef SLUICE_FRAGMENT_H
#define SLUICE_FRAGMENT_H

#include "packet.h"

static __always_inline struct fragment_key fragment_key(const struct headers *ip)
{
	return (struct fragment_key){
		.src = ip->key.src,
		.dst = ip->key.dst,
		.id = ip->fragment_id,
		.proto = ip->key.proto,
	};
}

/* remember_fragment keeps the ports of a first fragment. */
static __always_inline void remember_fragment(const struct headers *ip)
{
	struct fragment_key key = fragment_key(ip);
	struct fragment ports = { .src_port = ip->key.src_port, .dst_port = ip->key.dst_port };

	bpf_map_update_elem(&sl_fragments, &key, &ports, BPF_ANY);
}

/* recall_fragment gives a later fragment the ports of the first one. */
static __always_inline enum reason recall_fragment(struct headers *ip)
{
	struct fragment_key key = fragment_key(ip);
	const struct fragment *ports = bpf_map_lookup_elem(&sl_fragments, &key);

	if (!ports)
		return REASON_PASS_FRAGMENT;
	ip->key.src_port = ports->src_port;
	ip->key.dst_port = ports->dst_port;
	return REASON_NEXT;
}

/* read_transport reads, or recalls, the ports of a packet that may be a fragment. */
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
