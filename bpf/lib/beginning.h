/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Which flows CPUs begin at this moment. A resolver sends two datagrams at once, and two CPUs may get them
 * before either has opened a flow. One of them opens it, and the other waits: two flows of one client would
 * replace each other's entries. A SYN or an INIT is not sent twice at once.
 */
#ifndef SLUICE_BEGINNING_H
#define SLUICE_BEGINNING_H

#include "clock.h"
#include "tuple.h"

struct beginning {
	struct bpf_spin_lock lock;
	__u32 client; /* a hash of the tuple of the last client whose flow a CPU has begun here */
	__u64 since; /* when; 0: it has opened the flow, or refused it */
};

/* Two clients may share a place, and do not wait for each other: the second is begun as if it were alone. */
#define BEGINNINGS 1024

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, BEGINNINGS);
	__type(key, __u32);
	__type(value, struct beginning);
} sl_beginnings SEC(".maps");

/*
 * How long a CPU has for a flow, which takes it some microseconds if it is not interrupted. After that, another
 * one begins the flow. A CPU that waits looks this often, in two loops, so that the verifier walks the sum of them,
 * and not the product.
 */
#define BEGINNING_NS (100 * 1000ULL)
#define BEGINNING_LOOKS 64
#define BEGINNING_ROUNDS 64

/* is_begun_now reports whether a CPU begins the flow of a client at this moment. */
static __always_inline bool is_begun_now(const struct beginning *b, __u32 client, __u64 now)
{
	__u64 since = *(const volatile __u64 *)&b->since;

	return since && *(const volatile __u32 *)&b->client == client &&
	       elapsed(now, since) < BEGINNING_NS;
}

/*
 * await_beginning waits as long as another CPU begins the flow of a client, or for a part of that time. It is
 * global, so that the verifier walks it once.
 */
__noinline int await_beginning(__u32 client)
{
	__u32 place = client % BEGINNINGS;
	const struct beginning *b = bpf_map_lookup_elem(&sl_beginnings, &place);
	int i;

	for (i = 0; b && i < BEGINNING_LOOKS; i++) {
		if (!is_begun_now(b, client, bpf_ktime_get_ns()))
			break;
	}
	return 0;
}

/* What try_begin finds. */
enum begun {
	BEGUN_NEVER, /* no flow of the client was begun here lately: this CPU is the one that begins it */
	BEGUN_BEFORE, /* one may have been, and is done: this CPU may begin another one */
	BEGUN_NOW, /* another CPU begins it */
};

/* try_begin takes the place of the packet's client for this CPU, unless another CPU has it. */
static __always_inline enum begun try_begin(const struct packet *pkt, struct beginning *b)
{
	enum begun found = BEGUN_BEFORE;

	bpf_spin_lock(&b->lock);
	if (is_begun_now(b, b->client, pkt->now)) {
		if (b->client == pkt->client)
			found = BEGUN_NOW;
	} else {
		if (b->client != pkt->client)
			found = BEGUN_NEVER;
		b->client = pkt->client;
		b->since = pkt->now;
	}
	bpf_spin_unlock(&b->lock);
	return found;
}

/*
 * end_beginning lets other CPUs go on that wait for the flow of the packet. It is global, so that the verifier walks
 * it once.
 */
__noinline int end_beginning(void)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	struct beginning *b;
	__u32 place;

	if (!pkt)
		return 0;
	place = pkt->client % BEGINNINGS;
	b = bpf_map_lookup_elem(&sl_beginnings, &place);
	if (!b)
		return 0;
	bpf_spin_lock(&b->lock);
	if (b->client == pkt->client && b->since == pkt->now)
		b->since = 0;
	bpf_spin_unlock(&b->lock);
	return 0;
}

/*
 * begin_alone is called before the flow of a datagram is opened, whose client's packets arrive at a hook. It
 * returns REASON_NEXT, and end_beginning has to be called afterwards; or REASON_FLOW if another CPU has opened one
 * since the packet was found to have none but that of the time pkt->replaces. It is global, so that the verifier
 * walks it once.
 */
__noinline int begin_alone(__u32 hook)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	enum begun found = BEGUN_NOW;
	struct beginning *b;
	__u32 place;
	int i;

	if (!pkt)
		return REASON_NEXT;
	pkt->client = hash(&pkt->ip.key, offsetof(struct flow_key, proto));
	place = pkt->client % BEGINNINGS;
	b = bpf_map_lookup_elem(&sl_beginnings, &place);
	for (i = 0; b && i < BEGINNING_ROUNDS; i++) {
		found = try_begin(pkt, b);
		if (found != BEGUN_NOW)
			break;
		await_beginning(pkt->client);
		pkt->now = bpf_ktime_get_ns();
	}
	if (found == BEGUN_NEVER)
		return REASON_NEXT;
	pkt->key = pkt->ip.key;
	pkt->key.hook = hook;
	/* In this order, because a flow is in flows before it leaves half_open: see find_flow. */
	if (!copy_holder(pkt,
			 half_open_at(&pkt->key) ?: bpf_map_lookup_elem(&sl_flows, &pkt->key)) ||
	    pkt->gone.role != FLOW_FROM_CLIENT || pkt->gone.created == pkt->replaces)
		return REASON_NEXT;
	end_beginning();
	return REASON_FLOW;
}

#endif
