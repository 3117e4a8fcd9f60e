/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Masquerading: giving a flow an address and a port of this node, where the backend's reply would
 * bypass the node.
 */
#ifndef SLUICE_MASQUERADE_H
#define SLUICE_MASQUERADE_H

#include "balance.h"
#include "claim.h"
#include "route.h"
#include "taken.h"

/* How many ports are tried: the first ones in turn, then random ones. */
#define MAX_PORT_TRIES 64
#define PORTS_IN_TURN 8

/*
 * The next port of the window, by a hash of the backend: so a flow gets the port that its backend
 * has not seen for the longest time. Two backends may share an index.
 */
#define PORT_TURNS 4096

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PORT_TURNS);
	__type(key, __u32);
	__type(value, __u32);
} sl_port_turns SEC(".maps");

/* tuple_hash spreads flows over the ports, so that the same tuple tries the same port first. */
static __always_inline __u32 tuple_hash(const struct flow *f)
{
	__u32 h = f->client.words[0] ^ f->client.words[1] ^ f->client.words[2] ^ f->client.words[3];

	h = h * 0x9e3779b1 + (f->client_port | (__u32)f->original_port << 16);
	h = (h ^ h >> 15) * 0x85ebca6b + f->original_dst.words[3];
	h = (h ^ h >> 13) * 0xc2b2ae35;
	return h ^ h >> 16;
}

static __always_inline __be16 port_of_window(__u32 number)
{
	__u32 size = config_masquerade_high - config_masquerade_low + 1;
	__u32 more = config_masquerade_more_high - config_masquerade_more_low + 1;

	__u32 beyond;

	number %= size + more;
	beyond = (size - 1 - number) >> 31; /* without a branch, which the loop would multiply */
	return bpf_htons(config_masquerade_low + number +
			 beyond * (config_masquerade_more_low - size - config_masquerade_low));
}

/*
 * reserve_as reserves the entry of this role of the flow of the packet, with a port of the window.
 * See reserve.
 */
static __always_inline int reserve_as(struct __sk_buff *ctx, struct packet *pkt, __u32 role,
				      __be16 port, bool urgent)
{
	if (role == FLOW_FROM_BACKEND)
		pkt->flow.masquerade_port = port;
	else
		pkt->flow.stack_port = port;
	return is_taken(ctx, role) ? REASON_DROP_MASQUERADE_PORT : reserve(role, urgent);
}

/*
 * reserve_port finds a port of the window with which no other flow holds the tuple that the flow
 * of the packet has in this role, and puts that entry into half_open. See reserve.
 *
 * Connections take ports in turn. The datagrams of a client get the port that they had before, if
 * their flow has expired meanwhile. If all ports that are tried are held, and some by flows that
 * have ended, the oldest of these loses its tuple.
 */
__noinline int reserve_port(struct __sk_buff *ctx, __u32 role)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	int why = REASON_DROP_MASQUERADE_PORT;
	__u32 place, number, *turn;
	int i;

	if (!pkt)
		return why;
	place = hash(&pkt->flow.backend, sizeof(pkt->flow.backend)) ^ pkt->flow.backend_port;
	place %= PORT_TURNS;
	turn = bpf_map_lookup_elem(&sl_port_turns, &place);
	if (!turn)
		return why;
	number = *turn;
	__sync_fetch_and_add(turn, 1);
	if (pkt->flow.proto == IPPROTO_UDP)
		number = tuple_hash(&pkt->flow);
	pkt->ended = 0;
	for (i = 0; i < MAX_PORT_TRIES; i++) {
		why = reserve_as(ctx, pkt, role, port_of_window(number), false);
		if (why != REASON_DROP_MASQUERADE_PORT)
			break;
		number = i < PORTS_IN_TURN ? number + 1 : bpf_get_prandom_u32();
	}
	if (i && pkt->flow.proto != IPPROTO_UDP)
		*turn = number + 1;
	count_flows(COUNT_MASQUERADE_RETRIES, i);
	if (why == REASON_DROP_MASQUERADE_PORT && pkt->ended)
		why = reserve_as(ctx, pkt, role, pkt->ended_port, true);
	return why;
}

/*
 * reserve_own_port reserves the replies to the flow of the packet with the client's own port. See
 * reserve. A backend that connects from the very port on which it answers needs another one,
 * because the stack could not tell requests and replies apart.
 */
static __always_inline int reserve_own_port(struct __sk_buff *ctx, const struct flow *f)
{
	if (addr_equal(&f->client, &f->backend) && f->client_port == f->backend_port)
		return REASON_DROP_MASQUERADE_PORT;
	if (is_taken(ctx, FLOW_TO_CLIENT))
		return REASON_DROP_MASQUERADE_PORT;
	return reserve(FLOW_TO_CLIENT, false);
}

/* masquerade gives pkt->flow an address and a port of this node. */
static __always_inline int masquerade(struct __sk_buff *ctx, struct packet *pkt)
{
	struct flow *f = &pkt->flow;
	struct route way;

	if (!find_route(ctx, &f->client, &f->backend, &way) || addr_is_any(&way.source))
		return REASON_DROP_MASQUERADE_ADDR;
	f->masquerade = way.source;
	return reserve_port(ctx, FLOW_FROM_BACKEND);
}

#endif
