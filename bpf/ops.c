//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* TCP connections that sockets were given: from the first SYN until they are closed. */
#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "lib/load.h"
#include "lib/stat.h"

static __always_inline struct sock_state *state_of(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	return sk ? bpf_sk_storage_get(&sl_sock_state, sk, NULL, 0) : NULL;
}

/* wants_states has us told of the socket's states. Other programs may want to hear of other things. */
static __always_inline bool wants_states(struct bpf_sock_ops *ctx)
{
	__u32 flags = ctx->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG;

	return !bpf_sock_ops_cb_flags_set(ctx, flags);
}

/* opens is for a socket that is about to send its SYN. */
static __always_inline void opens(struct bpf_sock_ops *ctx)
{
	struct sock_state *state = state_of(ctx);

	if (!state || state->counted || !wants_states(ctx))
		return;
	state->counted = true;
	add_sockets(state->backend_id, 1);
}

/* closes is for a socket that has no peer any more: refused, given up, or closed by both. */
static __always_inline void closes(struct bpf_sock_ops *ctx)
{
	struct sock_state *state = state_of(ctx);

	if (!state || !state->counted)
		return;
	state->counted = false;
	add_sockets(state->backend_id, -1);
	add_stat(state->frontend_id, STAT_BYTES_SENT, ctx->bytes_acked);
	add_stat(state->frontend_id, STAT_BYTES_RECEIVED, ctx->bytes_received);
}

/* stays is for a socket that is connected: other programs may have set flags without regard to ours. */
static __always_inline void stays(struct bpf_sock_ops *ctx)
{
	const struct sock_state *state = state_of(ctx);

	if (state && state->counted)
		wants_states(ctx);
}

SEC("sockops")
int sluice_sock_ops(struct bpf_sock_ops *ctx)
{
	if (ctx->op == BPF_SOCK_OPS_TCP_CONNECT_CB)
		opens(ctx);
	else if (ctx->op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB)
		stays(ctx);
	else if (ctx->op == BPF_SOCK_OPS_STATE_CB && ctx->args[1] == BPF_TCP_CLOSE)
		closes(ctx);
	return 1;
}

char ops_license[] SEC("license") = "Dual BSD/GPL";
