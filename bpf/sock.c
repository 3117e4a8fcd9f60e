//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Services, resolved where sockets dial: no packet is touched afterwards. */
#include "lib/affinity.h"
#include "lib/frontend.h"
#include "lib/netns.h"
#include "lib/sock_addr.h"
#include "lib/sock_source.h"
#include "lib/sock_state.h"
#include "lib/stat.h"
#include "lib/udp_dial.h"
#include "lib/udp_pin.h"
#include "lib/verdict.h"

#include <linux/in.h>

const enum udp_mode *btf_udp_mode __attribute__((unused));

/* dialled_key is what the client dialled; the kernel takes "any" for loopback. */
static __always_inline struct frontend_key dialled_key(struct bpf_sock_addr *ctx, bool v6)
{
	struct addr to = hook_addr(ctx, v6);

	return (struct frontend_key){
		.addr = addr_is_any(&to) ? addr_loopback(&to) : to,
		.port = hook_port(ctx),
		.proto = ctx->protocol,
		.scope = SCOPE_INTERNAL,
	};
}

static __always_inline enum reason translates_connects(struct bpf_sock_addr *ctx)
{
	if (ctx->protocol == IPPROTO_TCP)
		return REASON_NEXT;
	if (ctx->protocol != IPPROTO_UDP)
		return REASON_PASS_PROTOCOL;
	return config_udp_mode >= UDP_CONNECTED ? REASON_NEXT : REASON_PASS_DISABLED;
}

static __always_inline enum reason translates_sends(struct bpf_sock_addr *ctx)
{
	if (ctx->protocol != IPPROTO_UDP)
		return REASON_PASS_PROTOCOL;
	return config_udp_mode >= UDP_ALL ? REASON_NEXT : REASON_PASS_DISABLED;
}

/*
 * lookup_frontend copies the pool that serves what the client dialled. A destination that
 * is none of ours costs the filter, and the search for the range it would be allocated in.
 */
static __always_inline enum reason
lookup_frontend(struct bpf_sock_addr *ctx, const struct frontend_key *dialled, struct pool *pool)
{
	struct addr loopback = addr_loopback(&dialled->addr);
	bool maybe = may_be_ours(&dialled->addr), node_ports = false;
	enum reason why;

	if (maybe) {
		why = find_pool(dialled, pool);
		if (why != REASON_PASS_NO_FRONTEND)
			return why;
		node_ports = addr_flags(&dialled->addr) & ADDR_NODE_PORT;
	}
	/* Node ports answer on loopback too, but only where it is the node's own. */
	if (addr_equal(&dialled->addr, &loopback))
		node_ports = config_localhost_node_ports && is_host_netns(ctx);
	if (node_ports) {
		why = find_node_port(dialled, pool);
		if (why != REASON_PASS_NO_FRONTEND)
			return why;
	}
	if (maybe && is_cluster_ip(dialled))
		return REASON_REJECT_NO_PORT;
	return is_service_cidr(&dialled->addr) ? REASON_DROP_UNALLOCATED : REASON_PASS_NO_FRONTEND;
}

/*
 * seed_of_socket is what the pool's algorithm goes by: a socket that dials has no address
 * and no port yet, so the client is its network namespace, and each flow another one.
 */
static __always_inline __u32 seed_of_socket(const struct pool *pool, __u64 netns,
					    const struct addr *dialled)
{
	switch (pool->algorithm) {
	case ALGORITHM_RR:
		return pool->service_port_id;
	case ALGORITHM_SH:
		return hash(&netns, sizeof(netns));
	case ALGORITHM_DH:
		return hash(dialled, sizeof(*dialled));
	default:
		return bpf_get_prandom_u32();
	}
}

/* pick_for_socket chooses for a new flow of this socket, and counts the outcome. */
static __always_inline enum reason pick_for_socket(struct bpf_sock_addr *ctx, bool v6,
						   const struct pool *pool,
						   const struct addr *dialled, __u64 now,
						   const struct backend **be)
{
	__u64 netns = bpf_get_netns_cookie(ctx);
	struct affinity_key client = netns_client(pool, netns);
	enum reason why;

	why = check_source(ctx, v6, pool, dialled);
	if (!why) {
		*be = pick_backend(pool, &client, seed_of_socket(pool, netns, dialled), now, true);
		if (!*be)
			why = why_no_backend(pool);
	}
	count_new(pool->service_port_id, why);
	return why;
}

/* How a connect() is resolved, top to bottom. */
static __always_inline enum reason resolve_connect(struct bpf_sock_addr *ctx, bool v6)
{
	struct frontend_key dialled = dialled_key(ctx, v6);
	const struct backend *be = NULL;
	struct pool pool;
	enum reason why;

	why = translates_connects(ctx);
	if (why)
		return why;

	why = lookup_frontend(ctx, &dialled, &pool);
	if (why)
		return why;

	why = pick_for_socket(ctx, v6, &pool, &dialled.addr, bpf_ktime_get_ns(), &be);
	if (why || !be)
		return why;

	set_hook_addr(ctx, v6, &be->addr, be->port);
	return remember_dialled(ctx, &dialled, be);
}

/* A refused connect leaves a UDP socket with the peer it had. */
static __always_inline int connects(struct bpf_sock_addr *ctx, bool v6)
{
	enum reason why = resolve_connect(ctx, v6);

	if (is_pass(why))
		forget_dialled(ctx);
	return finish(ctx, v6, true, why);
}

/* is_taken says whether a backend answers this socket for another destination. */
static __always_inline bool is_taken(const struct udp_dials *own,
				     const struct frontend_key *dialled,
				     const struct udp_pin_key *send, const struct backend *be,
				     __u64 now)
{
	return answers_another(own, dialled, be, now) || (own->pinned && is_pinned(send, be, now));
}

/*
 * pick_free returns another backend of the pool if be is taken: its answers could come
 * from either frontend. If all that we look at are, the choice stays, and answers come
 * from the frontend that was dialled last.
 */
static __always_inline const struct backend *
pick_free(const struct udp_dials *own, const struct pool *pool, const struct frontend_key *dialled,
	  const struct udp_pin_key *send, __u64 now, const struct backend *be)
{
	const struct backend *other;
	__u32 first, try;

	if (!is_taken(own, dialled, send, be, now) || !pool->slot_count)
		return be;
	first = random_below(pool->slot_count);
	for (try = 0; try < MAX_PICKS; try++) {
		other = pick_slot(pool, first, try);
		if (other && !is_taken(own, dialled, send, other, now))
			return other;
	}
	return be;
}

/*
 * pick_pair chooses the backend for the datagrams of this socket to dialled, and makes
 * its answers come from there. On success it is one of the REASON_TRANSLATED.
 */
static __always_inline enum reason pick_pair(struct bpf_sock_addr *ctx, bool v6,
					     const struct pool *pool,
					     const struct frontend_key *dialled,
					     const struct backend **be)
{
	struct udp_dials *own = dials_of(ctx);
	__u64 now = bpf_ktime_get_ns();
	struct udp_pin_key send = {};
	enum reason why;

	*be = own ? pick_dialled(own, pool, dialled, now) : NULL;
	if (*be)
		return REASON_TRANSLATED;

	send = udp_pin_key(bpf_get_socket_cookie(ctx), &dialled->addr, dialled->port, UDP_PIN_SEND);
	*be = own && own->pinned ? pick_pinned(pool, &send, now) : NULL;
	if (*be) {
		answer_directly(own, &(*be)->addr, (*be)->port);
		pin_receive(&send, now, *be);
		return REASON_TRANSLATED;
	}

	why = pick_for_socket(ctx, v6, pool, &dialled->addr, now, be);
	if (why || !*be)
		return why;
	own = bpf_sk_storage_get(&sl_udp_dials, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!own)
		return REASON_TRANSLATED_UNREMEMBERED;
	*be = pick_free(own, pool, dialled, &send, now, *be);
	if (keep_dial(own, dialled, *be, now, !is_kernels(ctx)))
		return REASON_TRANSLATED;
	answer_directly(own, &(*be)->addr, (*be)->port);
	pin_send(&send, now, *be);
	pin_receive(&send, now, *be);
	return REASON_TRANSLATED;
}

/* How a sendto() with an address is resolved, top to bottom. */
static __always_inline enum reason resolve_send(struct bpf_sock_addr *ctx, bool v6)
{
	struct frontend_key dialled = dialled_key(ctx, v6);
	const struct backend *be;
	struct pool pool;
	enum reason why;

	why = translates_sends(ctx);
	if (why)
		return why;

	why = lookup_frontend(ctx, &dialled, &pool);
	if (why)
		return why;

	why = REASON_TRANSLATED;
	be = pick_connected(ctx, &pool, &dialled);
	if (!be)
		why = pick_pair(ctx, v6, &pool, &dialled, &be);
	if (be)
		set_hook_addr(ctx, v6, &be->addr, be->port);
	return why;
}

/* A socket that sends to a backend itself wants to hear the backend answer. */
static __always_inline int sends(struct bpf_sock_addr *ctx, bool v6)
{
	struct addr to = hook_addr(ctx, v6);
	struct udp_dials *own;
	enum reason why;

	/* The kernel also calls for a send() without address, if an IPv6 socket
	 * is connected to an IPv4 peer: that was resolved when it connected. */
	if (is_peer(ctx, v6, &to, hook_port(ctx)))
		return 1;

	why = resolve_send(ctx, v6);
	own = why == REASON_PASS_NO_FRONTEND ? dials_of(ctx) : NULL;
	if (own) {
		answer_directly(own, &to, hook_port(ctx));
		if (own->pinned)
			unpin_source(bpf_get_socket_cookie(ctx), &to, hook_port(ctx));
	}
	return finish(ctx, v6, false, why);
}

/* answer_as_dialled shows the application what it dialled, not the backend. */
static __always_inline int answer_as_dialled(struct bpf_sock_addr *ctx, bool v6, bool receives)
{
	struct addr peer = hook_addr(ctx, v6), dialled;
	struct sock_state *state = state_of(ctx);
	__be16 port = hook_port(ctx), dialled_port;
	struct udp_dials *own;
	__u64 now;

	if (state && (!receives || is_connected(ctx)) &&
	    connected_by(state, &peer, port, &dialled, &dialled_port)) {
		set_hook_addr(ctx, v6, &dialled, dialled_port);
		return 1;
	}
	own = receives ? dials_of(ctx) : NULL;
	if (!own)
		return 1;
	now = bpf_ktime_get_ns();
	if (dialled_for(own, &peer, port, now, &dialled, &dialled_port) ||
	    (own->pinned &&
	     pinned_source(bpf_get_socket_cookie(ctx), &peer, port, now, &dialled, &dialled_port)))
		set_hook_addr(ctx, v6, &dialled, dialled_port);
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
	return answer_as_dialled(ctx, false, true);
}

SEC("cgroup/recvmsg6")
int sluice_recvmsg6(struct bpf_sock_addr *ctx)
{
	return answer_as_dialled(ctx, true, true);
}

SEC("cgroup/getpeername4")
int sluice_getpeer4(struct bpf_sock_addr *ctx)
{
	return answer_as_dialled(ctx, false, false);
}

SEC("cgroup/getpeername6")
int sluice_getpeer6(struct bpf_sock_addr *ctx)
{
	return answer_as_dialled(ctx, true, false);
}

/* A socket is closed: it is in no backend's load any more. */
SEC("cgroup/sock_release")
int sluice_release(struct bpf_sock *ctx)
{
	const struct sock_state *state = bpf_sk_storage_get(&sl_sock_state, ctx, NULL, 0);
	const struct udp_dials *own = NULL;

	if (state && state->counted)
		add_sockets(state->backend_id, -1);
	if (ctx->protocol == IPPROTO_UDP)
		own = bpf_sk_storage_get(&sl_udp_dials, ctx, NULL, 0);
	if (own)
		release_dials(own);
	return 1;
}

char sock_license[] SEC("license") = "Dual BSD/GPL";
