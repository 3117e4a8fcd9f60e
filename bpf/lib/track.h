/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Following a flow: what each of its packets changes about it. */
#ifndef SLUICE_TRACK_H
#define SLUICE_TRACK_H

#include "affinity.h"
#include "backend.h"
#include "ending.h"
#include "load.h"

/* next_state is what a packet makes of an entry's state. What a FIN of TCP does, conclude knows. */
static __always_inline __u8 next_state(const struct flow *f, const struct packet *pkt)
{
	if (pkt->signal == SIGNAL_DOUBTED)
		return f->state;
	if (pkt->signal == SIGNAL_RESET)
		return FLOW_RESET;
	if (pkt->signal == SIGNAL_FIN && f->state != FLOW_RESET && f->proto != IPPROTO_TCP)
		return FLOW_FIN;
	/* Whoever goes on after a reset has not taken it for one. */
	if (f->state == FLOW_RESET && pkt->signal == SIGNAL_NONE)
		return FLOW_OPEN;
	if (f->state != FLOW_NEW)
		return f->state;
	if (f->proto == IPPROTO_UDP)
		return FLOW_OPEN;
	return pkt->signal == SIGNAL_FIRST ? FLOW_NEW : FLOW_OPEN;
}

/*
 * is_proven says that a packet of f shows that its flow is one: it is the client's second segment
 * of TCP, which no one can send who forged the first; what a backend sends that has got the
 * client's cookie of SCTP; or the answer to a datagram.
 */
static __always_inline bool is_proven(const struct flow *f, const struct packet *pkt)
{
	if (f->proto == IPPROTO_TCP)
		return f->role == FLOW_FROM_CLIENT &&
		       (f->state == FLOW_OPEN || f->state == FLOW_FIN);
	return is_reply(f) && (f->proto == IPPROTO_UDP || pkt->signal == SIGNAL_NONE);
}

/* is_silent says that a side of a flow has said its last. */
static __always_inline bool is_silent(const struct flow *entry)
{
	return entry->state == FLOW_FIN || entry->state == FLOW_RESET;
}

/* uncount takes a flow out of its backend's load, unless it is already. */
static __always_inline void uncount(struct flow *from_client)
{
	if (!(from_client->flags & FLOW_COUNTED))
		return;
	from_client->flags &= ~FLOW_COUNTED;
	add_flows(from_client->backend_id, -1);
}

/* prove moves a flow from half_open to flows, if it has its share of that. */
static __noinline int prove(struct packet *pkt, const struct flow *f)
{
	if (!has_share(f->proto))
		return 0;
	prove_client(f, pkt->now);
	pkt->flow = *f;
	pkt->flow.last_seen = pkt->now;
	pkt->flow.bytes = 0;
	put_back_all(pkt);
	release_all(pkt);
	return 0;
}

static __noinline int touch(struct packet *pkt, const struct flow *f, __u32 role)
{
	struct flow *entry = entry_of(pkt, f, role);

	if (entry)
		entry->last_seen = pkt->now;
	return 0;
}

/* keep_all keeps the tuples of a flow of which one side is silent, as far as it has them. */
static __always_inline void keep_all(struct packet *pkt, const struct flow *f)
{
	touch(pkt, f, FLOW_FROM_CLIENT);
	touch(pkt, f, FLOW_TO_CLIENT);
	touch(pkt, f, FLOW_TO_BACKEND);
	touch(pkt, f, FLOW_FROM_BACKEND);
}

/* is_robbed says that a half-open flow has lost a tuple, perhaps to another one. */
static __always_inline bool is_robbed(struct packet *pkt, const struct flow *f)
{
	return !answers_of(pkt, f) || (is_masqueraded(f) && !entry_of(pkt, f, FLOW_FROM_BACKEND));
}

/* refresh is for now and then: what another entry has lost is put back. */
static __noinline int refresh(struct packet *pkt, struct flow *f, bool half_open)
{
	int put;

	f->last_seen = pkt->now;
	tell_bytes(f);
	if (half_open || f->proto == IPPROTO_UDP)
		keep_all(pkt, f);
	if (half_open)
		return 0;
	pkt->flow = *f;
	put = put_back_all(pkt);
	if (put)
		count_flows(COUNT_FLOWS_REPAIRED, put);
	return 0;
}

/* has_ended says that both sides of a flow have said their last, or one has reset it. */
static __noinline bool has_ended(struct packet *pkt, const struct flow *f)
{
	const struct flow *from = entry_of(pkt, f, FLOW_FROM_CLIENT);
	const struct flow *to = answers_of(pkt, f);

	if (f->state == FLOW_RESET || !from || !to)
		return f->state == FLOW_RESET;
	return from->state == FLOW_RESET || to->state == FLOW_RESET ||
	       (is_silent(from) && is_silent(to));
}

/* is_replaced says that the client of a flow has begun another one in its place. */
static __always_inline bool is_replaced(struct packet *pkt, const struct flow *f)
{
	const struct flow *from;

	comes_as(f, FLOW_FROM_CLIENT, &pkt->key);
	from = half_open_at(&pkt->key);
	if (!from)
		from = bpf_map_lookup_elem(&sl_flows, &pkt->key);
	return from && from->created != f->created;
}

/*
 * settle is for a side of a flow that has changed its state: as long as the flow has not
 * ended, it is in its backend's load.
 */
static __noinline int settle(struct packet *pkt, const struct flow *f)
{
	struct flow *from = entry_of(pkt, f, FLOW_FROM_CLIENT);

	if (!from)
		return 0;
	if (has_ended(pkt, f)) {
		uncount(from);
		comes_as(f, FLOW_FROM_CLIENT, &pkt->key);
		bpf_map_push_elem(&sl_ended, &pkt->key, BPF_EXIST);
	} else if (!(from->flags & FLOW_COUNTED)) {
		from->flags |= FLOW_COUNTED;
		add_flows(from->backend_id, 1);
	}
	return 0;
}

static __noinline int mark_sent(struct packet *pkt, const struct flow *f, __u32 role)
{
	struct flow *entry = entry_of(pkt, f, role);

	if (entry)
		entry->flags |= FLOW_SENT;
	return 0;
}

/*
 * note_sent is for the first packet that leaves as the masquerade: from now on there
 * are replies to it. Where netfilter masquerades before we do (flannel), there never
 * are, and what comes back to a port of ours is netfilter's.
 */
static __always_inline void note_sent(struct packet *pkt, const struct flow *f)
{
	mark_sent(pkt, f, FLOW_FROM_CLIENT);
	mark_sent(pkt, f, FLOW_TO_CLIENT);
	mark_sent(pkt, f, FLOW_FROM_BACKEND);
	mark_sent(pkt, f, FLOW_TO_BACKEND);
}

/* track follows a packet of the entry f. */
static __always_inline void track(struct packet *pkt, struct flow *f, bool half_open)
{
	bool at_client = f->role == FLOW_FROM_CLIENT || f->role == FLOW_TO_CLIENT || is_turned(f);
	__u8 over = f->ending & FLOW_OVER;
	bool was_silent = is_silent(f);
	__u8 state;

	if (f->proto == IPPROTO_TCP)
		follow_segment(pkt, f, half_open);
	else if (f->proto == IPPROTO_SCTP)
		follow_chunk(pkt, f, half_open);
	state = next_state(f, pkt);
	if (f->state != state)
		f->state = state;
	if (at_client)
		f->bytes += pkt->ip.end - pkt->ip.l3;
	if (at_client && (was_silent != is_silent(f) || over != (f->ending & FLOW_OVER)))
		settle(pkt, f);
	if (f->role == FLOW_TO_BACKEND && !(f->flags & FLOW_SENT))
		note_sent(pkt, f);
	if (idle_of(f, pkt->now) > REFRESH_NS)
		refresh(pkt, f, half_open);
	if (half_open && is_proven(f, pkt))
		prove(pkt, f);
}

/* gives_up is for an entry that is about to be deleted: true if it is one of f, and settled. */
static __always_inline bool gives_up(struct flow *entry, const struct flow *f, __u32 role)
{
	if (!entry || entry->created != f->created)
		return false;
	if (role == FLOW_FROM_CLIENT)
		uncount(entry);
	tell_bytes(entry);
	return true;
}

/*
 * forget deletes the entry that pkt->gone has in this role, for the packet at a hook. It is
 * global, so that the verifier looks at it once.
 */
__noinline int forget(__u32 hook, __u32 role)
{
	struct packet *pkt = packet_at(hook);

	if (!pkt || !has_role(&pkt->gone, role))
		return 0;
	comes_as(&pkt->gone, role, &pkt->key);
	if (gives_up(half_open_at(&pkt->key), &pkt->gone, role))
		drop_half_open(&pkt->key);
	if (gives_up(bpf_map_lookup_elem(&sl_flows, &pkt->key), &pkt->gone, role))
		drop_flow(&pkt->key);
	return 0;
}

/* forget_all is for pkt->gone, whose tuple somebody else has now. */
static __always_inline void forget_all(struct packet *pkt)
{
	__u32 hook = pkt->ip.key.hook;

	forget(hook, FLOW_FROM_CLIENT);
	forget(hook, FLOW_TO_CLIENT);
	forget(hook, FLOW_TO_BACKEND);
	forget(hook, FLOW_FROM_BACKEND);
}

/* answers_in returns what answers_of does, or NULL, as it is in one of both tables. */
static __always_inline const struct flow *answers_in(struct packet *pkt, const struct flow *f,
						     bool half_open)
{
	answer_comes_as(f, &pkt->key);
	return half_open ? half_open_at(&pkt->key) : bpf_map_lookup_elem(&sl_flows, &pkt->key);
}

/* has_backend says whether the backend of a flow is in the maps, also if it drains. */
static __always_inline bool has_backend(const struct flow *f)
{
	const struct backend *be = backend_at(f->backend_id);

	return be && be->service_port_id == f->service_port_id;
}

/*
 * is_over says that both sides of a connection have ended it, or that one of them has reset it, as
 * it seems, and it has not gone on for a while. An SCTP association that one side ends is over.
 */
static __always_inline bool is_over(struct packet *pkt, const struct flow *f, bool half_open)
{
	const struct flow *answers;

	if (f->ending & FLOW_OVER)
		return true;
	answers = answers_in(pkt, f, half_open);
	if (f->proto == IPPROTO_SCTP)
		return is_silent(f) || (answers && is_silent(answers));
	if (f->state != FLOW_RESET && !(answers && answers->state == FLOW_RESET))
		return false;
	return idle_of(f, pkt->now) > CLOSING_NS &&
	       !(answers && idle_of(answers, pkt->now) <= CLOSING_NS);
}

/* is_idle says that nobody has used a UDP flow for so long that it is over. */
static __always_inline bool is_idle(struct packet *pkt, const struct flow *f, bool half_open)
{
	__u64 limit = half_open ? config_udp_unanswered_ns : config_udp_idle_ns;
	const struct flow *answers;

	if (idle_of(f, pkt->now) <= limit)
		return false;
	answers = answers_in(pkt, f, half_open);
	return !answers || idle_of(answers, pkt->now) > limit;
}

/*
 * begins_anew says that this packet, though it has an entry, is the first one of
 * another flow: what the client dials now is chosen now.
 */
static __noinline bool begins_anew(struct packet *pkt, const struct flow *f, bool half_open)
{
	if (pkt->signal != SIGNAL_FIRST || f->role != FLOW_FROM_CLIENT)
		return false;
	if (half_open && is_robbed(pkt, f))
		return true;
	if (f->proto == IPPROTO_UDP)
		return idle_of(f, pkt->now) > REFRESH_NS &&
		       (is_idle(pkt, f, half_open) || !has_backend(f));
	return is_over(pkt, f, half_open) || !has_backend(f);
}

#endif
