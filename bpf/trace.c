//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Programs at tracepoints of the kernel. They run for the sockets of the whole machine, also of
 * other network namespaces and other agents: they act only on sockets that have our state.
 */
#include <linux/errno.h>
#include <bpf/bpf_core_read.h>

#include "lib/handshake.h"
#include "lib/health.h"
#include "lib/kernel.h"

/* The arguments of a tracepoint are words. */

/*
 * is_in_repair reports whether the application only restores a connection (CRIU): it is established by
 * connect(), without a packet.
 */
static __always_inline bool is_in_repair(const struct sock *sk)
{
	return BPF_CORE_READ_BITFIELD_PROBED((const struct tcp_sock *)sk, repair);
}

/*
 * note_handshake notes what the end of a handshake shows of the backend. A socket that the application
 * has closed before has no error; its retransmissions were noted.
 */
static __always_inline void note_handshake(const struct sock *sk, const struct sock_state *state,
					   bool established, __u64 now)
{
	if (established && !is_in_repair(sk)) {
		note_success(state->backend_id, state->service_port_id, state->client, state->since,
			     now);
		return;
	}
	switch (sk->sk_err) {
	case 0:
		note_abandoned(state->backend_id, state->service_port_id, state->client,
			       state->since, now);
		break;
	case ECONNREFUSED:
		note_refusal(state->backend_id, state->service_port_id, state->client,
			     HEALTH_REFUSED, now);
		break;
	case EHOSTUNREACH:
	case ENETUNREACH:
		note_refusal(state->backend_id, state->service_port_id, state->client,
			     HEALTH_UNREACHABLE, now);
	}
}

/* inet_sock_set_state(sk, oldstate, newstate): a handshake that this node began has ended. */
SEC("tp_btf/inet_sock_set_state")
int sluice_handshake(const __u64 *args)
{
	int was = args[1], is = args[2];
	struct sock_state *state;
	__u64 now;

	if (was != BPF_TCP_SYN_SENT)
		return 0;
	state = bpf_sk_storage_get(&sl_sock_state, (void *)args[0], NULL, 0);
	/* While one agent replaces another, the programs of both run. */
	if (!state || !state->since || state->handshake_counted)
		return 0;
	state->handshake_counted = 1;
	now = bpf_ktime_get_ns();
	count_handshake(state, is == BPF_TCP_ESTABLISHED, elapsed(now, state->since));
	if (!state->resteered && !state->shows_nothing)
		note_handshake((struct sock *)args[0], state, is == BPF_TCP_ESTABLISHED, now);
	return 0;
}

/* tcp_retransmit_skb(sk, skb): a segment was sent again. */
SEC("tp_btf/tcp_retransmit_skb")
int sluice_retransmit(const __u64 *args)
{
	struct sock *sk = (struct sock *)args[0];
	struct sock_state *state = bpf_sk_storage_get(&sl_sock_state, sk, NULL, 0);
	bool syn = sk->__sk_common.skc_state == BPF_TCP_SYN_SENT;

	if (!state)
		return 0;
	count_retransmission(state, syn);
	if (syn && state->since && !state->resteered && !state->refused && !state->shows_nothing)
		note_retransmit(state->backend_id, state->service_port_id, state->client,
				state->since, bpf_ktime_get_ns());
	return 0;
}

char trace_license[] SEC("license") = "Dual BSD/GPL";
