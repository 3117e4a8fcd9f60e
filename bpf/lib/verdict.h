/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* From a reason to what the application is told. */
#ifndef SLUICE_VERDICT_H
#define SLUICE_VERDICT_H

#include <linux/errno.h>

#include "config.h"
#include "reason.h"
#include "sock_addr.h"

/* errno_of returns what the application is told, or 0 if the call goes on. */
static __always_inline int errno_of(enum reason why)
{
	switch (why) {
	case REASON_REJECT_NO_BACKEND:
	case REASON_REJECT_NO_PORT:
		return ECONNREFUSED;
	case REASON_DROP_NO_LOCAL_BACKEND:
	case REASON_DROP_SOURCE_RANGE:
	case REASON_DROP_UNALLOCATED:
	case REASON_DROP_BACKEND_MISSING:
		return EHOSTUNREACH;
	default:
		return 0;
	}
}

/* An address that always refuses, in the family of dialled. */
static __always_inline void dial_nobody(struct bpf_sock_addr *ctx, bool v6)
{
	struct addr dialled = hook_addr(ctx, v6);
	struct addr nobody = addr_loopback(&dialled);

	set_hook_addr(ctx, v6, &nobody, 0);
}

/*
 * finish turns the reason into the verdict of a connect or sendmsg hook: 1 lets
 * the call go on, 0 ends it. EPERM, a hook's own word, would make clients
 * inside the kernel (NFS, ceph) try again without pause.
 */
static __always_inline int finish(struct bpf_sock_addr *ctx, bool v6, bool connects,
				  enum reason why)
{
	int err = errno_of(why);

	count(why);
	if (!err)
		return 1;
	if (config_has_set_retval) {
		bpf_set_retval(-err);
		return 0;
	}
	if (!connects)
		return 0;
	dial_nobody(ctx, v6);
	return 1;
}

#endif
