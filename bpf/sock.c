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

static __always_inline enum reason
lookup_frontend(struct bpf_sock_addr *ctx, const struct frontend_key *dialled, struct frontend *fe)
{
	struct addr loopback = addr_loopback(&dialled->addr);
	bool node_ports;
	__u32 flags;

	if (find_frontend(dialled, false, fe))
		return REASON_NEXT;

	if (addr_equal(&dialled->addr, &loopback)) {
		/* Node ports answer on loopback too, but only where it is the node's own. */
		node_ports = config_localhost_node_ports && is_host_netns(ctx);
	} else {
		flags = addr_flags(&dialled->addr);
		/* A lookup can miss a frontend that is just being replaced. */
		if (flags & ADDR_SERVICE && find_frontend(dialled, true, fe))
			return REASON_NEXT;
		node_ports = flags & ADDR_NODE_PORT;
	}
	if (node_ports && find_node_port(dialled, fe))
		return REASON_NEXT;
	return why_no_frontend(dialled);
}

/*
 * seed_of_socket is what fe's algorithm goes by: a socket that dials has no address
 * and no port yet, so the client is its network namespace, and each flow another one.
 */
static __always_inline __u32 seed_of_socket(const struct frontend *fe, __u64 netns,
					    const struct addr *dialled)
{
	switch (fe->algorithm) {
	case ALGORITHM_RR:
		return fe->id;
	case ALGORITHM_SH:
		return hash(&netns, sizeof(netns));
	case ALGORITHM_DH:
		return hash(dialled, sizeof(*dialled));
	default:
		return bpf_get_prandom_u32();
	}
}

/* pick_for_socket chooses for a new flow of this socket, and counts what came of it. */
static __always_inline enum reason pick_for_socket(struct bpf_sock_addr *ctx, bool v6,
						   const struct frontend *fe,
						   const struct addr *dialled, __u64 now,
						   struct choice *to)
{
	__u64 netns = bpf_get_netns_cookie(ctx);
	struct affinity_key client = netns_client(fe, netns);
	enum reason why;

	why = check_source(ctx, v6, fe, dialled);
	if (!why)
		why = pick_backend(fe, &client, seed_of_socket(fe, netns, dialled), now, to);
	add_stat(fe->id, why ?: REASON_TRANSLATED, 1);
	return why;
}

/* The way of a connect() through the house, top to bottom. */
static __always_inline enum reason resolve_connect(struct bpf_sock_addr *ctx, bool v6)
{
	struct frontend_key dialled = dialled_key(ctx, v6);
	struct frontend fe;
	struct choice to = {};
	enum reason why;

	why = translates_connects(ctx);
	if (why)
		return why;

	why = lookup_frontend(ctx, &dialled, &fe);
	if (why)
		return why;

	why = pick_for_socket(ctx, v6, &fe, &dialled.addr, bpf_ktime_get_ns(), &to);
	if (why)
		return why;

	set_hook_addr(ctx, v6, &to.be.addr, to.be.port);
	return remember_dialled(ctx, &dialled, &fe, &to);
}

/* A refused connect leaves a UDP socket with the peer it had. */
static __always_inline int connects(struct bpf_sock_addr *ctx, bool v6)
{
	enum reason why = resolve_connect(ctx, v6);

	if (is_pass(why))
		forget_dialled(ctx);
	return finish(ctx, v6, true, why);
}

/* pick_for_datagrams chooses for the first datagram of a flow, and pins it. */
static __always_inline enum reason pick_for_datagrams(struct bpf_sock_addr *ctx, bool v6,
						      const struct frontend *fe,
						      const struct frontend_key *dialled,
						      const struct udp_pin_key *send, __u64 now,
						      struct choice *to)
{
	enum reason why;

	why = pick_for_socket(ctx, v6, fe, &dialled->addr, now, to);
	if (why)
		return why;

	pick_free(fe, send, now, to);
	pin_send(fe, send, now, to);
	return REASON_NEXT;
}

/*
 * pick_pair chooses the backend for the datagrams of this socket to dialled,
 * and makes its answers come from there.
 */
static __always_inline enum reason pick_pair(struct bpf_sock_addr *ctx, bool v6,
					     const struct frontend *fe,
					     const struct frontend_key *dialled, struct choice *to)
{
	struct udp_pin_key send = udp_pin_key(bpf_get_socket_cookie(ctx), &dialled->addr,
					      dialled->port, UDP_PIN_SEND);
	__u64 now = bpf_ktime_get_ns();
	bool pinned = pick_pinned(fe, &send, now, to);
	enum reason why;

	if (!pinned) {
		why = pick_for_datagrams(ctx, v6, fe, dialled, &send, now, to);
		if (why)
			return why;
	}
	pin_receive(fe, &send, now, to);
	/* What a connected socket remembers is what it is connected to. */
	if (!is_connected(ctx) && (!pinned || !state_of(ctx)))
		remember_dialled(ctx, dialled, fe, to);
	return REASON_NEXT;
}

/* The way of a sendto() with an address through the house. */
static __always_inline enum reason resolve_send(struct bpf_sock_addr *ctx, bool v6)
{
	struct frontend_key dialled = dialled_key(ctx, v6);
	struct frontend fe;
	struct choice to = {};
	enum reason why;

	why = translates_sends(ctx);
	if (why)
		return why;

	why = lookup_frontend(ctx, &dialled, &fe);
	if (why)
		return why;

	if (!pick_connected(ctx, &fe, &dialled, &to)) {
		why = pick_pair(ctx, v6, &fe, &dialled, &to);
		if (why)
			return why;
	}

	set_hook_addr(ctx, v6, &to.be.addr, to.be.port);
	return REASON_TRANSLATED;
}

/* A socket that sends to a backend itself wants to hear the backend answer. */
static __always_inline int sends(struct bpf_sock_addr *ctx, bool v6)
{
	struct addr to = hook_addr(ctx, v6);
	enum reason why;

	/* The kernel also calls for a send() without address, if an IPv6 socket
	 * is connected to an IPv4 peer: that was resolved when it connected. */
	if (is_peer(ctx, v6, &to, hook_port(ctx)))
		return 1;

	why = resolve_send(ctx, v6);
	if (why == REASON_PASS_NO_FRONTEND && state_of(ctx))
		unpin_source(bpf_get_socket_cookie(ctx), &to, hook_port(ctx));
	return finish(ctx, v6, false, why);
}

/* answer_as_dialled shows the application what it dialled, not the backend. */
static __always_inline int answer_as_dialled(struct bpf_sock_addr *ctx, bool v6, bool receives)
{
	const struct sock_state *state = state_of(ctx);
	struct addr peer = hook_addr(ctx, v6), dialled;
	__be16 port = hook_port(ctx), dialled_port;

	if (!state)
		return 1;
	if ((!receives || is_connected(ctx)) && has_backend(state, &peer, port))
		set_hook_addr(ctx, v6, &state->dialled, state->dialled_port);
	else if (receives && pinned_source(bpf_get_socket_cookie(ctx), &peer, port,
					   bpf_ktime_get_ns(), &dialled, &dialled_port))
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

SEC("cgroup/sock_release")
int sluice_release(struct bpf_sock *ctx)
{
	const struct sock_state *last;

	if (ctx->protocol != IPPROTO_UDP)
		return 1;
	last = bpf_sk_storage_get(&sl_sock_state, ctx, NULL, 0);
	if (!last)
		return 1;
	if (last->counted)
		add_sockets(last->backend_id, -1);
	unpin(bpf_get_socket_cookie(ctx), last);
	return 1;
}

char sock_license[] SEC("license") = "Dual BSD/GPL";
