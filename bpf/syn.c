//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * How soon a socket that was translated sends its SYN again. The kernel waits for a second. A backend
 * whose handshakes are faster gets less, so that a connection is soon re-steered: see lib/resteer.h.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "../maps/maps.h"
#include "lib/kernel.h"

/* A backend, or all backends of a service port: 0. */
struct peers {
	__u32 service_port_id;
	__u32 backend_id;
};

/*
 * The longest handshake lately with a backend, and with all of a service port, in microseconds: each shorter one
 * takes away a quarter of the difference.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct peers);
	__type(value, __u32);
} sl_handshake_us SEC(".maps");

/* The kernel's timeout, and the most often that it is halved: 62 ms. */
#define TIMEOUT_US 1000000
#define MAX_HALVINGS 4

/* The same for a backend that no socket has reached yet, and that may be farther away than the others: 250 ms. */
#define MAX_HALVINGS_UNREACHED 2

/* A timeout is at least so many times as long as the handshake. */
#define HANDSHAKES 4

/* The numbers of ticks per second that kernels are built with. */
#define MIN_HZ 100
#define MAX_HZ 1000

#define TCP_SYNCNT 7
#define MAX_SYNCNT 32

/*
 * SYNs that the kernel sends again before it doubles the timeout (net.ipv4.tcp_syn_linear_timeouts, from
 * Linux 6.5 on). A socket that may send fewer SYNs again than MIN_LINEAR fails before the last of them.
 */
#define LINEAR_SYNS 4
#define MIN_LINEAR 3

static __always_inline struct sock_state *state_of(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	return sk ? bpf_sk_storage_get(&sl_sock_state, sk, NULL, 0) : NULL;
}

/*
 * halvings_of returns how often the kernel's timeout can be halved for the backend of a socket. What the other backends
 * of its service port take counts for one that was not reached yet.
 */
static __always_inline __u32 halvings_of(const struct sock_state *state)
{
	struct peers peers = { state->service_port_id, state->backend_id };
	const __u32 *us = bpf_map_lookup_elem(&sl_handshake_us, &peers);
	__u32 most = us ? MAX_HALVINGS : MAX_HALVINGS_UNREACHED, n = 0, i;

	peers.backend_id = 0;
	if (!us)
		us = bpf_map_lookup_elem(&sl_handshake_us, &peers);
	for (i = 1; us && i <= MAX_HALVINGS; i++)
		n += i <= most && TIMEOUT_US >> i >= *us * HANDSHAKES;
	return n;
}

/* total_timeouts returns after how many first timeouts a connection fails that sends its SYN again n times. */
static __always_inline __u64 total_timeouts(__u32 n)
{
	return (2ULL << n) - 1 + LINEAR_SYNS;
}

/*
 * timeout_of returns the timeout of the first SYN, in the kernel's ticks, or -1 for that of the
 * kernel, which the socket still has. An application gets the same time to connect as before: as the
 * timeout doubles with each SYN, a SYN more makes up for each halving, but for those that the kernel
 * sends without doubling it. Before Linux 6.1 the number of SYNs cannot be read, and the timeout stays.
 */
static __always_inline int timeout_of(struct bpf_sock_ops *ctx, struct sock_state *state)
{
	const struct inet_connection_sock *sk = NULL;
	struct bpf_sock *held = ctx->sk;
	__u32 n = halvings_of(state), hz, timeout;
	int syns = 0, had;

	if (!n && !state->more_syns)
		return -1;
	bpf_probe_read_kernel(&sk, sizeof(sk), &held);
	hz = BPF_CORE_READ(sk, icsk_rto);
	if (hz < MIN_HZ || hz > MAX_HZ ||
	    bpf_getsockopt(ctx, IPPROTO_TCP, TCP_SYNCNT, &syns, sizeof(syns)))
		return -1;
	had = syns - state->more_syns; /* those of the socket's connect() before */
	syns = had + n;
	if (had < 0 || syns > MAX_SYNCNT ||
	    bpf_setsockopt(ctx, IPPROTO_TCP, TCP_SYNCNT, &syns, sizeof(syns)))
		return -1;
	state->more_syns = n;
	timeout = had < MIN_LINEAR ? hz >> n : hz * total_timeouts(had) / total_timeouts(syns);
	return n ? timeout + 1 : -1;
}

/* note_longest notes how long a handshake with a backend took. */
static __always_inline void note_longest(const struct peers *peers, __u32 took)
{
	__u32 *us = bpf_map_lookup_elem(&sl_handshake_us, peers);

	if (!us)
		bpf_map_update_elem(&sl_handshake_us, peers, &took, BPF_ANY);
	else if (took > *us)
		*us = took;
	else
		*us -= (*us - took) / 4;
}

/*
 * note_duration records how long the backend took to answer. By TCP's timestamps, that is also right if
 * the SYN was sent again; without them it is 0 then. A Service that becomes slow gets longer timeouts.
 */
static __always_inline void note_duration(struct bpf_sock_ops *ctx, const struct sock_state *state)
{
	struct peers peers = { state->service_port_id, state->backend_id };
	__u32 took = ctx->srtt_us >> 3;

	if (!took)
		return;
	note_longest(&peers, took);
	peers.backend_id = 0;
	note_longest(&peers, took);
}

SEC("sockops")
int sluice_syn(struct bpf_sock_ops *ctx)
{
	struct sock_state *state;
	int timeout;

	if (ctx->op == BPF_SOCK_OPS_TIMEOUT_INIT) {
		/* The kernel asks again when it sends the SYN again. */
		if (!ctx->is_fullsock || ctx->state != BPF_TCP_SYN_SENT || ctx->segs_out)
			return 1;
		state = state_of(ctx);
		timeout = state ? timeout_of(ctx, state) : -1;
		if (timeout > 0) /* or what another program has set stays */
			ctx->reply = timeout;
	} else if (ctx->op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB) {
		state = state_of(ctx);
		if (state)
			note_duration(ctx, state);
	}
	return 1;
}

char syn_license[] SEC("license") = "Dual BSD/GPL";
