/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Reporting what a socket got to `sluice monitor`. */
#ifndef SLUICE_SOCK_REPORT_H
#define SLUICE_SOCK_REPORT_H

#include "monitor.h"
#include "sock.h"

/*
 * The IPv4 address that the agent dials now and then to see that hooks translate it, which no service
 * port counts, and which is not reported; 0: none.
 */
volatile const __be32 config_probe_addr = 0;

static __always_inline bool is_probe(const struct addr *original_dst)
{
	return config_probe_addr && addr_is_v4(original_dst) &&
	       original_dst->words[3] == config_probe_addr;
}

/* report_call reports the outcome of a call, before the hook's address becomes that of the backend. */
static __always_inline int report_call(struct bpf_sock_addr *ctx, bool v6, enum reason why,
				       __u32 service_port_id, __u32 backend_id)
{
	struct frontend_key original_dst;
	struct monitor_event e = {};

	e.time = bpf_ktime_get_ns();
	if (!is_wanted(why, e.time))
		return 0;
	original_dst = frontend_key_of(ctx, v6);
	if (is_probe(&original_dst.addr))
		return 0;
	e.original_dst = original_dst.addr;
	e.original_port = original_dst.port;
	e.proto = original_dst.proto;
	e.kind = is_refusal(why) ? MONITOR_REFUSED : MONITOR_TRANSLATED;
	e.reason = why;
	e.place = PLACE_SOCKET;
	e.service_port_id = service_port_id;
	e.backend_id = backend_id;
	e.netns_cookie = bpf_get_netns_cookie(ctx);
	if (!bound_addr(ctx, v6, &e.client) &&
	    (is_host_netns(ctx) || !netns_addr(ctx, addr_is_v4(&e.original_dst), &e.client)))
		e.client = (struct addr){};
	e.client_port = bpf_htons(ctx->sk->src_port);
	e.cgroup_id = bpf_get_current_cgroup_id();
	e.pid = bpf_get_current_pid_tgid() >> 32;
	bpf_get_current_comm(e.comm, sizeof(e.comm));
	publish(&e);
	return 0;
}

/* report_call as global functions, which the verifier walks once. */

__noinline int report_v4(struct bpf_sock_addr *ctx, __u32 why, __u32 service_port_id,
			 __u32 backend_id)
{
	return report_call(ctx, false, why, service_port_id, backend_id);
}

__noinline int report_v6(struct bpf_sock_addr *ctx, __u32 why, __u32 service_port_id,
			 __u32 backend_id)
{
	return report_call(ctx, true, why, service_port_id, backend_id);
}

/*
 * report reports what a new flow of a socket got: be, or else the reason why it is refused. Without a
 * `sluice monitor`, a flow that gets a backend costs no more than a look whether there is one.
 */
static __always_inline void report(struct bpf_sock_addr *ctx, bool v6, enum reason why,
				   __u32 service_port_id, const struct backend *be)
{
	__u32 backend_id = be ? be->id : 0;

	if (!is_refusal(why)) {
		if (!is_listening())
			return;
		why = REASON_TRANSLATED;
	}
	if (v6)
		report_v6(ctx, why, service_port_id, backend_id);
	else
		report_v4(ctx, why, service_port_id, backend_id);
}

#endif
