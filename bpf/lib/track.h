/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Tracking a flow: how each of its packets updates it. */
#ifndef SLUICE_TRACK_H
#define SLUICE_TRACK_H

#include "ending.h"
#include "evidence.h"
#include "pick.h"

/* next_state returns the state of an entry after a packet. check_ending handles a FIN of TCP. */
static __always_inline __u8 next_state(const struct flow *f, const struct packet *pkt)
{
	if (pkt->event == EVENT_INVALID)
		return f->state;
	if (pkt->event == EVENT_RESET)
		return FLOW_RESET;
	if (pkt->event == EVENT_FIN && f->state != FLOW_RESET && f->proto != IPPROTO_TCP)
		return FLOW_FIN;
	/* A side that continues after a reset has not accepted it, or begins anew: see reopen. */
	if (f->state == FLOW_RESET && (pkt->event == EVENT_NONE || pkt->event == EVENT_ACCEPT))
		return FLOW_OPEN;
	if (!is_new(f))
		return f->state;
	if (f->proto == IPPROTO_UDP)
		return FLOW_OPEN;
	return pkt->event == EVENT_OPEN ? f->state : FLOW_OPEN;
}

/*
 * is_confirmed_by reports whether a packet of f confirms its flow: the client's second segment of
 * TCP, which a forger of the first one cannot send; a packet of a backend that has received the
 * client's cookie of SCTP; or the answer to a datagram.
 */
static __always_inline bool is_confirmed_by(const struct flow *f, const struct packet *pkt)
{
	if (f->proto == IPPROTO_TCP)
		return f->role == FLOW_FROM_CLIENT &&
		       (f->state == FLOW_OPEN || f->state == FLOW_FIN);
	return is_reply(f) && (f->proto == IPPROTO_UDP || pkt->event == EVENT_NONE);
}

/* has_closed reports whether the side of an entry has closed, or reset the flow. */
static __always_inline bool has_closed(const struct flow *entry)
{
	return entry->state == FLOW_FIN || entry->state == FLOW_RESET;
}

/* uncount takes a flow out of its backend's load, unless it already is. */
static __always_inline void uncount(struct flow *from_client)
{
	if (!(from_client->flags & FLOW_COUNTED))
		return;
	from_client->flags &= ~FLOW_COUNTED;
	add_flows(from_client->backend_id, -1);
}

/* confirm moves a flow from half_open to flows, if its protocol has a share left there. */
static __noinline int confirm(struct packet *pkt, const struct flow *f)
{
	if (!has_share(f->proto))
		return 0;
	confirm_client(f, pkt->now);
	pkt->flow = *f;
	pkt->flow.last_seen = pkt->now;
	pkt->flow.bytes = 0;
	put_back_all(pkt, true);
	return 0;
}

/*
 * touch updates the entry that pkt->flow has in a role, if it still exists: it has been seen now,
 * and gets more flags. It is global, so that the verifier walks it once.
 */
__noinline int touch(__u32 hook, __u32 role, __u32 flags)
{
	struct packet *pkt = packet_at(hook);
	struct flow *entry;

	if (!pkt)
		return 0;
	entry = entry_of(pkt, &pkt->flow, role);
	if (!entry)
		return 0;
	entry->last_seen = pkt->now;
	if (flags & ~entry->flags) /* a store could undo what another CPU has just changed */
		entry->flags |= flags;
	return 0;
}

/* touch_all touches the entries of a flow of which it leaves a copy in pkt->flow. */
static __noinline int touch_all(struct packet *pkt, const struct flow *f, __u32 flags)
{
	__u32 hook = pkt->ip.key.hook;

	pkt->flow = *f;
	touch(hook, FLOW_FROM_CLIENT, flags);
	touch(hook, FLOW_TO_CLIENT, flags);
	touch(hook, FLOW_TO_BACKEND, flags);
	touch(hook, FLOW_FROM_BACKEND, flags);
	return 0;
}

/*
 * refresh runs about once a second for each flow: it puts back the entries that the flow has lost.
 */
static __noinline int refresh(struct packet *pkt, struct flow *f, bool half_open)
{
	int put;

	f->last_seen = pkt->now;
	report_bytes(f);
	/* One direction may be idle. */
	if (half_open || f->proto == IPPROTO_UDP)
		touch_all(pkt, f, 0);
	if (half_open)
		return 0;
	pkt->flow = *f;
	put = put_back_all(pkt, has_share(f->proto));
	if (put)
		count_flows(COUNT_FLOWS_REPAIRED, put);
	return 0;
}

/*
 * has_ended reports whether both sides of pkt->gone, for the packet at a hook, have ended, or one
 * has reset it. Of TCP, that is certain only if the flow is over: the reset of one side may be forged while the other
 * has closed. It is global, so that the verifier walks it once.
 */
__noinline int has_ended(__u32 hook)
{
	struct packet *pkt = packet_at(hook);
	const struct flow *f, *from, *to;

	if (!pkt)
		return false;
	f = &pkt->gone;
	if (f->proto == IPPROTO_TCP)
		return !!(f->ending & FLOW_OVER);
	from = entry_of(pkt, f, FLOW_FROM_CLIENT);
	to = answers_of(pkt, f);
	if (f->state == FLOW_RESET || !from || !to)
		return f->state == FLOW_RESET;
	return from->state == FLOW_RESET || to->state == FLOW_RESET ||
	       (has_closed(from) && has_closed(to));
}

/*
 * update_load is called when a side of a flow has changed its state: the flow is in its backend's
 * load as long as it has not ended, nor seems to be reset.
 */
static __noinline int update_load(struct packet *pkt, const struct flow *f)
{
	struct flow *from = entry_of(pkt, f, FLOW_FROM_CLIENT);

	if (!from)
		return 0;
	pkt->gone = *f;
	if (f->state == FLOW_RESET)
		uncount(from);
	if (has_ended(pkt->ip.key.hook)) {
		uncount(from);
		comes_as(f, FLOW_FROM_CLIENT, &pkt->key);
		bpf_map_push_elem(&sl_ended, &pkt->key, BPF_EXIST);
	} else if (f->state != FLOW_RESET && !(from->flags & FLOW_COUNTED)) {
		from->flags |= FLOW_COUNTED;
		add_flows(from->backend_id, 1);
	}
	return 0;
}

/* answers_role returns the role of the entry at which the answers of the backend of f arrive. */
static __always_inline __u8 answers_role(const struct flow *f)
{
	return is_masqueraded(f) ? FLOW_FROM_BACKEND : FLOW_TO_CLIENT;
}

/*
 * note_first_answer notes what the first answer to an unconfirmed flow shows of its backend. It is
 * global, so that the verifier walks it once.
 */
__noinline int note_first_answer(__u32 hook)
{
	struct packet *pkt = packet_at(hook);
	const struct flow *f;
	__u32 client;

	if (!pkt)
		return 0;
	f = &pkt->flow;
	client = client_of(f);
	if (pkt->event == EVENT_RESET)
		return note_refusal(f->backend_id, f->service_port_id, client, HEALTH_REFUSED,
				    pkt->now);
	if (f->proto == IPPROTO_UDP)
		return note_datagram(f->backend_id, f->service_port_id, client, f->created,
				     pkt->now);
	return note_success(f->backend_id, f->service_port_id, client, f->created, pkt->now);
}

/* track updates the flow of the entry f by a packet. */
static __always_inline void track(struct packet *pkt, struct flow *f, bool half_open)
{
	bool at_client = f->role == FLOW_FROM_CLIENT || f->role == FLOW_TO_CLIENT || is_turned(f);
	bool first = config_heal && half_open && f->role == answers_role(f) &&
		     f->state == FLOW_NEW && !is_foreign(f);
	__u8 over = f->ending & FLOW_OVER;
	bool had_closed = has_closed(f);
	__u8 state;

	if (f->proto == IPPROTO_TCP)
		follow_segment(pkt, f, half_open);
	else if (f->proto == IPPROTO_SCTP)
		follow_chunk(pkt, f, half_open);
	if (first && pkt->event != EVENT_INVALID) {
		pkt->flow = *f;
		note_first_answer(pkt->ip.key.hook);
	}
	state = next_state(f, pkt);
	if (f->state != state)
		f->state = state;
	if (at_client)
		f->bytes += pkt->ip.end - pkt->ip.l3;
	if (at_client && (had_closed != has_closed(f) || over != (f->ending & FLOW_OVER)))
		update_load(pkt, f);
	/*
	 * The first packet leaves with the masquerade: from now on there are replies to it. Where
	 * netfilter masquerades first (flannel), no packet does, and what arrives at a masquerade
	 * port belongs to netfilter.
	 */
	if (f->role == FLOW_TO_BACKEND && !(f->flags & FLOW_SENT))
		touch_all(pkt, f, FLOW_SENT);
	if (elapsed(pkt->now, f->last_seen) > REFRESH_NS)
		refresh(pkt, f, half_open);
	if (half_open && is_confirmed_by(f, pkt))
		confirm(pkt, f);
}

/*
 * release_counts takes an entry that is about to be deleted out of the counts, and is false if it
 * is none of f.
 */
static __always_inline bool release_counts(struct flow *entry, const struct flow *f, __u32 role)
{
	if (!entry || entry->created != f->created)
		return false;
	if (role == FLOW_FROM_CLIENT)
		uncount(entry);
	report_bytes(entry);
	return true;
}

/*
 * forget deletes the entry that pkt->gone has in this role, for the packet at a hook. It is
 * global, so that the verifier walks it once.
 */
__noinline int forget(__u32 hook, __u32 role)
{
	struct packet *pkt = packet_at(hook);

	if (!pkt || !has_role(&pkt->gone, role))
		return 0;
	comes_as(&pkt->gone, role, &pkt->key);
	if (release_counts(half_open_at(&pkt->key), &pkt->gone, role))
		drop_half_open(&pkt->key);
	if (release_counts(bpf_map_lookup_elem(&sl_flows, &pkt->key), &pkt->gone, role))
		drop_flow(&pkt->key);
	return 0;
}

/* forget_all deletes all entries of pkt->gone, whose tuple another flow gets. */
static __always_inline void forget_all(struct packet *pkt)
{
	__u32 hook = pkt->ip.key.hook;

	forget(hook, FLOW_FROM_CLIENT);
	forget(hook, FLOW_TO_CLIENT);
	forget(hook, FLOW_TO_BACKEND);
	forget(hook, FLOW_FROM_BACKEND);
}

/*
 * is_direct_connection reports whether a packet from the stack opens or accepts a connection of a
 * client to a backend itself, with a tuple of f, and f, of which it leaves a copy in pkt->gone, has
 * ended, or its client has since started another flow. For a flow of a Service, ingress would have
 * replaced the entries.
 */
static __always_inline bool is_direct_connection(struct packet *pkt, const struct flow *f)
{
	bool opens = pkt->event == EVENT_OPEN && f->role == FLOW_TO_BACKEND;
	bool accepts = pkt->event == EVENT_ACCEPT && f->role == FLOW_TO_CLIENT;
	const struct flow *from;

	if (!opens && !accepts)
		return false;
	pkt->gone = *f;
	if (has_ended(HOOK_EGRESS))
		return true;
	comes_as(f, FLOW_FROM_CLIENT, &pkt->key);
	from = half_open_at(&pkt->key) ?: bpf_map_lookup_elem(&sl_flows, &pkt->key);
	return from && from->created != f->created;
}

/*
 * has_backend reports whether the backend of a flow is in the maps, which includes backends that
 * drain.
 */
static __always_inline bool has_backend(const struct flow *f)
{
	const struct backend *be = backend_at(f->backend_id);

	return be && be->service_port_id == f->service_port_id;
}

/*
 * goes_direct reports whether a flow is one with the backend itself: see open_beside. An exchange has no Service then
 * that the backend could leave, and keeps its port as long as its flow is there.
 */
static __always_inline bool goes_direct(const struct flow *f)
{
	return addr_equal(&f->original_dst, &f->backend);
}

/*
 * starts_new_flow reports whether this packet, though it has an entry, is the first one of a new
 * flow, which gets a backend of its own: the old one has lost its backend or, if it is half open,
 * an entry of its replies, or it has ended.
 *
 * UDP has ended after its timeout, SCTP when one side has closed, and TCP when both sides certainly
 * have. If one only seems to have reset it, the SYN goes to the backend, whose answer shows that: see reopen and
 * check_reset.
 */
static __noinline bool starts_new_flow(struct packet *pkt, struct flow *f, bool half_open)
{
	__u64 limit = half_open ? config_udp_unanswered_ns : config_udp_idle_ns;
	bool udp = f->proto == IPPROTO_UDP;
	const struct flow *answers;
	__u64 idle;

	if (pkt->event != EVENT_OPEN || f->role != FLOW_FROM_CLIENT)
		return false;
	if (half_open &&
	    (!answers_of(pkt, f) || (is_masqueraded(f) && !entry_of(pkt, f, FLOW_FROM_BACKEND))))
		return true;
	if (udp && (goes_direct(f) || !is_due(f, pkt->now)))
		return false;
	if (udp)
		f->ack = checked_at(pkt->now);
	idle = elapsed(pkt->now, f->last_seen);
	if (f->ending & FLOW_OVER || !has_backend(f))
		return true;
	if (udp && idle <= limit)
		return false;

	answer_comes_as(f, &pkt->key);
	answers = half_open ? half_open_at(&pkt->key) : bpf_map_lookup_elem(&sl_flows, &pkt->key);
	if (udp)
		return !answers || elapsed(pkt->now, answers->last_seen) > limit;
	if (f->proto == IPPROTO_SCTP)
		return has_closed(f) || (answers && has_closed(answers));
	return false;
}

#endif
