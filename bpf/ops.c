//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Counting the bytes of TCP connections whose sockets were translated. */
#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "lib/reason.h"

static __always_inline struct sock_state *state_of(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	return sk ? bpf_sk_storage_get(&sl_sock_state, sk, NULL, 0) : NULL;
}

/*
 * enable_state_callback enables the callback for changes of state of the socket, and keeps those that other
 * programs enabled.
 */
static __always_inline void enable_state_callback(struct bpf_sock_ops *ctx)
{
	bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG);
}

SEC("sockops")
int sluice_sock_ops(struct bpf_sock_ops *ctx)
{
	const struct sock_state *state;

	switch (ctx->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB: /* another program may have cleared the flag */
		if (state_of(ctx))
			enable_state_callback(ctx);
		break;
	case BPF_SOCK_OPS_STATE_CB:
		state = ctx->args[1] == BPF_TCP_CLOSE ? state_of(ctx) : NULL;
		if (state)
			count_bytes(state->service_port_id, ctx->bytes_acked, ctx->bytes_received);
	}
	return 1;
}

char ops_license[] SEC("license") = "Dual BSD/GPL";
