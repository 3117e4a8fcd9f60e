/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* From a reason to the verdict on a packet. */
#ifndef SLUICE_DEVICE_VERDICT_H
#define SLUICE_DEVICE_VERDICT_H

#include "reject.h"

/* The same numbers as those of tc, where Linux has no tcx (before 6.6). */
enum verdict {
	VERDICT_NEXT = -1, /* the next program runs, then the stack */
	VERDICT_DROP = 2,
};

static __always_inline bool is_translated(enum reason why)
{
	return why == REASON_FLOW || why == REASON_TRANSLATED;
}

static __always_inline bool is_reject(enum reason why)
{
	return why == REASON_REJECT_NO_BACKEND || why == REASON_REJECT_NO_PORT;
}

static __always_inline bool is_drop(enum reason why)
{
	switch (why) {
	case REASON_REJECT_LIMITED:
	case REASON_DROP_NO_LOCAL_BACKEND:
	case REASON_DROP_SOURCE_RANGE:
	case REASON_DROP_UNALLOCATED:
	case REASON_DROP_BACKEND_MISSING:
	case REASON_DROP_MASQUERADE_ADDR:
	case REASON_DROP_MASQUERADE_PORT:
	case REASON_DROP_FLOW_TABLE:
	case REASON_DROP_REDIRECT:
	case REASON_DROP_REWRITE:
		return true;
	default:
		return false;
	}
}

/* pass counts the reason for a packet that is not looked at any further, and lets it go on. */
static __always_inline int pass(enum reason why)
{
	count(why);
	return VERDICT_NEXT;
}

/* finish counts the reason and returns the verdict for it. */
static __always_inline int finish(struct __sk_buff *ctx, enum reason why, bool refused)
{
	if (refused)
		why = refuse(ctx, why);
	count(why);
	if (is_drop(why))
		return VERDICT_DROP;
	return refused ? bpf_redirect(ctx->ifindex, 0) : VERDICT_NEXT;
}

#endif
