/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Direct connections to a backend from a port whose flow already has that backend. To the backend
 * both would be one connection, so the direct one gets a flow of its own, with another port.
 */
#ifndef SLUICE_BESIDE_H
#define SLUICE_BESIDE_H

#include "open.h"

/*
 * make_direct turns pkt->flow, a flow of a Service to the backend at hand, into the flow of the
 * direct connection to the same backend.
 */
static __always_inline void make_direct(struct packet *pkt)
{
	struct flow *f = &pkt->flow;

	f->client_port = f->stack_port;
	f->original_dst = f->backend;
	f->original_port = f->backend_port;
	f->state = FLOW_NEW;
	f->flags = class_flag(config_device_class);
	f->ending = 0;
	f->stamp = 0;
	f->created = pkt->now;
	f->last_seen = pkt->now;
	f->bytes = 0;
	f->end = 0;
	f->ack = 0;
}

/*
 * open_beside handles the first segment of a TCP connection to no frontend: it opens a flow if the
 * client's port already has a flow to that very backend. It is for TCP only, because no datagram
 * is known to be the first. It is global, so that the verifier walks it once.
 */
__noinline int open_beside(struct __sk_buff *ctx)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	const struct flow *had;
	int why;

	if (!pkt || pkt->ip.key.proto != IPPROTO_TCP)
		return REASON_PASS_NO_FRONTEND;
	reversed(&pkt->ip.key, &pkt->came);
	pkt->came.hook = HOOK_EGRESS;
	had = bpf_map_lookup_elem(&sl_flows, &pkt->came);
	if (!had || has_ended(pkt, had))
		return REASON_PASS_NO_FRONTEND;
	pkt->flow = *had;
	barrier();
	comes_as(&pkt->flow, FLOW_TO_CLIENT, &pkt->key);
	if (!same_tuple(&pkt->key, &pkt->came))
		return REASON_PASS_NO_FRONTEND; /* another CPU has deleted it */
	make_direct(pkt);
	why = reserve_port(ctx, FLOW_TO_CLIENT);
	evict(pkt);
	if (!why)
		why = put_flow(ctx, pkt);
	if (why)
		return why;
	goes_as(&pkt->flow, FLOW_FROM_CLIENT, &pkt->to);
	return REASON_TRANSLATED;
}

#endif
