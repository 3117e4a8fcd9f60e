//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Resolving Services when sockets connect or send: no packet is touched afterwards. */

#include <linux/errno.h>
#include <linux/in.h>

#include "lib/answer.h"
#include "lib/client.h"
#include "lib/opt_out.h"
#include "lib/reason.h"
#include "lib/sock_report.h"
#include "lib/sock_state.h"
#include "lib/udp_dial.h"
#include "lib/udp_pin.h"

const enum udp_mode *btf_udp_mode __attribute__((unused));
const enum agent_mark *btf_agent_mark __attribute__((unused));

/* errno_of returns the error that the application gets, or 0 if the call goes on. */
static __always_inline int errno_of(enum reason why)
{
	if (is_reject(why))
		return ECONNREFUSED;
	return is_drop(why) ? EHOSTUNREACH : 0;
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
	struct addr original_dst;

	if (!err) {
		count(why);
		return 1;
	}
	original_dst = hook_addr(ctx, v6);
	if (!is_probe(&original_dst))
		count(why);
	if (config_has_set_retval) {
		bpf_set_retval(-err);
		return 0;
	}
	if (!connects)
		return 0;
	dial_closed_port(ctx, v6);
	return 1;
}

/* is_always_translated reports whether a UDP socket is translated in every mode: see enum udp_mode. */
static __always_inline bool is_always_translated(struct bpf_sock_addr *ctx)
{
	return config_udp_mode == UDP_OFF && is_host_netns(ctx);
}

/* lookup_frontend copies the pool that serves the destination: see lookup_dial. */
static __always_inline enum reason lookup_frontend(struct bpf_sock_addr *ctx,
						   const struct frontend_key *original_dst,
						   struct pool *pool)
{
	bool localhost = may_be_localhost(original_dst) && is_host_netns(ctx);

	return lookup_dial(original_dst, localhost, pool);
}

/* note_dial notes that a backend gets a new flow of the client. */
static __always_inline void note_dial(const struct backend *be, __u32 client, __u64 now)
{
	if (config_heal)
		note_attempt(be->id, be->service_port_id, client, now);
}

/* pick_for_socket picks a backend for a new flow of this socket; client is its number. */
static __always_inline enum reason pick_for_socket(struct bpf_sock_addr *ctx, bool v6,
						   bool connects, const struct pool *pool,
						   const struct frontend_key *original_dst,
						   __u32 client, __u64 now,
						   const struct backend **be)
{
	struct affinity_key key = {};
	enum reason why;

	why = check_source(ctx, v6, pool, &original_dst->addr);
	if (why)
		return why;
	if (pool->affinity_seconds)
		affinity_key_of(ctx, v6, &original_dst->addr, pool->service_port_id, &key);
	*be = pick_backend(pool, &key, seed_of_dial(pool, client, original_dst, connects), now,
			   true);
	return *be ? REASON_NEXT : why_no_backend(pool);
}

/*
 * The stages of a connect(), top to bottom. That of a UDP socket sends nothing, it names a peer, and
 * tells the program its own address: it is never refused. Devices refuse the datagrams.
 */
static __always_inline enum reason resolve_connect(struct bpf_sock_addr *ctx, bool v6)
{
	struct frontend_key original_dst = frontend_key_of(ctx, v6);
	const struct backend *be = NULL;
	struct pool pool = {};
	enum reason why, answer;
	bool answered, silent;
	__u32 client;
	__u64 now;

	why = translates_connects(ctx->protocol, is_always_translated(ctx));
	if (why)
		return why;

	why = lookup_frontend(ctx, &original_dst, &pool);
	if (why == REASON_PASS_NO_FRONTEND)
		return why;
	if (is_agents_own(ctx) || is_left_alone(ctx, v6, &original_dst, &pool))
		return REASON_PASS_DISABLED;
	answer = why_answers(ctx, v6);
	if (answer)
		return answer;

	now = bpf_ktime_get_ns();
	client = client_of(ctx, v6, &original_dst.addr);
	if (!why)
		why = pick_for_socket(ctx, v6, true, &pool, &original_dst, client, now, &be);
	if (is_refusal(why) && ctx->protocol == IPPROTO_UDP)
		return REASON_PASS_DISABLED;
	if (pool.service_port_id && !is_probe(&original_dst.addr))
		count_new(pool.service_port_id, why);
	report(ctx, v6, why, pool.service_port_id, be);
	if (why || !be)
		return why;

	answered = may_have_received(ctx);
	silent = config_heal && ctx->protocol == IPPROTO_TCP && shows_nothing(ctx, v6);
	if (ctx->protocol == IPPROTO_UDP ? !answered && shows_answers(be->id, now) : !silent)
		note_dial(be, client, now);
	set_hook_addr(ctx, v6, &be->addr, be->port);
	return remember_original_dst(ctx, &original_dst, be, client, answered, silent, now);
}

/* connects resolves a connect(). */
static __always_inline int connects(struct bpf_sock_addr *ctx, bool v6)
{
	enum reason why = resolve_connect(ctx, v6);

	if (is_pass(why))
		forget_original_dst(ctx);
	return finish(ctx, v6, true, why);
}

/* is_taken_by reports whether a backend answers this socket for another destination. */
static __always_inline int is_taken_by(struct bpf_sock_addr *ctx, bool v6, __u32 backend_id,
				       __u64 now)
{
	struct frontend_key original_dst = frontend_key_of(ctx, v6);
	const struct udp_dials *own = dials_of(ctx);
	const struct backend *be = backend_at(backend_id);
	struct udp_pin_key send;

	if (!own || !be)
		return false;
	send = udp_pin_key(bpf_get_socket_cookie(ctx), &original_dst.addr, original_dst.port,
			   UDP_PIN_SEND);
	return answers_another(own, &original_dst, be, now) ||
	       (own->pinned && is_pinned(&send, be, now));
}

/* is_taken_by as global functions, which the verifier walks once. */

__noinline int is_taken_v4(struct bpf_sock_addr *ctx, __u32 backend_id, __u64 now)
{
	return is_taken_by(ctx, false, backend_id, now);
}

__noinline int is_taken_v6(struct bpf_sock_addr *ctx, __u32 backend_id, __u64 now)
{
	return is_taken_by(ctx, true, backend_id, now);
}

static __always_inline bool is_taken(struct bpf_sock_addr *ctx, bool v6, __u32 backend_id,
				     __u64 now)
{
	return v6 ? is_taken_v6(ctx, backend_id, now) : is_taken_v4(ctx, backend_id, now);
}

/*
 * pick_free returns another backend of the pool if be is taken, because its answers could come
 * from either frontend. If all that are tried are taken, the choice stays, and answers come from
 * the frontend of the last datagram.
 */
static __always_inline const struct backend *pick_free(struct bpf_sock_addr *ctx, bool v6,
						       const struct pool *pool, __u64 now,
						       const struct backend *be)
{
	const struct backend *other;
	__u32 first, free = 0, try;

	if (!is_taken(ctx, v6, be->id, now) || !pool->slot_count)
		return be;
	first = random_below(pool->slot_count);
	for (try = 0; try < MAX_PICKS; try++) {
		other = pick_id(pool, spread_slot(pool->slot_base, pool->slot_count, first, try));
		if (other && !is_taken(ctx, v6, other->id, now) && !random_below(++free))
			be = other;
	}
	return be;
}

/*
 * pick_pair picks the backend for the datagrams of this socket to original_dst, and makes the
 * answers come from there. On success it returns one of the REASON_TRANSLATED.
 */
static __always_inline enum reason pick_pair(struct bpf_sock_addr *ctx, bool v6,
					     const struct pool *pool,
					     const struct frontend_key *original_dst,
					     const struct backend **be)
{
	struct udp_dials *own = dials_of(ctx);
	__u64 now = bpf_ktime_get_ns();
	struct udp_pin_key send = {};
	enum reason why;
	__u32 client;

	*be = own ? pick_for_destination(own, pool, original_dst, now) : NULL;
	if (*be && !leaves(pool, (*be)->id, now))
		return REASON_TRANSLATED;

	send = udp_pin_key(bpf_get_socket_cookie(ctx), &original_dst->addr, original_dst->port,
			   UDP_PIN_SEND);
	*be = own && own->pinned ? pick_pinned(pool, &send, now) : NULL;
	if (*be && !leaves(pool, (*be)->id, now)) {
		answer_directly(own, &(*be)->addr, (*be)->port);
		pin_receive(&send, now, *be);
		return REASON_TRANSLATED;
	}

	client = client_of(ctx, v6, &original_dst->addr);
	why = pick_for_socket(ctx, v6, false, pool, original_dst, client, now, be);
	count_new(pool->service_port_id, why);
	if (why || !*be)
		return why;
	if (own)
		*be = pick_free(ctx, v6, pool, now, *be);
	else
		own = bpf_sk_storage_get(&sl_udp_dials, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	note_dial(*be, client, now);
	report(ctx, v6, REASON_TRANSLATED, pool->service_port_id, *be);
	if (!own)
		return REASON_TRANSLATED_UNREMEMBERED;
	if (keep_dial(own, original_dst, *be, client, now, !is_kernel_socket(ctx)))
		return REASON_TRANSLATED;
	answer_directly(own, &(*be)->addr, (*be)->port);
	pin_send(&send, now, *be);
	pin_receive(&send, now, *be);
	return REASON_TRANSLATED;
}

/* The stages of a sendto() with an address, top to bottom. */
static __always_inline enum reason resolve_send(struct bpf_sock_addr *ctx, bool v6)
{
	struct frontend_key original_dst = frontend_key_of(ctx, v6);
	const struct backend *be;
	enum reason why, answer;
	struct pool pool = {};

	why = translates_sends(ctx->protocol, is_always_translated(ctx));
	if (why)
		return why;

	why = lookup_frontend(ctx, &original_dst, &pool);
	if (why == REASON_PASS_NO_FRONTEND)
		return why;
	/* A socket that connected before its pod opted out only receives from the backend. */
	be = why ? NULL : pick_connected(ctx, &pool, &original_dst);
	if (be) {
		set_hook_addr(ctx, v6, &be->addr, be->port);
		return REASON_TRANSLATED;
	}
	if (is_left_alone(ctx, v6, &original_dst, &pool))
		return REASON_PASS_DISABLED;
	answer = v6 ? why_awaited_send_v6(ctx) : why_awaited_send_v4(ctx);
	if (answer)
		return answer;

	if (!why)
		why = pick_pair(ctx, v6, &pool, &original_dst, &be);
	if (is_refusal(why))
		report(ctx, v6, why, pool.service_port_id, NULL);
	if (be)
		set_hook_addr(ctx, v6, &be->addr, be->port);
	return why;
}

/*
 * sends resolves a sendto(). A socket that sends to a backend itself receives its answers from the
 * backend.
 */
static __always_inline int sends(struct bpf_sock_addr *ctx, bool v6)
{
	struct addr to = hook_addr(ctx, v6);
	struct udp_dials *own;
	enum reason why;

	/* The kernel also runs this hook for a send() without address, if an IPv6 socket
	 * is connected to an IPv4 peer: that was resolved when it connected. */
	if (is_peer(ctx, v6, &to, hook_port(ctx)))
		return 1;

	why = resolve_send(ctx, v6);
	if (why == REASON_PASS_NO_FRONTEND)
		v6 ? note_question_v6(ctx) : note_question_v4(ctx);
	own = why == REASON_PASS_NO_FRONTEND ? dials_of(ctx) : NULL;
	if (own) {
		answer_directly(own, &to, hook_port(ctx));
		if (own->pinned)
			unpin_source(bpf_get_socket_cookie(ctx), &to, hook_port(ctx));
	}
	return finish(ctx, v6, false, why);
}

/*
 * answer_from_original_dst shows the application the original destination instead of the backend.
 */
static __always_inline int answer_from_original_dst(struct bpf_sock_addr *ctx, bool v6,
						    bool receives)
{
	struct addr peer = hook_addr(ctx, v6), original_dst;
	struct sock_state *state = NULL;
	__be16 port = hook_port(ctx), original_port;
	struct udp_dial first = {};
	struct udp_dials *own;
	__u64 now;

	if (!receives || is_connected(ctx))
		state = state_of(ctx);
	if (config_heal && state && receives && !state->answered)
		note_answer(state, sock_of(ctx), bpf_ktime_get_ns());
	if (state && get_original_dst(state, &peer, port, &original_dst, &original_port)) {
		set_hook_addr(ctx, v6, &original_dst, original_port);
		return 1;
	}
	own = receives ? dials_of(ctx) : NULL;
	if (!own)
		return 1;
	now = bpf_ktime_get_ns();
	if (original_dst_for(own, &peer, port, now, &original_dst, &original_port, &first) ||
	    (own->pinned && pinned_source(bpf_get_socket_cookie(ctx), &peer, port, now,
					  &original_dst, &original_port)))
		set_hook_addr(ctx, v6, &original_dst, original_port);
	if (first.backend_id)
		note_datagram(first.backend_id, first.service_port_id, first.client,
			      first.last_used, now);
	return 1;
}

SEC("cgroup/connect4")
int sluice_connect4(struct bpf_sock_addr *ctx)
{
	return connects(ctx, false);
}

SEC("cgroup/connect6")
int sluice_connect6(struct bpf_sock_addr *ctx)
{
	return connects(ctx, true);
}

SEC("cgroup/sendmsg4")
int sluice_sendmsg4(struct bpf_sock_addr *ctx)
{
	return sends(ctx, false);
}

SEC("cgroup/sendmsg6")
int sluice_sendmsg6(struct bpf_sock_addr *ctx)
{
	return sends(ctx, true);
}

SEC("cgroup/recvmsg4")
int sluice_recvmsg4(struct bpf_sock_addr *ctx)
{
	return answer_from_original_dst(ctx, false, true);
}

SEC("cgroup/recvmsg6")
int sluice_recvmsg6(struct bpf_sock_addr *ctx)
{
	return answer_from_original_dst(ctx, true, true);
}

SEC("cgroup/getpeername4")
int sluice_getpeer4(struct bpf_sock_addr *ctx)
{
	return answer_from_original_dst(ctx, false, false);
}

SEC("cgroup/getpeername6")
int sluice_getpeer6(struct bpf_sock_addr *ctx)
{
	return answer_from_original_dst(ctx, true, false);
}

/*
 * count_sock_bytes counts the bytes of a TCP socket that is closed: what it has received, and what
 * it has sent or, if the connection is open, is yet to send. SYN and FIN count as a byte each.
 */
static __always_inline void count_sock_bytes(struct bpf_sock *ctx, __u32 service_port_id)
{
	const struct tcp_sock *tp = (const void *)ctx; /* the context of this hook is the socket */
	__u64 sent = BPF_CORE_READ(tp, bytes_acked);

	if (ctx->state != BPF_TCP_CLOSE)
		sent += (__u32)(BPF_CORE_READ(tp, write_seq) - BPF_CORE_READ(tp, snd_una));
	count_bytes(service_port_id, sent, BPF_CORE_READ(tp, bytes_received));
}

/* A socket that is closed leaves the loads of its backends. */
SEC("cgroup/sock_release")
int sluice_release(struct bpf_sock *ctx)
{
	struct sock_state *state = bpf_sk_storage_get(&sl_sock_state, ctx, NULL, 0);
	const struct udp_dials *own;
	__u64 now;

	if (state)
		leave_load(state);
	if (config_stats && state && ctx->protocol == IPPROTO_TCP)
		count_sock_bytes(ctx, state->service_port_id);
	now = config_heal && state ? bpf_ktime_get_ns() : 0;
	if (ctx->protocol != IPPROTO_UDP) {
		/* Its connect() has failed before the first SYN, so that no handshake has ended. */
		if (now && ctx->state == BPF_TCP_CLOSE && !state->handshake_counted)
			note_abandoned(state->backend_id, state->service_port_id, state->client,
				       state->since, now);
		return 1;
	}
	/* A socket that is connected no more may have received from any peer. */
	if (now && !state->answered && ctx->state == BPF_TCP_ESTABLISHED) {
		/* The context of this hook is the socket. */
		if (elapsed(now, state->since) < MAX_ANSWER_AGE)
			note_answer(state, (const void *)ctx, now);
		note_left(state, IPPROTO_UDP, now);
	}
	own = bpf_sk_storage_get(&sl_udp_dials, ctx, NULL, 0);
	if (own)
		release_dials(own);
	return 1;
}

char sock_license[] SEC("license") = "Dual BSD/GPL";
