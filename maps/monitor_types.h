/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The map ABI of `sluice monitor`: events, listeners, and the refusals that are kept. */
#ifndef SLUICE_MONITOR_TYPES_H
#define SLUICE_MONITOR_TYPES_H

#include "flow_types.h"

/*
 * The kinds of events that programs report to `sluice monitor`: see bpf/lib/monitor.h. A new one is at the end.
 */
enum monitor_kind {
	MONITOR_TRANSLATED = 1, /* a new flow got a backend */
	MONITOR_REFUSED = 2, /* a packet or a call was rejected or dropped */
};

/* Where a program was that reports an event: at a socket, or else at an enum hook of a device. */
enum monitor_place {
	PLACE_SOCKET = 0,
	PLACE_INGRESS = HOOK_INGRESS,
	PLACE_EGRESS = HOOK_EGRESS,
};

/* What is not known is zero. */
struct monitor_event {
	__u64 time;
	__u64 netns_cookie; /* of the socket */
	__u64 cgroup_id; /* of the process that called */
	/* The source of the packet. At a socket, what it is bound to, or the address of its pod. */
	struct addr client;
	struct addr original_dst;
	__be16 client_port;
	__be16 original_port;
	__u32 service_port_id;
	__u32 backend_id;
	__u32 pid; /* of the process that called */
	__u32 ifindex; /* of the device */
	__u8 kind; /* enum monitor_kind */
	__u8 reason; /* enum reason */
	__u8 proto; /* IPPROTO_* */
	__u8 place; /* enum monitor_place */
	char comm[16]; /* the name of the process that called, NUL-terminated */
	__u32 reserved[4];
};

/*
 * Each `sluice monitor` that runs has one of these places, and the ring buffer at the same place in
 * monitor_rings. It listens until the time in its place, which it renews. A program frees the place
 * when that time is over.
 */
enum listener_limit {
	LISTENERS = 4,
};

struct listeners {
	__u64 until[LISTENERS]; /* 0: the place is free */
	__u64 lost[LISTENERS]; /* events for which the ring buffer had no room */
};

/*
 * The last refusals for one reason. Of a flood, the first RECENT_BURST are kept and then one each
 * RECENT_INTERVAL nanoseconds: that bounds the cost, and what was before stays for a while.
 */
enum recent_limit {
	RECENT_REASONS = 32, /* as many as there can be: see bpf/lib/reason.h */
	RECENT_REFUSALS = 64, /* of each */
	RECENT_BURST = 32,
	RECENT_INTERVAL = 1000000000,
};

struct recent {
	__u64 busy_until; /* what was kept takes RECENT_INTERVAL each, up to this time */
	__u32 next; /* the number of the next refusal */
	struct bpf_spin_lock lock;
	struct monitor_event refusals[RECENT_REFUSALS]; /* by number; time 0: none yet */
};

#endif
