/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The health of backends, as the connections that this node translates show it: a backend that
 * does not answer them becomes a suspect, which gets no new flows for a while, and then one at a
 * time until it answers. docs/healing.md has the states and the reasons for the limits.
 */
#ifndef SLUICE_HEALTH_H
#define SLUICE_HEALTH_H

#include <stdbool.h>

#include "../../maps/maps.h"
#include "addr.h"
#include "backend.h"
#include "clock.h"

/* Suspects are noticed and passed over. */
volatile const bool config_heal = false;

/* So are they by flows that have begun: see resteer.h, and leaves in pick.h. */
volatile const bool config_resteer = false;

/* probe.c picks backends, and changes nothing. */
#ifdef SLUICE_PROBE
#define ACTS false
#else
#define ACTS true
#endif

/*
 * The limits of the state machine, all of them. docs/healing.md has the reasons.
 */

#define MS 1000000ULL

/* A time of an answer is not written again within this time. */
#define ANSWER_STEP (8 * MS)

/* A backend that answered within this time is well: its connections need no attention. */
#define ANSWER_FRESH (64 * MS)

/* A client that gives up its connection sooner has not waited for an answer. */
#define ANSWER_DUE (16 * MS)

/* How long the first of the unanswered connections waits until the backend is a suspect. */
#define SILENCE (200 * MS)

/* The same, of clients that reach no other backend of the Service. */
#define LONG_SILENCE (600 * MS)

/* That a first segment was sent again proves nothing if another was answered within this time. */
#define RETRANSMIT_FRESH (1000 * MS)

/* The answer to a UDP socket that connected longer ago shows nothing of its backend now. */
#define MAX_ANSWER_AGE (10000 * MS)

/* The evidence that makes a suspect, and that of a first segment which had to be sent again. */
#define EVIDENCE_ENOUGH 20
#define EVIDENCE_RETRANSMIT 3
#define REFUSALS_ENOUGH 4

/* A report that the host cannot be reached, which the network makes after a silence, is as many refusals. */
#define REFUSALS_UNREACHABLE 2

/*
 * A silence of datagrams that is SILENCE_UNUSUAL times as long as usual is none that was seen before, and one of less
 * than SILENCE_USUAL times is usual. An answer after a shorter one takes SILENCE_PART of the difference away; after a
 * longer one the usual silence is up to SILENCE_RISE times as long, and some: so the end of an outage, of which there
 * is one, tells less than silences that follow each other.
 */
#define SILENCE_UNUSUAL 8
#define SILENCE_USUAL 4
#define SILENCE_PART 32
#define SILENCE_RISE 3

/* How long a usual silence counts without an answer, in units of 2^SILENCE_SHIFT ns: ten minutes. */
#define SILENCE_AGE 17

/* More evidence is not counted. */
#define MAX_EVIDENCE 10000

/* Evidence of this age is dropped. */
#define EVIDENCE_AGE (60000 * MS)

/* How many clients are more than a single one. Two may share a bit. */
#define CLIENTS_ENOUGH 3

/* A suspicion this long after the last one is a new episode, and begins with the shortest pause. */
#define EPISODE_GAP (60000 * MS)

/* The pauses: a second, doubled up to MAX_LEVEL times, and a minute at most. */
#define FIRST_PAUSE (1000 * MS)
#define MAX_PAUSE (HEALTH_MAX_PAUSE * MS)
#define MAX_LEVEL 6

/*
 * How many connections pay for a refusal that is hidden from a client, and how many hidden refusals
 * are yet to be paid for at most, in each group of clients: see refusal.h.
 */
#define REFUSAL_PRICE 10
#define MAX_REFUSAL_DEBT (12 * REFUSAL_PRICE)

/* A time that is later than all others: no pause goes on beyond. */
#define NEVER ((1ULL << 63) - 1)

/* The clients of a piece of evidence are told apart by that many bits. */
#define CLIENT_BITS 16

/* client_at returns the number of the client that has an address. */
static __always_inline __u32 client_at(const struct addr *a)
{
	return hash(a, sizeof(*a));
}

/* health_place returns the health of the backend that was last in the place of this id, or NULL. */
static __always_inline struct backend_health *health_place(__u32 backend_id)
{
	__u32 chunk = (backend_id & INDEX_MASK) / CHUNK_BACKENDS;
	__u32 place = (backend_id & INDEX_MASK) % CHUNK_BACKENDS;
	void *places = bpf_map_lookup_elem(&sl_backend_health, &chunk);

	return places ? bpf_map_lookup_elem(places, &place) : NULL;
}

/*
 * health_of returns the health of a backend, and begins a new one if the place had another's. Of a
 * backend that is gone, which a socket may still have, it returns NULL.
 */
static __always_inline struct backend_health *health_of(__u32 backend_id)
{
	struct backend_health *h = health_place(backend_id);

	if (!h || h->id == backend_id)
		return h;
	if (!backend_at(backend_id))
		return NULL;
	*h = (struct backend_health){ .id = backend_id };
	return h;
}

/*
 * shows_answers reports whether answers of a backend were seen lately. Those to connected UDP sockets
 * are not, while the sockets stay open and are read by recv(): no silence follows from that.
 */
static __always_inline bool shows_answers(__u32 backend_id, __u64 now)
{
	const struct backend_health *h = health_place(backend_id);

	return config_heal && h && h->id == backend_id &&
	       elapsed(now, h->answered) < MAX_ANSWER_AGE;
}

/*
 * counts_silence reports whether the silence of a backend counts: it has answered before, and not lately. That of
 * one that was never seen to answer proves nothing: what is sent to it may want no answer, or its answers may
 * not be seen.
 */
static __always_inline bool counts_silence(__u32 backend_id, __u64 now)
{
	const struct backend_health *h = health_place(backend_id);

	return h && h->id == backend_id && h->answered && elapsed(now, h->answered) >= ANSWER_FRESH;
}

/* is_suspect reports whether a backend is passed over, or probed. */
static __always_inline bool is_suspect(__u32 backend_id)
{
	const struct backend_health *h = health_place(backend_id);

	return h && h->id == backend_id && h->suspected;
}

/*
 * has_refused reports whether a backend has refused a connection since it last answered, and within
 * EVIDENCE_AGE.
 */
static __always_inline bool has_refused(__u32 backend_id, __u64 now)
{
	const struct backend_health *h = health_place(backend_id);

	return h && h->id == backend_id && h->refusals &&
	       elapsed(now, h->unanswered) <= EVIDENCE_AGE;
}

/*
 * refusal_debt returns the connections that are to pay for the hidden refusals of a client and those that share
 * with it: a client that has used up all leaves as many to the other groups. It is never NULL.
 */
static __always_inline __s32 *refusal_debt(__u32 service_port_id, __u32 client)
{
	__u32 at = ((service_port_id & INDEX_MASK) * REFUSAL_GROUPS + client % REFUSAL_GROUPS) %
		   REFUSAL_DEBTS;

	return bpf_map_lookup_elem(&sl_refusal_debt, &at);
}

/* is_paused reports whether a backend is a suspect whose pause has not ended. */
static __always_inline bool is_paused(__u32 backend_id, __u64 now)
{
	const struct backend_health *h = health_place(backend_id);

	return h && h->id == backend_id && h->suspected && now < h->until;
}

/* pause_of returns how long a suspect is passed over, up to a quarter less at random. */
static __always_inline __u64 pause_of(__u8 level)
{
	__u64 pause = FIRST_PAUSE << (level < MAX_LEVEL ? level : MAX_LEVEL);

	if (pause > MAX_PAUSE)
		pause = MAX_PAUSE;
	return pause - ((pause >> 2) * (bpf_get_prandom_u32() >> 16) >> 16);
}

/*
 * note_suspect is called when a backend has become a suspect, or gets a probe. Place 0, which no backend
 * has, holds until when suspects are looked for: no pause is longer, and the agent goes on while a suspect gets
 * no probe, since there are no new connections.
 */
static __always_inline void note_suspect(__u64 now)
{
	struct backend_health *any = health_place(0);

	if (any)
		any->until = now + HEALTH_LOOKED_FOR * MS;
}

/*
 * may_be_suspects is the cheap check before a suspect is looked for: it is false if there is none, or none
 * that was probed lately. What two CPUs write at once may get lost; the next probe writes it again.
 */
static __always_inline bool may_be_suspects(void)
{
	struct backend_health *any = health_place(0);

	if (!any || !any->until)
		return false;
	if (bpf_ktime_get_ns() < any->until)
		return true;
	any->until = 0;
	return false;
}

/* begin_pause makes a suspect that has just got a probe pause again, twice as long as before. */
static __always_inline void begin_pause(struct backend_health *h, __u64 now)
{
	if (h->level < MAX_LEVEL)
		h->level++;
	h->until = now + pause_of(h->level);
	note_suspect(now);
}

/* reached_at returns the word of sl_reached for a client and a service port; tag is its upper half. */
static __always_inline __u64 *reached_at(__u32 service_port_id, __u32 client, __u32 *tag)
{
	__u32 at = mix(mix(client) ^ service_port_id) % REACHED_WORDS;

	*tag = mix(mix(service_port_id) ^ client);
	return bpf_map_lookup_elem(&sl_reached, &at);
}

/*
 * reached_since reports whether a backend of the service port has answered a connection that the client
 * began since. What counts is the begin, so that a Service whose answers are all slow does not make a
 * suspect of the first backend that is waited for.
 */
static __always_inline bool reached_since(__u32 service_port_id, __u32 client, __u64 since)
{
	__u32 tag;
	const __u64 *word = reached_at(service_port_id, client, &tag);

	return word && *word >> 32 == tag &&
	       (__s32)((__u32)*word - (__u32)(since >> REACHED_SHIFT)) > 0;
}

/* are_several reports whether at least CLIENTS_ENOUGH bits are set. */
static __always_inline bool are_several(__u32 clients)
{
	int i;

	for (i = 1; i < CLIENTS_ENOUGH; i++)
		clients &= clients - 1;
	return clients;
}

/* silence_at returns the word of sl_silences for a service port, or NULL. */
static __always_inline __u64 *silence_at(__u32 service_port_id)
{
	__u32 at = (service_port_id & INDEX_MASK) % SILENCE_WORDS;

	return bpf_map_lookup_elem(&sl_silences, &at);
}

/* silence_time returns a time as the words of sl_silences have it. */
static __always_inline __u32 silence_time(__u64 now)
{
	return (__u32)(now >> SILENCE_SHIFT) << SILENCE_BITS;
}

/*
 * usual_silence returns how many exchanges of datagrams with a backend of the service port begin before it answers one,
 * at most of late, SILENCE_PART for each: none, or few, where all want an answer, and many where some are requests and
 * most are not. It is 0 for a port of another protocol.
 */
static __always_inline __u32 usual_silence(__u32 service_port_id, __u64 now)
{
	const __u64 *at = silence_at(service_port_id);
	__u64 word = at ? *at : 0;
	__u32 usual = word & ((1 << SILENCE_BITS) - 1);

	if (word >> 32 != service_port_id ||
	    (silence_time(now) - ((__u32)word - usual)) >> SILENCE_BITS > SILENCE_AGE)
		return 0;
	return usual;
}

/*
 * is_longer reports whether the silence of a backend of the service port is this many times as long as usual, or as
 * long as one can be.
 */
static __always_inline bool is_longer(const struct backend_health *h, __u32 service_port_id,
				      __u32 times, __u64 now)
{
	return h->evidence >= MAX_EVIDENCE ||
	       h->evidence * SILENCE_PART >= times * usual_silence(service_port_id, now);
}

static __always_inline void forget_evidence(struct backend_health *h)
{
	h->evidence = 0;
	h->evidence_reaching = 0;
	h->refusals = 0;
	h->clients = 0;
	h->clients_reaching = 0;
}

/*
 * add_evidence records what speaks against the backend: a connection of the client that began at a
 * time and has the cause, and how much it weighs. It makes the backend a suspect if that is enough.
 * What a client reports that reaches none of the Service's backends proves nothing about one of them:
 * but for its first report, it only counts if several such clients report the same for longer. And
 * few clients take twice as much evidence.
 */
static __always_inline void add_evidence(struct backend_health *h, __u32 service_port_id,
					 __u32 client, __u8 cause, __u32 weight, __u64 begun,
					 __u64 now)
{
	bool several, reaches, unusual, silent, unreached, refuses;
	__u32 times, bit = 1U << (client % CLIENT_BITS);
	__u64 waited;

	if (!(h->evidence | h->refusals) || elapsed(now, h->unanswered) > EVIDENCE_AGE) {
		h->unanswered = begun;
		h->refusals = 0;
		if (!h->suspected) /* what has made a suspect is valid until it answers */
			forget_evidence(h);
	}
	reaches = reached_since(service_port_id, client, h->unanswered);
	if (h->evidence < MAX_EVIDENCE)
		h->evidence += weight;
	if ((reaches || !(h->clients & bit)) && h->evidence_reaching < MAX_EVIDENCE)
		h->evidence_reaching += weight;
	h->clients |= bit;
	if (reaches)
		h->clients_reaching |= bit;
	if (cause >= HEALTH_REFUSED)
		h->refusals += cause == HEALTH_UNREACHABLE ? REFUSALS_UNREACHABLE : 1;

	several = are_several(h->clients);
	times = several ? 1 : 2;
	waited = elapsed(now, h->unanswered);
	unusual = is_longer(h, service_port_id, SILENCE_UNUSUAL, now);
	silent = unusual && h->evidence_reaching >= times * EVIDENCE_ENOUGH && waited >= SILENCE;
	unreached = unusual && h->evidence >= 2 * EVIDENCE_ENOUGH && waited >= LONG_SILENCE &&
		    are_several(h->clients & ~h->clients_reaching);
	refuses = h->refusals >= times * REFUSALS_ENOUGH && reaches && cause >= HEALTH_REFUSED;
	/* It was not known yet that such a silence is usual. It goes on, with all that was noted of it. */
	if (h->suspected && h->cause < HEALTH_REFUSED &&
	    !is_longer(h, service_port_id, SILENCE_USUAL, now)) {
		h->unanswered = now;
		h->suspected = 0;
		h->cleared = now;
	}
	if (h->suspected || (!silent && !unreached && !refuses))
		return;
	if (h->cleared && elapsed(now, h->cleared) < EPISODE_GAP) {
		h->level += h->level < MAX_LEVEL;
	} else {
		h->level = 0;
		h->episodes++;
	}
	h->cause = cause;
	h->until = now + pause_of(h->level);
	h->suspected = now;
	note_suspect(now);
}

/*
 * note_attempt is called when a backend gets a new connection, which remains in evidence until the
 * backend answers any. client is a hash of the client.
 */
__noinline int note_attempt(__u32 backend_id, __u32 service_port_id, __u32 client, __u64 now)
{
	struct backend_health *h;
	__s32 *debt;

	if (!config_heal)
		return 0;
	debt = config_resteer ? refusal_debt(service_port_id, client) : NULL;
	if (debt && *debt > 0)
		__sync_fetch_and_add(debt, -1);
	h = health_place(backend_id);
	if (!h || !counts_silence(backend_id, now))
		return 0;
	add_evidence(h, service_port_id, client, HEALTH_UNANSWERED, 1, now, now);
	return 0;
}

/*
 * note_retransmit is called when the first segment of a connection that began at a time is sent again,
 * which may be after a second, or sooner: see syn.c.
 */
__noinline int note_retransmit(__u32 backend_id, __u32 service_port_id, __u32 client, __u64 begun,
			       __u64 now)
{
	struct backend_health *h;

	if (!config_heal)
		return 0;
	h = health_of(backend_id);
	if (!h || elapsed(now, h->answered) < RETRANSMIT_FRESH)
		return 0;
	add_evidence(h, service_port_id, client, HEALTH_RETRANSMIT, EVIDENCE_RETRANSMIT, begun,
		     now);
	return 0;
}

/* take_one makes a number less, but not that of another CPU which has just made it 0. */
static __always_inline void take_one(volatile __u16 *number)
{
	__u16 had = *number;

	if (had)
		*number = had - 1;
}

/*
 * note_abandoned is called when the client of a connection that began at a time has given it up. Sooner than
 * a backend may answer, that shows nothing of the backend: the connection is no evidence any more. Nothing
 * else was noted of it so soon.
 */
__noinline int note_abandoned(__u32 backend_id, __u32 service_port_id, __u32 client, __u64 begun,
			      __u64 now)
{
	struct backend_health *h;

	if (!config_heal || elapsed(now, begun) >= ANSWER_DUE)
		return 0;
	h = health_place(backend_id);
	if (!h || !counts_silence(backend_id, begun)) /* it was not counted */
		return 0;
	if (reached_since(service_port_id, client, h->unanswered))
		take_one(&h->evidence_reaching);
	take_one(&h->evidence);
	return 0;
}

/*
 * note_refusal is called when a connection to a backend is refused: cause is HEALTH_REFUSED, or
 * HEALTH_UNREACHABLE if the network did it.
 */
__noinline int note_refusal(__u32 backend_id, __u32 service_port_id, __u32 client, __u32 cause,
			    __u64 now)
{
	struct backend_health *h;

	if (!config_heal)
		return 0;
	h = health_of(backend_id);
	if (!h)
		return 0;
	add_evidence(h, service_port_id, client, cause, 0, now, now);
	return 0;
}

/*
 * note_success is called when a backend answers a connection of the client that began at a time. It
 * clears the backend of any suspicion.
 */
__noinline int note_success(__u32 backend_id, __u32 service_port_id, __u32 client, __u64 begun,
			    __u64 now)
{
	struct backend_health *h;
	__u64 *reached, word;
	__u32 tag;

	if (!config_heal)
		return 0;
	h = health_of(backend_id);
	if (!h)
		return 0;
	if (elapsed(now, h->answered) > ANSWER_STEP)
		h->answered = now;
	if (h->evidence | h->refusals)
		forget_evidence(h);
	if (h->suspected) {
		h->suspected = 0;
		h->cleared = now;
	}
	reached = reached_at(service_port_id, client, &tag);
	word = (__u64)tag << 32 | (__u32)(begun >> REACHED_SHIFT);
	if (reached && (*reached >> 32 != tag || (__s32)((__u32)word - (__u32)*reached) > 0))
		*reached = word;
	return 0;
}

/*
 * note_datagram is note_success for a datagram of a backend that answers one of the client. It keeps how long a
 * silence it has ended.
 */
__noinline int note_datagram(__u32 backend_id, __u32 service_port_id, __u32 client, __u64 begun,
			     __u64 now)
{
	const struct backend_health *h = health_place(backend_id);
	__u64 *word = silence_at(service_port_id), new;
	__u32 usual, ended;

	if (!config_heal || !h || !word)
		return 0;
	usual = usual_silence(service_port_id, now);
	ended = h->id == backend_id ? h->evidence * SILENCE_PART : 0;
	if (ended < usual)
		ended = usual - (usual - ended + SILENCE_PART - 1) / SILENCE_PART;
	else if (ended > SILENCE_RISE * (usual + SILENCE_PART))
		ended = SILENCE_RISE * (usual + SILENCE_PART);
	new = (__u64)service_port_id << 32 | silence_time(now) | ended;
	if ((usual || ended) && *word != new)
		*word = new;
	return note_success(backend_id, service_port_id, client, begun, now);
}

#endif
