/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Events for `sluice monitor`: new flows that get a backend, for those that run at the moment, and
 * refusals, of which a map keeps the last ones in any case. sock_report.h and reject.h fill them in.
 */
#ifndef SLUICE_MONITOR_H
#define SLUICE_MONITOR_H

#include "reason.h"

/* is_refusal reports whether a packet or a call is rejected or dropped. */
static __always_inline bool is_refusal(enum reason why)
{
	return is_reject(why) || is_drop(why);
}

static __always_inline struct listeners *listeners(void)
{
	__u32 only = 0;

	return bpf_map_lookup_elem(&sl_listeners, &only);
}

/* is_listening reports whether anyone listens, or did until lately: see publish. */
static __always_inline bool is_listening(void)
{
	const struct listeners *all = listeners();
	__u64 any = 0;
	int i;

	for (i = 0; all && i < LISTENERS; i++)
		any |= all->until[i];
	return any;
}

static __always_inline struct recent *recent_of(enum reason why)
{
	__u32 key = why;

	return bpf_map_lookup_elem(&sl_recent, &key);
}

/* may_keep reports whether a refusal is kept. In a flood it is false nearly always, and cheap. */
static __always_inline bool may_keep(const struct recent *recent, __u64 now)
{
	const __u64 burst = (__u64)RECENT_BURST * RECENT_INTERVAL;

	return recent->busy_until < now + burst;
}

/* is_wanted reports whether an event is of use to anyone, before it is filled in. */
static __always_inline bool is_wanted(enum reason why, __u64 now)
{
	const struct recent *recent;

	if (is_listening())
		return true;
	recent = is_refusal(why) ? recent_of(why) : NULL;
	return recent && may_keep(recent, now);
}

/* keep writes a refusal over the oldest one with the same reason. */
static __always_inline void keep(const struct monitor_event *e)
{
	struct recent *recent = recent_of(e->reason);

	if (!recent)
		return;
	bpf_spin_lock(&recent->lock);
	if (may_keep(recent, e->time)) {
		if (recent->busy_until < e->time)
			recent->busy_until = e->time;
		recent->busy_until += RECENT_INTERVAL;
		recent->refusals[recent->next % RECENT_REFUSALS] = *e;
		recent->next++;
	}
	bpf_spin_unlock(&recent->lock);
}

/*
 * publish hands an event to all who listen, and keeps a refusal. It frees the place of a listener
 * whose time is over: it was killed, so it costs nothing from now on.
 */
static __always_inline void publish(const struct monitor_event *e)
{
	struct listeners *all = listeners();
	int i;

	if (e->kind == MONITOR_REFUSED)
		keep(e);
	for (i = 0; all && i < LISTENERS; i++) {
		__u64 until = *(volatile __u64 *)&all->until[i];
		__u32 place = i;
		void *ring;

		if (!until)
			continue;
		if (until < e->time) {
			all->until[i] = 0;
			continue;
		}
		ring = bpf_map_lookup_elem(&sl_monitor_rings, &place);
		if (ring && bpf_ringbuf_output(ring, (void *)e, sizeof(*e), 0))
			__sync_fetch_and_add(&all->lost[i], 1);
	}
}

#endif
