/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * How flows of TCP and SCTP end, by the numbers of segments and the tags of packets.
 *
 * Anybody who knows addresses and ports can send a SYN, a FIN or an RST. What we believe of them
 * makes the tuple of a flow free for another one, at once, and does nothing else: no packet is
 * dropped or led elsewhere for it, and a later segment of that side takes it back. So we
 * believe what must have ended the connection for both sides:
 *
 * - FINs of both, each the end of all that its side has sent, and acknowledged by the other.
 * - An RST that has the number of the other side's last acknowledgement, as RFC 5961 wants it;
 *   or, of a refused connection, one that acknowledges the SYN.
 *
 * A SYN on a flow that is not over goes to the backend that has it. If the client has forgotten
 * the connection, the backend's answer makes it send such an RST, and its next SYN begins anew.
 *
 * An entry follows the side whose packets come to it. One that was made anew, because a full
 * table had lost it, knows nothing of what was before. Then time has to tell, as it does for an
 * RST at the end of what its side has sent: see claim.h.
 *
 * The packets of an SCTP association bear a tag that the side has asked for which gets them: then
 * we believe them.
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

/* How much a backend may send before it knows that the client is there, and a client in its SYN. */
#define MAX_EARLY (1U << 16)

/*
 * After this time without a packet a flow is over that one side has reset by an RST whose
 * number the other side may not take, and another flow may take the tuple of one that is closing.
 */
#define CLOSING_NS (10 * 1000000000ULL)

/* is_ahead compares numbers that wrap around. */
static __always_inline bool is_ahead(__u32 a, __u32 b)
{
	return a - b - 1 < MAX_AHEAD;
}

/* is_near reports whether a may be a number of the connection that has come to b, if that is known. */
static __always_inline bool is_near(__u32 a, __u32 b)
{
	return !b || a - b + MAX_AHEAD < 2 * MAX_AHEAD;
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
	pkt->key.hook = is_turned(f) ? HOOK_INGRESS : HOOK_INGRESS + HOOK_EGRESS - pkt->ip.key.hook;
	pkt->key.reserved = 0;
	return entry_at(pkt, f);
}

/* is_acknowledged reports whether the FIN of the side of f has come to the other side. */
static __always_inline bool is_acknowledged(const struct flow *f, const struct flow *other)
{
	return f->ending & FLOW_LAST && other->ack == f->end;
}

static __always_inline bool have_ended(const struct flow *f, const struct flow *other)
{
	if ((f->ending | other->ending) & FLOW_CUT)
		return true;
	return is_acknowledged(f, other) && is_acknowledged(other, f);
}

/*
 * judge_reset believes an RST of the side of f, doubts it, or leaves it to time. other is the
 * entry of the other side, or NULL.
 */
static __always_inline void judge_reset(struct packet *pkt, struct flow *f,
					const struct flow *other)
{
	const struct segment *tcp = &pkt->tcp;

	if (other && other->ack && tcp->seq == other->ack)
		f->ending |= FLOW_CUT;
	else if (other && !other->ack && other->end && tcp->acks && tcp->ack == other->end)
		f->ending |= FLOW_CUT;
	else if (f->state == FLOW_NEW || !f->end || tcp->seq != f->end)
		pkt->signal = SIGNAL_DOUBTED;
}

/* note_silence notes whether the side of f has said its last, and if the other one has yet to agree. */
static __always_inline void note_silence(struct flow *f, struct flow *other)
{
	bool silent = is_acknowledged(f, other);

	if (f->state == FLOW_OPEN && silent)
		f->state = FLOW_FIN;
	else if (f->state == FLOW_FIN && !silent)
		f->state = FLOW_OPEN;
	other->ending &= ~FLOW_OWES_ACK;
	if (f->ending & FLOW_LAST && !silent)
		other->ending |= FLOW_OWES_ACK;
}

/* forget_ending is for an entry whose memory another flow has been given. */
static __always_inline void forget_ending(struct flow *f)
{
	f->ending = 0;
	if (f->state == FLOW_FIN)
		f->state = FLOW_OPEN;
}

/*
 * conclude looks at both sides of a flow: whether they are silent, and have both ended; and, for
 * the backend's agreement to open a connection, what the client will acknowledge. If the memory of
 * one is another flow's by now, that must not be the one that is over.
 */
static __noinline int conclude(struct packet *pkt, struct flow *f)
{
	struct flow *other = other_side(pkt, f), *request, *reply;
	__u64 created = f->created;
	__u8 over = 0;

	if (pkt->signal == SIGNAL_RESET)
		judge_reset(pkt, f, other);
	if (!other)
		return 0;
	if (pkt->signal == SIGNAL_ACCEPT) {
		if (other->end - pkt->tcp.ack < MAX_EARLY)
			other->ack = pkt->tcp.end;
		else
			pkt->signal = SIGNAL_DOUBTED;
	}
	note_silence(f, other);
	note_silence(other, f);
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
		forget_ending(f);
	if (other->created != created)
		forget_ending(other);
	return 0;
}

/*
 * is_credible reports whether a segment of the side of f, no RST, is one of its connection, by what
 * is known of that. One who cannot hear the backend cannot answer it: so the client's second segment
 * proves the flow.
 */
static __always_inline bool is_credible(const struct flow *f, const struct segment *tcp,
					bool half_open)
{
	if (half_open && !is_reply(f) && (f->state == FLOW_NEW || f->state == FLOW_RESET))
		return tcp->syn ? !tcp->acks : tcp->acks && f->ack && tcp->ack - f->ack < MAX_EARLY;
	if (f->state == FLOW_NEW && is_reply(f))
		return tcp->syn && tcp->acks;
	return !tcp->syn && tcp->acks && is_near(tcp->end, f->end) && is_near(tcp->ack, f->ack);
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

/* follow_segment is for each segment of the side of f. A later fragment of one tells nothing. */
static __noinline int follow_segment(struct packet *pkt, struct flow *f, bool half_open)
{
	bool resets = pkt->signal == SIGNAL_RESET;
	__u8 had = f->ending;

	if (pkt->ip.later || !(resets || is_credible(f, &pkt->tcp, half_open))) {
		pkt->signal = SIGNAL_DOUBTED;
		return 0;
	}
	if (!resets)
		note_numbers(pkt, f);
	if (resets || pkt->signal == SIGNAL_ACCEPT || had | f->ending)
		conclude(pkt, f);
	return 0;
}

/*
 * follow_chunk is for each packet of the side of an SCTP flow. It believes those that bear the
 * right tag. An entry that was made anew knows of none.
 */
static __noinline int follow_chunk(struct packet *pkt, struct flow *f, bool half_open)
{
	bool asks = half_open && pkt->signal == (is_reply(f) ? SIGNAL_ACCEPT : SIGNAL_FIRST);
	const struct sctp_tags *sctp = &pkt->sctp;
	bool reflects =
		sctp->reflects && (pkt->signal == SIGNAL_RESET || pkt->signal == SIGNAL_FIN);
	struct flow *other = asks || reflects ? other_side(pkt, f) : NULL;
	__u32 tag = f->end;

	if (reflects)
		tag = other ? other->end : 0;
	if (pkt->signal != SIGNAL_FIRST && (pkt->ip.later || !tag || sctp->tag != tag))
		pkt->signal = SIGNAL_DOUBTED;
	else if (asks && other)
		other->end = sctp->asks;
	return 0;
}

#endif
