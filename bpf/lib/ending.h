/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * How TCP flows end, by the numbers of their segments.
 *
 * Anybody who knows addresses and ports can send a FIN or an RST. What we believe of them
 * makes the tuple of a flow free for another one, at once, and does nothing else: no packet is
 * dropped or led elsewhere for it, and a later segment of that side takes it back. So we
 * believe what must have ended the connection for both sides:
 *
 * - FINs of both, each the end of all that its side has sent, and acknowledged by the other.
 * - An RST that has the number of the other side's last acknowledgement, as RFC 5961 wants it;
 *   or, of a refused connection, one that acknowledges the SYN.
 *
 * An entry follows the side whose packets come to it. One that was made anew, because a full
 * table had lost it, knows nothing of what was before; of a flow whose answers go another way, nothing
 * is known of that side. Then time has to tell, as it does for an RST at the end of
 * what its side has sent: see claim.h.
 *
 * Two CPUs may follow one side at once: what one of them writes can get lost. Then less is believed.
 */
#ifndef SLUICE_ENDING_H
#define SLUICE_ENDING_H

#include "flow.h"

/*
 * More than so many bytes are hardly under way at once: a number that is further ahead is that
 * of another connection, of the same tuple before.
 */
#define MAX_AHEAD (1U << 26)

/* is_ahead compares numbers that wrap around. */
static __always_inline bool is_ahead(__u32 a, __u32 b)
{
	return a - b - 1 < MAX_AHEAD;
}

/* is_reply is true of the entries whose packets come from the backend. */
static __always_inline bool is_reply(const struct flow *f)
{
	return f->role == FLOW_TO_CLIENT || f->role == FLOW_FROM_BACKEND;
}

/*
 * other_side returns the entry of f of the packets the other way, on the same leg: they come as
 * the reverse of what the packet at hand becomes.
 */
static __always_inline struct flow *other_side(struct packet *pkt, const struct flow *f)
{
	reversed(&pkt->to, &pkt->key);
	pkt->key.proto = pkt->ip.key.proto;
	pkt->key.hook = HOOK_INGRESS + HOOK_EGRESS - pkt->ip.key.hook;
	pkt->key.reserved = 0;
	return entry_at(pkt, f);
}

static __always_inline bool have_ended(const struct flow *f, const struct flow *other)
{
	if ((f->ending | other->ending) & FLOW_CUT)
		return true;
	return f->ending & other->ending & FLOW_LAST && f->ack == other->end &&
	       other->ack == f->end;
}

/* judge_reset believes an RST of the side of f, doubts it, or leaves it to time. */
static __always_inline void judge_reset(struct packet *pkt, struct flow *f,
					const struct flow *other)
{
	const struct segment *tcp = &pkt->tcp;

	if (!(other->end | other->ack))
		return;
	if (other->ack ? tcp->seq == other->ack : tcp->acks && tcp->ack == other->end)
		f->ending |= FLOW_CUT;
	else if (f->end && tcp->seq != f->end)
		pkt->signal = SIGNAL_DOUBTED;
}

/*
 * conclude notes in both entries whether both sides of a flow have ended. If the memory of one
 * is another flow's by now, that must not be the one that is over.
 */
static __noinline int conclude(struct packet *pkt, struct flow *f)
{
	struct flow *other = other_side(pkt, f), *request, *reply;
	__u64 created = f->created;
	__u8 over = 0;

	if (!other)
		return 0;
	if (pkt->signal == SIGNAL_RESET)
		judge_reset(pkt, f, other);
	request = is_reply(f) ? other : f;
	reply = is_reply(f) ? f : other;
	if (have_ended(request, reply)) {
		over = FLOW_OVER | (reply->ending & FLOW_FIRST ? FLOW_REMEMBERED : 0);
		reply->ending &= ~FLOW_STAMPED;
		reply->ending |= request->ending & FLOW_STAMPED;
		reply->stamp = request->stamp;
	}
	request->ending = (request->ending & ~(FLOW_OVER | FLOW_REMEMBERED)) | over;
	reply->ending = (reply->ending & ~(FLOW_OVER | FLOW_REMEMBERED)) | over;
	barrier();
	if (f->created != created)
		f->ending = 0;
	if (other->created != created)
		other->ending = 0;
	return 0;
}

/* note_numbers takes down how far the side of f has come, and that its FIN is the end of that. */
static __always_inline void note_numbers(struct packet *pkt, struct flow *f)
{
	const struct segment *tcp = &pkt->tcp;
	__u8 had = f->ending;

	f->ending = had & ~FLOW_CUT;
	if (tcp->syn || !f->end || is_ahead(tcp->end, f->end)) {
		f->end = tcp->end;
		f->ending = tcp->fin;
		f->stamp = tcp->stamp;
	} else if (tcp->fin) {
		if (tcp->end == f->end)
			f->ending |= tcp->fin;
		else
			pkt->signal = SIGNAL_DOUBTED;
	}
	if (tcp->acks && (tcp->syn || !f->ack || is_ahead(tcp->ack, f->ack))) {
		/* FLOW_FIRST, if this is not the FIN itself. */
		f->ending |= (had & f->ending & FLOW_LAST) * FLOW_FIRST;
		f->ack = tcp->ack;
	}
}

/* follow_segment is for each segment of the side of f. */
static __always_inline void follow_segment(struct packet *pkt, struct flow *f)
{
	__u8 had = f->ending;

	if (pkt->signal != SIGNAL_RESET)
		note_numbers(pkt, f);
	if (pkt->signal == SIGNAL_RESET || had | f->ending)
		conclude(pkt, f);
}

#endif
