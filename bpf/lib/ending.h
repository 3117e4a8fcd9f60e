/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * How flows of TCP and SCTP end: by the sequence numbers of segments and the tags of packets.
 *
 * A sender that only knows addresses and ports can send a SYN, a FIN or an RST. A valid end makes
 * the tuple of the flow free for another one at once, and does nothing else: no packet is dropped
 * or sent elsewhere because of it, and a later segment of that side undoes it. Only what must have
 * ended the connection on both sides is valid:
 *
 * - FINs of both sides, each at the end of what its side has sent, and acknowledged by the other.
 * - An RST whose number is the other side's last acknowledgement, as RFC 5961 requires; or, of a
 *   refused connection, one that acknowledges the SYN.
 *
 * An RST at the end of what its side has sent, of which the other side has not acknowledged the last
 * part, may end the connection as well. But a forger who makes an entry believe a number knows that
 * end, so it only closes its side, and not far from what was acknowledged. It is valid once the other
 * side has acknowledged all.
 *
 * A SYN on a flow that has not ended goes to the backend of that flow, which shows what it is. If the
 * client has forgotten the connection, the backend's answer makes it send a valid RST, and its next SYN
 * starts a new flow. If the backend has accepted an RST that was not valid, it accepts the SYN: the
 * entries are those of the new connection from then on.
 *
 * An entry follows the side whose packets come to it. An entry that was created again, because a
 * full table had lost it, has no history. Then a timeout decides.
 *
 * The packets of an SCTP association carry a tag that their receiver has asked for, which makes
 * them valid.
 *
 * Two CPUs may follow one side at once, and what one of them writes can get lost. Then fewer
 * packets are valid than could be.
 */
#ifndef SLUICE_ENDING_H
#define SLUICE_ENDING_H

#include "flow.h"

/*
 * The largest plausible window: a number that is further ahead belongs to an earlier connection
 * with the same tuple.
 */
#define MAX_AHEAD (1U << 26)

/* How much a backend may send before the client has confirmed, and a client in its SYN. */
#define MAX_EARLY (1U << 16)

/* How much of what a side has sent may not be acknowledged when it resets the connection. */
#define MAX_IN_FLIGHT (1U << 20)

/* After this time without a packet, the flow of another client may take the tuple of a flow that is closing. */
#define CLOSING_NS (10 * 1000000000ULL)

/* is_ahead reports whether a is ahead of b, as sequence numbers that wrap around. */
static __always_inline bool is_ahead(__u32 a, __u32 b)
{
	return a - b - 1 < MAX_AHEAD;
}

/*
 * is_near reports whether a may be a number of the connection that has reached b; b is 0 if that
 * is unknown.
 */
static __always_inline bool is_near(__u32 a, __u32 b)
{
	return !b || a - b + MAX_AHEAD < 2 * MAX_AHEAD;
}

/* is_reply reports whether the packets of an entry come from the backend. */
static __always_inline bool is_reply(const struct flow *f)
{
	return f->role == FLOW_TO_CLIENT || f->role == FLOW_FROM_BACKEND;
}

/*
 * other_side returns the entry of f for the packets of the other direction on the same leg, or
 * NULL: they arrive as the reverse of what the packet at hand becomes.
 */
static __always_inline struct flow *other_side(struct packet *pkt, const struct flow *f)
{
	reversed(&pkt->to, &pkt->key);
	pkt->key.proto = pkt->ip.key.proto;
	pkt->key.hook = is_turned(f) ? HOOK_INGRESS : HOOK_INGRESS + HOOK_EGRESS - pkt->ip.key.hook;
	pkt->key.reserved = 0;
	return entry_at(pkt, f);
}

/* is_acknowledged reports whether the other side has acknowledged the FIN of the side of f. */
static __always_inline bool is_acknowledged(const struct flow *f, const struct flow *other)
{
	return f->ending & FLOW_FIN_SENT && other->ack == f->end;
}

/* have_ended reports whether both sides of a TCP flow have ended, by their numbers. */
static __always_inline bool have_ended(const struct flow *f, const struct flow *other)
{
	if ((f->ending | other->ending) & FLOW_RST_VALID)
		return true;
	return is_acknowledged(f, other) && is_acknowledged(other, f);
}

/*
 * is_in_flight reports whether the end of what the side of f has sent is near what the other side has
 * acknowledged, as far as that is known.
 */
static __always_inline bool is_in_flight(const struct flow *f, const struct flow *other)
{
	return !other || !other->ack || f->end - other->ack < MAX_IN_FLIGHT;
}

/*
 * refuses_syn reports whether an RST of the side of f is the answer of a kernel that has no socket for a SYN, while one
 * side of the flow seems to have reset it: the backend has nothing of the connection any more.
 */
static __always_inline bool refuses_syn(const struct segment *tcp, const struct flow *f,
					const struct flow *other)
{
	return other && is_reply(f) && tcp->acks && !tcp->seq &&
	       (f->state == FLOW_RESET || other->state == FLOW_RESET);
}

/*
 * check_reset accepts an RST of the side of f, marks it as invalid, or leaves it to the timeout.
 * other is the entry of the other side, or NULL.
 */
static __always_inline void check_reset(struct packet *pkt, struct flow *f,
					const struct flow *other)
{
	const struct segment *tcp = &pkt->tcp;

	if (other && other->ack && tcp->seq == other->ack)
		f->ending |= FLOW_RST_VALID;
	else if (other && !other->ack && other->end && tcp->acks && tcp->ack == other->end)
		f->ending |= FLOW_RST_VALID;
	else if (refuses_syn(tcp, f, other))
		f->ending |= FLOW_RST_VALID;
	else if (is_new(f) || !f->end || tcp->seq != f->end || !is_in_flight(f, other))
		pkt->event = EVENT_INVALID;
}

/*
 * update_fin_state sets the state of f by whether its FIN is acknowledged, and records in the
 * other entry whether it still has to acknowledge that FIN.
 */
static __always_inline void update_fin_state(struct flow *f, struct flow *other)
{
	bool silent = is_acknowledged(f, other);

	if (f->state == FLOW_OPEN && silent)
		f->state = FLOW_FIN;
	else if (f->state == FLOW_FIN && !silent)
		f->state = FLOW_OPEN;
	other->ending &= ~FLOW_OWES_ACK;
	if (f->ending & FLOW_FIN_SENT && !silent)
		other->ending |= FLOW_OWES_ACK;
}

/* forget_ending resets an entry whose memory the kernel has given to another flow. */
static __always_inline void forget_ending(struct flow *f)
{
	f->ending = 0;
	if (f->state == FLOW_FIN)
		f->state = FLOW_OPEN;
}

/*
 * is_answer_to reports whether the number of an answer fits a client's SYN. One with data of which the client has sent
 * less meanwhile, as a kernel that repeats it sends none, is answered by what it had.
 */
static __always_inline bool is_answer_to(const struct packet *pkt, const struct flow *client)
{
	return client->end - pkt->tcp.ack + MAX_EARLY < 2 * MAX_EARLY;
}

/*
 * check_ending compares both sides of the flow of the packet at a hook, which was created at a time, and records whether
 * each has ended. For the backend's SYN-ACK, it also records what the client will acknowledge. If the kernel has given
 * the memory of one entry to another flow meanwhile, that flow must not be marked as ended. It is global, so that the
 * verifier walks it once.
 */
__noinline int check_ending(__u32 hook, __u64 created)
{
	struct packet *pkt = packet_at(hook);
	struct flow *f, *other, *request, *reply;
	__u8 over = 0;

	f = pkt ? entry_since(&pkt->ip.key, created) : NULL;
	if (!f)
		return 0;
	other = other_side(pkt, f);
	if (pkt->event == EVENT_RESET)
		check_reset(pkt, f, other);
	if (!other)
		return 0;
	if (pkt->event == EVENT_ACCEPT) {
		if (is_answer_to(pkt, other))
			other->ack = pkt->tcp.seq + 1; /* data of the SYN-ACK may be left out */
		else
			pkt->event = EVENT_INVALID;
	}
	update_fin_state(f, other);
	update_fin_state(other, f);
	if (pkt->event == EVENT_RESET)
		other->ending |= FLOW_OWES_ACK;
	if (other->state == FLOW_RESET) {
		f->ending |= FLOW_OWES_ACK;
		if (f->ack == other->end) /* all that came before the RST */
			other->ending |= FLOW_RST_VALID;
	}
	request = is_reply(f) ? other : f;
	reply = is_reply(f) ? f : other;
	if (have_ended(request, reply)) {
		over = FLOW_OVER | (reply->ending & FLOW_FIN_FIRST ? FLOW_TIME_WAIT : 0);
		reply->ending &= ~FLOW_STAMPED;
		reply->ending |= request->ending & FLOW_STAMPED;
		reply->stamp = request->stamp;
	}
	request->ending = (request->ending & ~(FLOW_OVER | FLOW_TIME_WAIT)) | over;
	reply->ending = (reply->ending & ~(FLOW_OVER | FLOW_TIME_WAIT)) | over;
	barrier();
	if (f->created != created)
		forget_ending(f);
	if (other->created != created)
		forget_ending(other);
	return 0;
}

/*
 * reopen handles the SYN-ACK of the backend of an open flow, which has the entry of the packet at a hook. One side has
 * reset that, and the backend has accepted it, since it accepts another connection: both sides have its numbers from
 * then on. Without such a reset, the SYN-ACK is none of the flow. It is global, so that the verifier walks it once.
 */
__noinline int reopen(__u32 hook)
{
	struct packet *pkt = packet_at(hook);
	struct flow *f, *other;

	if (!pkt)
		return 0;
	pkt->event = EVENT_INVALID;
	f = half_open_at(&pkt->ip.key) ?: bpf_map_lookup_elem(&sl_flows, &pkt->ip.key);
	other = f ? other_side(pkt, f) : NULL;
	if (!other || f->ending & FLOW_OVER ||
	    (f->state != FLOW_RESET && other->state != FLOW_RESET))
		return 0;
	pkt->event = EVENT_ACCEPT;
	f->end = pkt->tcp.end;
	f->ack = pkt->tcp.ack;
	f->ending = 0;
	other->end = pkt->tcp.ack;
	other->ack = pkt->tcp.seq + 1;
	other->ending = 0;
	return 0;
}

/*
 * is_in_window reports whether a segment of the side of f other than an RST belongs to its
 * connection, by what is known of that. A sender that cannot hear the backend cannot acknowledge
 * its SYN-ACK, so the client's second segment confirms the flow.
 */
static __always_inline bool is_in_window(const struct flow *f, const struct segment *tcp,
					 bool half_open)
{
	if (half_open && !is_reply(f) && (is_new(f) || f->state == FLOW_RESET))
		return tcp->syn ? !tcp->acks : tcp->acks && f->ack && tcp->ack - f->ack < MAX_EARLY;
	if (is_new(f) && is_reply(f))
		return tcp->syn && tcp->acks;
	return !tcp->syn && tcp->acks && is_near(tcp->end, f->end) && is_near(tcp->ack, f->ack);
}

/*
 * note_numbers records how far the side of f has come, and whether its FIN is at the end of that.
 */
static __always_inline void note_numbers(struct packet *pkt, struct flow *f)
{
	const struct segment *tcp = &pkt->tcp;
	__u8 had = f->ending;

	f->ending = had & ~(FLOW_RST_VALID | FLOW_REFUSED);
	if (tcp->syn || !f->end || is_ahead(tcp->end, f->end)) {
		f->end = tcp->end;
		f->ending = tcp->fin;
		f->stamp = tcp->stamp;
	} else if (tcp->fin) {
		if (tcp->end == f->end)
			f->ending |= tcp->fin;
		else
			pkt->event = EVENT_INVALID;
	}
	if (tcp->acks && (tcp->syn || !f->ack || is_ahead(tcp->ack, f->ack))) {
		/* FLOW_FIN_FIRST, if this is not the FIN itself. */
		f->ending |= (had & f->ending & FLOW_FIN_SENT) * FLOW_FIN_FIRST;
		f->ack = tcp->ack;
	}
}

/*
 * follow_segment updates the entry f, and its other side, by a segment. A later fragment of a
 * segment carries no numbers.
 */
static __noinline int follow_segment(struct packet *pkt, struct flow *f, bool half_open)
{
	bool resets = pkt->event == EVENT_RESET;
	__u8 had = f->ending;

	if (pkt->event == EVENT_ACCEPT && is_reply(f) && !is_new(f))
		return reopen(pkt->ip.key.hook);
	if (pkt->ip.later || !(resets || is_in_window(f, &pkt->tcp, half_open))) {
		pkt->event = EVENT_INVALID;
		return 0;
	}
	if (!resets)
		note_numbers(pkt, f);
	if (resets || pkt->event == EVENT_ACCEPT || had | f->ending)
		check_ending(pkt->ip.key.hook, f->created);
	return 0;
}

/*
 * bears_tag reports whether a packet of the side of an SCTP flow bears the tag that its receiver has asked for.
 * An entry that was created again knows of no tag.
 */
static __always_inline bool bears_tag(const struct packet *pkt, const struct flow *f,
				      const struct flow *other)
{
	const struct sctp_tags *sctp = &pkt->sctp;
	bool reflects = sctp->reflects && (pkt->event == EVENT_RESET || pkt->event == EVENT_FIN);
	__u32 tag = f->end;

	if (reflects)
		tag = other ? other->end : 0;
	return !pkt->ip.later && tag && sctp->tag == tag;
}

/* follow_chunk checks the tag of a packet of the side of an SCTP flow. */
static __noinline int follow_chunk(struct packet *pkt, struct flow *f, bool half_open)
{
	bool asks = half_open && pkt->event == (is_reply(f) ? EVENT_ACCEPT : EVENT_OPEN);
	struct flow *other = asks || pkt->sctp.reflects ? other_side(pkt, f) : NULL;

	if (pkt->event != EVENT_OPEN && !bears_tag(pkt, f, other))
		pkt->event = EVENT_INVALID;
	else if (asks && other)
		other->end = pkt->sctp.asks;
	return 0;
}

/*
 * asks_for_reset reports whether the segment from a backend, with the tuple of a new flow, is the bare ACK with which a
 * kernel answers the SYN of a connection that it still has from before, or the reset with which the client answers that:
 * so the old connection ends, and the client's next SYN begins the new one. A foreign flow's client asks for none.
 */
static __always_inline bool asks_for_reset(const struct packet *pkt, const struct flow *f)
{
	if (is_foreign(f))
		return false;
	if (!is_reply(f))
		return pkt->event == EVENT_RESET;
	return pkt->tcp.acks && !pkt->tcp.fin && pkt->event == EVENT_NONE &&
	       pkt->tcp.end == pkt->tcp.seq;
}

/*
 * is_of_opening reports whether the packet from the stack, with the tuple of the half-open flow pkt->flow, is of that:
 * as long as the client has not confirmed the flow, it is the first packet or an answer to that, by its numbers. Any
 * other is of a direct connection of the client, which need not have sent the first packet itself. It is for egress,
 * and global, so that the verifier walks it once.
 */
__noinline int is_of_opening(void)
{
	struct packet *pkt = packet_at(HOOK_EGRESS);
	const struct flow *f, *other;

	if (!pkt)
		return true;
	f = &pkt->flow;
	if (f->proto == IPPROTO_UDP || f->role == FLOW_FROM_CLIENT || pkt->ip.later)
		return true;
	if (f->proto == IPPROTO_SCTP) {
		if (!is_new(f) && !f->end)
			return true; /* it was open, and put back without a tag */
		if (is_reply(f) || pkt->event != EVENT_OPEN)
			return bears_tag(pkt, f, other_side(pkt, f));
		other = entry_of(pkt, f, FLOW_TO_CLIENT);
		return other && other->end == pkt->sctp.asks;
	}
	other = entry_of(pkt, f, FLOW_FROM_CLIENT);
	if (!other || !is_new(other))
		return !!other;
	if (asks_for_reset(pkt, f))
		return true;
	if (pkt->event == EVENT_ACCEPT)
		return is_reply(f) && is_answer_to(pkt, other);
	if (is_reply(f))
		return pkt->tcp.acks && other->end - pkt->tcp.ack < MAX_EARLY;
	return pkt->event == EVENT_OPEN && other->end - pkt->tcp.end < MAX_EARLY;
}

#endif
