/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* From a reason to the verdict on an application's system call. */
#ifndef SLUICE_VERDICT_H
#define SLUICE_VERDICT_H

#include <linux/errno.h>

#include "config.h"
#include "reason.h"
#include "sock_addr.h"

/* errno_of returns the error that the application gets, or 0 if the call goes on. */
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

/*
 * dial_closed_port redirects a connect to an address that always refuses, in the family of the
 * original destination.
 */
static __always_inline void dial_closed_port(struct bpf_sock_addr *ctx, bool v6)
{
	struct addr original_dst = hook_addr(ctx, v6);
	struct addr closed = addr_loopback(&original_dst);

	set_hook_addr(ctx, v6, &closed, 0);
}

/*
 * finish counts the reason and returns the verdict of a connect or sendmsg hook for it: 1 lets the
 * call go on, 0 ends it. It does not leave EPERM, which is what a hook returns by default, because
 * clients inside the kernel (NFS, ceph) would retry on that without pause.
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
	dial_closed_port(ctx, v6);
	return 1;
}

#endif
