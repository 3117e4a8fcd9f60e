/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Lending a flow a tuple of this node, where the backend's own reply would miss us. */
#ifndef SLUICE_MASQUERADE_H
#define SLUICE_MASQUERADE_H

#include "flow.h"
#include "route.h"

#define MAX_PORT_TRIES 32

/* tuple_hash spreads flows over the ports: the same tuple asks for the same one first. */
static __always_inline __u32 tuple_hash(const struct flow *f)
{
	__u32 h = f->client.words[0] ^ f->client.words[1] ^ f->client.words[2] ^ f->client.words[3];

	h = h * 0x9e3779b1 + (f->client_port | (__u32)f->dialled_port << 16);
	h = (h ^ h >> 15) * 0x85ebca6b + f->dialled.words[3];
	h = (h ^ h >> 13) * 0xc2b2ae35;
	return h ^ h >> 16;
}

static __always_inline __be16 port_of_window(__u32 number)
{
	__u32 size = config_masquerade_high - config_masquerade_low + 1;

	return bpf_htons(config_masquerade_low + number % size);
}

/*
 * reserve_port finds a port of the window with which the entry of the packet's flow
 * that has this role is nobody else's, and puts it into half_open. See reserve.
 */
__noinline int reserve_port(__u32 role)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	int why = REASON_DROP_MASQUERADE_PORT;
	__u32 number;
	int i;

	if (!pkt)
		return why;
	number = tuple_hash(&pkt->flow);
	for (i = 0; i < MAX_PORT_TRIES; i++) {
		__be16 port = port_of_window(number);

		if (role == FLOW_FROM_BACKEND)
			pkt->flow.masquerade_port = port;
		else
			pkt->flow.stack_port = port;
		why = reserve(role);
		if (why != REASON_DROP_MASQUERADE_PORT)
			break;
		count_flows(COUNT_MASQUERADE_RETRIES, 1);
		number = bpf_get_prandom_u32();
	}
	return why;
}

/* masquerade lends pkt->flow an address and a port of this node. */
static __always_inline int masquerade(struct __sk_buff *ctx, struct packet *pkt)
{
	struct flow *f = &pkt->flow;
	struct route way;

	if (!find_route(ctx, &f->client, &f->backend, &way) || addr_is_any(&way.source))
		return REASON_DROP_MASQUERADE_ADDR;
	f->masquerade = way.source;
	return reserve_port(FLOW_FROM_BACKEND);
}

#endif
