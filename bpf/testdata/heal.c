//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Healing as a program to be called step by step, with the times that the caller gives: the same
 * picks and notes that the programs of sockets and devices include.
 */
#include "../lib/pick.h"

enum step_op {
	STEP_PICK = 1, /* returns the id of the backend that a new connection gets, or 0 */
	STEP_SUCCESS = 2,
	STEP_FAILURE = 3,
	STEP_RETRANSMIT = 4,
	STEP_DATAGRAM = 5, /* of the backend: the answer to one of the client */
};

struct step {
	__u64 now;
	__u32 op;
	__u32 pool_id;
	__u32 client;
	__u32 backend_id;
	__u32 cause;
	__u32 seed;
	__u64 begun;
};

const enum step_op *btf_step_op __attribute__((unused));
const struct step *btf_step __attribute__((unused));

static __always_inline __u32 pick(const struct step *step)
{
	const struct pool *pool = pool_at(step->pool_id);
	struct addr source = { .words = { [3] = step->client } };
	struct affinity_key client;
	const struct backend *be;

	if (!pool)
		return 0;
	client = addr_client(pool->service_port_id, &source);
	be = pick_backend(pool, &client, step->seed, step->now, true);
	if (!be)
		return 0;
	note_attempt(be->id, pool->service_port_id, step->client, step->now);
	return be->id;
}

SEC("tc")
int heal_step(struct __sk_buff *ctx)
{
	const struct pool *pool;
	struct step step;

	if (bpf_skb_load_bytes(ctx, 0, &step, sizeof(step)))
		return 0;
	if (step.op == STEP_PICK)
		return pick(&step);
	pool = pool_at(step.pool_id);
	if (!pool)
		return 0;
	switch (step.op) {
	case STEP_SUCCESS:
		note_success(step.backend_id, pool->service_port_id, step.client, step.begun,
			     step.now);
		break;
	case STEP_DATAGRAM:
		note_datagram(step.backend_id, pool->service_port_id, step.client, step.begun,
			      step.now);
		break;
	case STEP_FAILURE:
		note_refusal(step.backend_id, pool->service_port_id, step.client, step.cause,
			     step.now);
		break;
	case STEP_RETRANSMIT:
		note_retransmit(step.backend_id, pool->service_port_id, step.client, step.begun,
				step.now);
	}
	return 0;
}

char heal_license[] SEC("license") = "Dual BSD/GPL";
