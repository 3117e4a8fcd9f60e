/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Claiming a tuple: a new flow takes one that no flow holds, or that of a flow that is over. */
#ifndef SLUICE_CLAIM_H
#define SLUICE_CLAIM_H

#include "track.h"

/*
 * After this time without a packet another flow may take the tuple of an entry that has said
 * nothing but its first, or a flood of first packets would hold all ports of a masquerade.
 */
#define OPENING_NS (3 * 1000000000ULL)

/* For how long Linux remembers a connection that it has closed first, and what last_seen may lag. */
#define TIME_WAIT_NS (61 * 1000000000ULL)

/* How an entry holds its tuple. */
enum hold {
	HOLD_NONE = 0, /* not at all */
	HOLD_ENDED = 1, /* it has ended, but who takes the tuple may have to wait or do harm */
	HOLD_LIVE = 2,
};

/* is_same says that two entries are of one and the same client's flow to what it dialled. */
static __always_inline bool is_same(const struct flow *a, const struct flow *b)
{
	return addr_equal(&a->client, &b->client) && a->client_port == b->client_port &&
	       addr_equal(&a->dialled, &b->dialled) && a->dialled_port == b->dialled_port;
}

/*
 * is_remembered reports whether the backend, which has closed the flow had first, would take
 * the SYN at hand for one of that connection. It would answer with an ACK, the client with an
 * RST, and try again after a second. In TIME_WAIT a SYN is new to Linux if its timestamp is
 * newer (RFC 6191) or, without timestamps, its number is. The timestamps of one client grow,
 * for each address that it dials. What the backend has acknowledged last is where the old
 * connection has ended.
 */
static __always_inline bool is_remembered(const struct packet *pkt, const struct flow *had)
{
	__s8 newer = pkt->tcp.stamp - had->stamp;

	if (!(had->ending & FLOW_REMEMBERED) || idle_of(had, pkt->now) > TIME_WAIT_NS)
		return false;
	if (!(had->ending & FLOW_STAMPED) || !pkt->tcp.stamped)
		return (__s32)(pkt->tcp.seq - had->ack) <= 0;
	return newer < 0 || (!newer && !(addr_equal(&had->client, &pkt->flow.client) &&
					 addr_equal(&had->dialled, &pkt->flow.dialled)));
}

/* hold_of tells how an entry holds its tuple against the packet's flow. */
static __always_inline enum hold hold_of(const struct packet *pkt, const struct flow *had)
{
	__u64 idle;

	if (is_same(had, &pkt->flow))
		return HOLD_NONE;
	idle = idle_of(had, pkt->now);
	if (had->proto == IPPROTO_UDP)
		return idle > config_udp_idle_ns ? HOLD_NONE : HOLD_LIVE;
	if (had->ending & FLOW_OVER)
		return is_remembered(pkt, had) ? HOLD_ENDED : HOLD_NONE;
	if (had->state == FLOW_NEW)
		return idle > OPENING_NS ? HOLD_NONE : HOLD_LIVE;
	if (had->state == FLOW_OPEN || idle <= CLOSING_NS)
		return HOLD_LIVE;
	/* The other side may go on for long after a FIN. */
	return had->state == FLOW_FIN && had->proto == IPPROTO_TCP ? HOLD_ENDED : HOLD_NONE;
}

/* note_ended is for a tuple that a flow holds which has ended: the oldest one is kept in mind. */
static __always_inline void note_ended(struct packet *pkt, const struct flow *had)
{
	if (pkt->ended && pkt->ended <= had->last_seen)
		return;
	pkt->ended = had->last_seen;
	pkt->ended_port = pkt->key.dst_port;
}

/*
 * is_holder copies an entry of pkt->key, or NULL, to pkt->gone, and reports whether it is one:
 * another CPU may delete it any time, and its memory is another flow's soon. See goes.
 */
static __always_inline bool is_holder(struct packet *pkt, const struct flow *had, __u32 role)
{
	if (!had)
		return false;
	pkt->gone = *had;
	barrier();
	comes_as(had, role, &pkt->to);
	return same_tuple(&pkt->to, &pkt->key);
}

/* So many connections that may have ended are looked at, to make room for one. */
#define MAX_ENDED_TRIES 8

/*
 * make_room forgets connections that have ended until the one of the packet at ingress has its share
 * of flows, and reports whether it has. What was noted may have gone since, or go on. It is global,
 * so that the verifier looks at it once.
 */
__noinline int make_room(void)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	int i;

	for (i = 0; pkt && i < MAX_ENDED_TRIES; i++) {
		if (has_share(pkt->ip.key.proto))
			return true;
		if (bpf_map_pop_elem(&sl_ended, &pkt->key))
			return false;
		if (is_holder(pkt, bpf_map_lookup_elem(&sl_flows, &pkt->key), FLOW_FROM_CLIENT) &&
		    has_ended(pkt, &pkt->gone))
			forget_all(pkt);
	}
	return false;
}

/*
 * reserve puts the entry of the packet's flow that has this role into half_open, unless
 * another flow holds its tuple: if urgent, only a live one does; if not, one that has ended is
 * noted. A flow that loses its tuple is pkt->gone then: see evict. Two CPUs may want one tuple at
 * once: one gets it. It is for ingress; and global, so that the verifier looks at it once.
 */
__noinline int reserve(__u32 role, __u32 urgent)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	const struct flow *had;
	struct flow *f;
	__u64 over = 0; /* which flow is */
	enum hold hold;

	if (!pkt)
		return REASON_DROP_FLOW_TABLE;
	f = &pkt->flow;
	comes_as(f, role, &pkt->key);
	f->role = role;
	pkt->evicts = false;
	if (is_holder(pkt, half_open_at(&pkt->key), role)) {
		if (hold_of(pkt, &pkt->gone) != HOLD_NONE)
			return REASON_DROP_MASQUERADE_PORT;
		drop_half_open(&pkt->key);
		pkt->evicts = true;
	}
	if (is_holder(pkt, bpf_map_lookup_elem(&sl_flows, &pkt->key), role)) {
		hold = hold_of(pkt, &pkt->gone);
		if (hold == HOLD_ENDED && !urgent)
			note_ended(pkt, &pkt->gone);
		if (hold == HOLD_LIVE || (hold == HOLD_ENDED && !urgent))
			return REASON_DROP_MASQUERADE_PORT;
		pkt->evicts = true;
		over = pkt->gone.created;
	}
	note_entry(&pkt->key, role, pkt->now);
	switch (put_half_open(&pkt->key, f, BPF_NOEXIST)) {
	case 0:
		break;
	case -EEXIST:
		return REASON_DROP_MASQUERADE_PORT;
	default:
		return REASON_DROP_FLOW_TABLE;
	}
	count_flows(COUNT_HALF_OPEN_PUT, 1);
	/*
	 * Since we looked, another CPU may have taken the tuple and proven its flow: that is in flows
	 * before it leaves half_open to us. What is over goes: it would be found first.
	 */
	had = bpf_map_lookup_elem(&sl_flows, &pkt->key);
	if (had && had->created != over) {
		drop_half_open(&pkt->key);
		return REASON_DROP_MASQUERADE_PORT;
	}
	drop_flow(&pkt->key);
	return REASON_NEXT;
}

/*
 * put_opening puts an entry of pkt->flow into half_open, if the flow has one of this role, that
 * needs no reservation: nobody else can have its tuple.
 */
static __noinline int put_opening(struct packet *pkt, __u32 role)
{
	struct flow *f = &pkt->flow;

	if (!has_role(f, role))
		return REASON_NEXT;
	comes_as(f, role, &pkt->key);
	f->role = role;
	note_entry(&pkt->key, role, pkt->now);
	if (!put_half_open(&pkt->key, f, BPF_NOEXIST))
		count_flows(COUNT_HALF_OPEN_PUT, 1);
	else if (put_half_open(&pkt->key, f, BPF_ANY))
		return REASON_DROP_FLOW_TABLE;
	drop_flow(&pkt->key);
	return REASON_NEXT;
}

/*
 * evict is for after a reservation: a flow that has lost its tuple is forgotten, so that the
 * tables need no more room than there are tuples. What is left of an earlier flow of the same
 * client to the same address is replaced.
 */
static __always_inline void evict(struct packet *pkt)
{
	if (!pkt->evicts)
		return;
	pkt->evicts = false;
	tell_bytes(&pkt->gone);
	if (!is_same(&pkt->gone, &pkt->flow))
		forget_all(pkt);
}

#endif
