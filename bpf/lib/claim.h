/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Reserving a tuple: a new flow takes one that no flow holds, or that of a flow that has ended. */
#ifndef SLUICE_CLAIM_H
#define SLUICE_CLAIM_H

#include "track.h"

/*
 * After this time without a packet, another flow may take the tuple of an entry that has seen only
 * first packets. Otherwise a flood of first packets would hold all ports of a masquerade.
 */
#define OPENING_NS (3 * 1000000000ULL)

/* How long Linux keeps TIME_WAIT, and the second by which last_seen may lag behind. */
#define TIME_WAIT_NS (61 * 1000000000ULL)

/* How an entry holds its tuple. */
enum hold {
	HOLD_NONE = 0, /* the tuple is free */
	HOLD_ENDED = 1, /* it has ended, but its peer may still be in TIME_WAIT or about to send */
	HOLD_LIVE = 2,
};

/*
 * is_same reports whether two entries belong to flows of one client port to one original
 * destination.
 */
static __always_inline bool is_same(const struct flow *a, const struct flow *b)
{
	return addr_equal(&a->client, &b->client) && a->client_port == b->client_port &&
	       addr_equal(&a->original_dst, &b->original_dst) &&
	       a->original_port == b->original_port;
}

/*
 * is_in_time_wait reports whether the backend, which closed the old flow first, would treat the
 * SYN at hand as a segment of that connection. It would answer with an ACK, the client with an
 * RST, and the client would only try again after a second. In TIME_WAIT, Linux accepts a SYN if
 * its timestamp is newer (RFC 6191) or, without timestamps, its sequence number. Timestamps of one
 * client to one address grow. The backend's last acknowledgement is the sequence number at which
 * the old connection ended.
 */
static __always_inline bool is_in_time_wait(const struct packet *pkt, const struct flow *had)
{
	__s8 newer = pkt->tcp.stamp - had->stamp;

	if (!(had->ending & FLOW_TIME_WAIT) || idle_of(had, pkt->now) > TIME_WAIT_NS)
		return false;
	if (!(had->ending & FLOW_STAMPED) || !pkt->tcp.stamped)
		return (__s32)(pkt->tcp.seq - had->ack) <= 0;
	return newer < 0 || (!newer && !(addr_equal(&had->client, &pkt->flow.client) &&
					 addr_equal(&had->original_dst, &pkt->flow.original_dst)));
}

/* hold_on_tuple returns how an entry holds its tuple against the flow of the packet. */
static __always_inline enum hold hold_on_tuple(const struct packet *pkt, const struct flow *had)
{
	__u64 idle;

	if (is_same(had, &pkt->flow))
		return HOLD_NONE;
	idle = idle_of(had, pkt->now);
	if (had->proto == IPPROTO_UDP)
		return idle > config_udp_idle_ns ? HOLD_NONE : HOLD_LIVE;
	if (had->ending & FLOW_OVER)
		return is_in_time_wait(pkt, had) ? HOLD_ENDED : HOLD_NONE;
	if (had->state == FLOW_NEW)
		return idle > OPENING_NS ? HOLD_NONE : HOLD_LIVE;
	if (had->state == FLOW_OPEN || idle <= CLOSING_NS)
		return HOLD_LIVE;
	/* The other side may go on for long after a FIN. */
	return had->state == FLOW_FIN && had->proto == IPPROTO_TCP ? HOLD_ENDED : HOLD_NONE;
}

/*
 * note_ended records the tuple at hand, whose flow has ended. Of several, the one that has been
 * idle the longest is kept.
 */
static __always_inline void note_ended(struct packet *pkt, const struct flow *had)
{
	if (pkt->ended && pkt->ended <= had->last_seen)
		return;
	pkt->ended = had->last_seen;
	pkt->ended_port = pkt->key.dst_port;
}

/*
 * is_holder copies had, an entry at pkt->key or NULL, to pkt->gone, and reports whether it is an
 * entry of that key: another CPU may delete it at any time, and the kernel soon gives its memory
 * to another flow. See goes.
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

/* How many connections that may have ended are checked to make room for one. */
#define MAX_ENDED_TRIES 8

/*
 * make_room forgets connections that have ended until that of the packet at ingress has its share
 * of flows, and reports whether it has. A connection that was listed as ended may be gone by now,
 * or have continued. It is global, so that the verifier walks it once.
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
 * reserve puts the entry that the packet's flow has in this role into half_open, unless another
 * flow holds its tuple. If urgent, only a live flow holds it; otherwise a flow that has ended
 * holds it as well, and is recorded by note_ended. A flow that loses its tuple is in pkt->gone
 * afterwards: see evict. If two CPUs want one tuple at once, one of them gets it. It is for
 * ingress, and global, so that the verifier walks it once.
 */
__noinline int reserve(__u32 role, __u32 urgent)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	const struct flow *had;
	struct flow *f;
	__u64 over = 0; /* when the flow that has ended was created */
	enum hold hold;

	if (!pkt)
		return REASON_DROP_FLOW_TABLE;
	f = &pkt->flow;
	comes_as(f, role, &pkt->key);
	f->role = role;
	pkt->evicts = false;
	if (is_holder(pkt, half_open_at(&pkt->key), role)) {
		if (hold_on_tuple(pkt, &pkt->gone) != HOLD_NONE)
			return REASON_DROP_MASQUERADE_PORT;
		drop_half_open(&pkt->key);
		pkt->evicts = true;
	}
	if (is_holder(pkt, bpf_map_lookup_elem(&sl_flows, &pkt->key), role)) {
		hold = hold_on_tuple(pkt, &pkt->gone);
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
	 * Since the lookup, another CPU may have taken the tuple and confirmed its flow, which is
	 * in flows before it leaves half_open. An entry that has ended is deleted, because flows is
	 * looked up first.
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
 * put_opening puts the entry that pkt->flow has in this role, if any, into half_open. The entry
 * needs no reservation, because no other flow can have its tuple.
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
 * evict is called after a reservation. It forgets the flow that has lost its tuple, so that the
 * tables need no more room than there are tuples. An earlier flow of the same client to the same
 * address is replaced entry by entry.
 */
static __always_inline void evict(struct packet *pkt)
{
	if (!pkt->evicts)
		return;
	pkt->evicts = false;
	report_bytes(&pkt->gone);
	if (!is_same(&pkt->gone, &pkt->flow))
		forget_all(pkt);
}

#endif
