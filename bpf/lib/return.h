/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Sending replies by the device on which the client came. Where addresses have routes of their own
 * (rules "from ADDRESS lookup TABLE"), the stack routes a reply by the backend's address, and the
 * network behind that device may drop it, because its source will be the original destination. The
 * node's own reply from the original destination would leave by the device on which the client
 * came; otherwise the flow would not have FLOW_RETURNS.
 */
#ifndef SLUICE_RETURN_H
#define SLUICE_RETURN_H

#include "device_verdict.h"
#include "route.h"

/*
 * returns reports whether the packet is a reply that has to be routed from the original
 * destination.
 */
static __always_inline bool returns(const struct packet *pkt)
{
	return pkt->role == FLOW_TO_CLIENT && pkt->flags & FLOW_RETURNS;
}

/*
 * return_reply sends the packet at egress out by the device on which the client came. It is
 * global, so that the verifier walks it once.
 */
__noinline int return_reply(struct __sk_buff *ctx)
{
	struct bpf_fib_lookup fib = { .ifindex = device_in(ctx) };
	const struct packet *pkt = packet_at(HOOK_EGRESS);
	struct bpf_redir_neigh next = {};
	long found;

	if (!pkt)
		return VERDICT_NEXT;
	set_fib_addrs(&fib, &pkt->to.src, &pkt->to.dst);
	found = bpf_fib_lookup(ctx, &fib, sizeof(fib), 0);
	if ((found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH) ||
	    fib.ifindex == device_in(ctx))
		return VERDICT_NEXT;
	next.nh_family = fib.family;
	__builtin_memcpy(next.ipv6_nh, fib.ipv6_dst, sizeof(next.ipv6_nh));
	return bpf_redirect_neigh(fib.ifindex, &next, sizeof(next), 0);
}

#endif
