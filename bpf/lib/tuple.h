/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Tuples: which are in use, reserving one for a new flow, and the masquerade. */
#ifndef SLUICE_TUPLE_H
#define SLUICE_TUPLE_H

#include <linux/netfilter/nf_conntrack_common.h>
#include <linux/netfilter/nf_conntrack_tcp.h>

#include "kernel.h"
#include "route.h"
#include "pick.h"
#include "track.h"

/* Whether a tuple is in use by a socket of this node, or by netfilter. */

/* The kernel has these if config_conntrack is set. */
struct conntrack_options {
	__s32 netns;
	__s32 error;
	__u8 proto;
	__u8 reserved[3];
};

extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *ctx, struct bpf_sock_tuple *tuple,
					 __u32 tuple_size, struct conntrack_options *options,
					 __u32 options_size)
	__attribute__((section(".ksyms"), weak));
extern void bpf_ct_release(struct nf_conn *ct) __attribute__((section(".ksyms"), weak));

/*
 * tuple_of converts a key to the tuple that socket and conntrack lookups take, and returns its
 * size.
 */
static __always_inline __u32 tuple_of(const struct flow_key *key, struct bpf_sock_tuple *tuple)
{
	if (addr_is_v4(&key->src)) {
		tuple->ipv4.saddr = key->src.words[3];
		tuple->ipv4.daddr = key->dst.words[3];
		tuple->ipv4.sport = key->src_port;
		tuple->ipv4.dport = key->dst_port;
		return sizeof(tuple->ipv4);
	}
	__builtin_memcpy(tuple->ipv6.saddr, &key->src, sizeof(key->src));
	__builtin_memcpy(tuple->ipv6.daddr, &key->dst, sizeof(key->dst));
	tuple->ipv6.sport = key->src_port;
	tuple->ipv6.dport = key->dst_port;
	return sizeof(tuple->ipv6);
}

/*
 * has_socket reports whether a socket of this node is connected with a tuple. One that listens, or
 * that waits for datagrams of any sender, has a port, but no tuple: all ports would be in use if it had
 * them all.
 */
static __always_inline bool has_socket(struct __sk_buff *ctx, struct bpf_sock_tuple *tuple,
				       __u32 size, __u8 proto)
{
	struct bpf_sock *sk = NULL;
	bool connected;

	if (proto == IPPROTO_TCP)
		sk = bpf_skc_lookup_tcp(ctx, tuple, size, BPF_F_CURRENT_NETNS, 0);
	else if (proto == IPPROTO_UDP)
		sk = bpf_sk_lookup_udp(ctx, tuple, size, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	connected = proto == IPPROTO_TCP ? sk->state != BPF_TCP_LISTEN : sk->dst_port != 0;
	bpf_sk_release(sk);
	return connected;
}

/* Which of the connections that netfilter tracks. */
enum tracked {
	TRACKED_ANY,
	TRACKED_ESTABLISHED, /* that were answered and have not ended */
	TRACKED_SERVED, /* that were answered, or whose packets get another destination */
	TRACKED_AWAITED, /* whose replies have the tuple */
};

/* answers_as reports whether the replies of a connection come from an address and port. */
static __always_inline bool answers_as(const struct nf_conn *ct, const struct addr *a, __be16 port)
{
	const struct nf_conntrack_man *from = &ct->tuplehash[1].tuple.src;
	const union nf_inet_addr *ip = &from->u3;

	if (from->u.all != port)
		return false;
	if (addr_is_v4(a))
		return ip->all[0] == a->words[3];
	return ip->all[0] == a->words[0] && ip->all[1] == a->words[1] &&
	       ip->all[2] == a->words[2] && ip->all[3] == a->words[3];
}

/*
 * is_tracked reports whether netfilter tracks a connection of this kind with packets of a tuple. The kernel only
 * looks up those of TCP and UDP.
 */
static __always_inline bool is_tracked(struct __sk_buff *ctx, const struct flow_key *key,
				       struct bpf_sock_tuple *tuple, enum tracked kind)
{
	struct conntrack_options options = { .netns = BPF_F_CURRENT_NETNS, .proto = key->proto };
	bool is = true;
	struct nf_conn *ct;

	if (!config_conntrack)
		return false;
	ct = bpf_skb_ct_lookup(ctx, tuple, tuple_of(key, tuple), &options, sizeof(options));
	if (!ct)
		return false;
	if (kind == TRACKED_SERVED)
		is = ct->status & IPS_SEEN_REPLY || !answers_as(ct, &key->dst, key->dst_port);
	else if (kind == TRACKED_AWAITED)
		is = answers_as(ct, &key->src, key->src_port);
	else if (kind == TRACKED_ESTABLISHED && key->proto == IPPROTO_TCP)
		is = ct->proto.tcp.state == TCP_CONNTRACK_ESTABLISHED;
	else if (kind == TRACKED_ESTABLISHED)
		is = ct->status & IPS_SEEN_REPLY;
	bpf_ct_release(ct);
	return is;
}

/*
 * is_taken reports whether the replies to the flow of the packet, as the entry of this role
 * matches them, could be those of another connection.
 *
 * A masquerade must not use a tuple of a connected socket of this node, or one that netfilter has assigned.
 * A client that has connected to the backend directly, from the same port, keeps that connection;
 * netfilter also keeps flows that have ended, as connections that are unanswered or closed. A foreign flow takes
 * no tuple of any connection.
 */
__noinline int is_taken(struct __sk_buff *ctx, __u32 role)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	bool own;
	__u32 size;
	__u8 proto;

	if (!pkt)
		return false;
	own = role == FLOW_FROM_BACKEND || is_of_node(&pkt->flow);
	comes_as(&pkt->flow, role, &pkt->key);
	proto = pkt->flow.proto;
	if (proto != IPPROTO_TCP && proto != IPPROTO_UDP)
		return false;
	size = tuple_of(&pkt->key, &pkt->tuple);
	if (own && has_socket(ctx, &pkt->tuple, size, proto))
		return true;
	return is_tracked(ctx, &pkt->key, &pkt->tuple,
			  own || is_foreign(&pkt->flow) ? TRACKED_ANY : TRACKED_ESTABLISHED);
}

/* Reserving a tuple: a new flow takes one that no flow holds, or that of a flow that has ended. */

/*
 * After this time without a packet, another flow may take the tuple of an entry that has seen only
 * first packets. Otherwise a flood of first packets would hold all ports of a masquerade.
 */
#define OPENING_NS (3 * 1000000000ULL)

/* How long Linux keeps TIME_WAIT, and the second by which last_seen may lag behind. */
#define TIME_WAIT_NS (61 * 1000000000ULL)

/*
 * A UDP flow that was answered is a stream from this age on, as for netfilter. Before, it holds its
 * tuple no longer than one that is unanswered: most are a question and its answer, and do not go on.
 */
#define STREAM_NS (2 * 1000000000ULL)

/* How an entry holds its tuple. */
enum hold {
	HOLD_NONE = 0, /* the tuple is free */
	/*
	 * It loses the tuple if no other one is free: it has ended, but its peer may still be in TIME_WAIT or
	 * about to send, or it is a datagram and at most its answer.
	 */
	HOLD_WEAK = 1,
	HOLD_LIVE = 2,
};

/*
 * is_same reports whether two entries belong to flows of one client port to one original
 * destination.
 */
static __always_inline bool is_same(const struct flow *a, const struct flow *b)
{
	return addr_equal(&a->client, &b->client) && a->client_port == b->client_port &&
	       addr_equal(&a->original_dst, &b->original_dst) &&
	       a->original_port == b->original_port;
}

/*
 * is_in_time_wait reports whether the backend, which closed the old flow first, would treat the
 * SYN at hand as a segment of that connection. It would answer with an ACK, the client with an
 * RST, and the client would only try again after a second. In TIME_WAIT, Linux accepts a SYN if
 * its timestamp is newer (RFC 6191) or, without timestamps, its sequence number. Timestamps of one
 * client to one address grow. The backend's last acknowledgement is the sequence number at which
 * the old connection ended.
 */
static __always_inline bool is_in_time_wait(const struct packet *pkt, const struct flow *had)
{
	__s8 newer = pkt->tcp.stamp - had->stamp;

	if (!(had->ending & FLOW_TIME_WAIT) || elapsed(pkt->now, had->last_seen) > TIME_WAIT_NS)
		return false;
	if (!(had->ending & FLOW_STAMPED) || !pkt->tcp.stamped)
		return (__s32)(pkt->tcp.seq - had->ack) <= 0;
	return newer < 0 || (!newer && !(addr_equal(&had->client, &pkt->flow.client) &&
					 addr_equal(&had->original_dst, &pkt->flow.original_dst)));
}

/* hold_on_tuple returns how an entry holds its tuple against the flow of the packet. */
static __always_inline enum hold hold_on_tuple(const struct packet *pkt, const struct flow *had)
{
	bool stream = !is_new(had) && had->last_seen >= had->created + STREAM_NS;
	__u64 idle, limit;

	if (is_same(had, &pkt->flow))
		return HOLD_NONE;
	idle = elapsed(pkt->now, had->last_seen);
	limit = stream ? config_udp_idle_ns : config_udp_unanswered_ns;
	if (had->proto == IPPROTO_UDP && idle > limit)
		return HOLD_NONE;
	if (had->proto ==
	    IPPROTO_UDP) /* an answer that is on its way must not reach another client */
		return stream || idle <= OPENING_NS ? HOLD_LIVE : HOLD_WEAK;
	if (had->ending & FLOW_OVER)
		return is_in_time_wait(pkt, had) ? HOLD_WEAK : HOLD_NONE;
	if (is_new(had))
		return idle > OPENING_NS ? HOLD_NONE : HOLD_LIVE;
	if (had->state == FLOW_OPEN || idle <= CLOSING_NS)
		return HOLD_LIVE;
	/* The other side may go on for long after a FIN, or have ignored an RST. */
	return had->proto == IPPROTO_TCP ? HOLD_WEAK : HOLD_NONE;
}

/*
 * gives_up reports whether pkt->gone loses the tuple at hand to the flow of the packet. If that is not urgent, only
 * a tuple that is free is lost; of others that would be, the one that has been idle the longest is recorded. It is for
 * ingress, and global, so that the verifier walks it once.
 */
__noinline int gives_up(__u32 urgent)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	const struct flow *had;
	enum hold hold;

	if (!pkt)
		return false;
	had = &pkt->gone;
	hold = hold_on_tuple(pkt, had);
	if (hold == HOLD_WEAK && !urgent && (!pkt->weak || had->last_seen < pkt->weak)) {
		pkt->weak = had->last_seen;
		pkt->weak_port = pkt->key.dst_port;
	}
	return hold == HOLD_NONE || (hold == HOLD_WEAK && urgent && had->last_seen == pkt->weak);
}

/*
 * copy_holder copies had, an entry at pkt->key or NULL, to pkt->gone, and reports whether it is an
 * entry of that key: another CPU may delete it at any time, and the kernel soon gives its memory
 * to another flow. See set_target.
 */
static __always_inline bool copy_holder(struct packet *pkt, const struct flow *had)
{
	if (!had)
		return false;
	pkt->gone = *had;
	barrier();
	comes_as(had, had->role, &pkt->to);
	return same_tuple(&pkt->to, &pkt->key);
}

/* How many connections that may have ended are checked to make room for one. */
#define MAX_ENDED_TRIES 8

/*
 * forget_ended forgets the next connection of those listed as ended, and is false if there is none.
 * It may be gone by now, or have continued. It is for ingress, and global, so that the verifier walks
 * it once.
 */
__noinline int forget_ended(void)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);

	if (!pkt || bpf_map_pop_elem(&sl_ended, &pkt->key))
		return false;
	if (copy_holder(pkt, bpf_map_lookup_elem(&sl_flows, &pkt->key)) && has_ended(HOOK_INGRESS))
		forget_all(pkt);
	return true;
}

/*
 * make_room forgets connections that have ended until there is room in flows for another one, and
 * reports whether there is. It is global, so that the verifier walks it once.
 */
__noinline int make_room(void)
{
	int i;

	for (i = 0; i < MAX_ENDED_TRIES; i++) {
		if (has_share(IPPROTO_TCP))
			return true;
		if (!forget_ended())
			return false;
	}
	return false;
}

/*
 * reserve_opening puts the entry of the packet's flow at pkt->key into half_open, if it is free
 * there: see reserve.
 */
static __always_inline int reserve_opening(struct packet *pkt, __u32 urgent)
{
	int put = put_half_open(&pkt->key, &pkt->flow, BPF_NOEXIST);

	if (put == -EEXIST) {
		if (!copy_holder(pkt, half_open_at(&pkt->key)) || !gives_up(urgent))
			return REASON_DROP_MASQUERADE_PORT;
		drop_half_open(&pkt->key);
		pkt->evicts = true;
		put = put_half_open(&pkt->key, &pkt->flow, BPF_NOEXIST);
	}
	if (put)
		return put == -EEXIST ? REASON_DROP_MASQUERADE_PORT : REASON_DROP_FLOW_TABLE;
	count_flows(COUNT_HALF_OPEN_PUT, 1);
	return REASON_NEXT;
}

/*
 * reserve puts the entry that the packet's flow has in this role into half_open, unless another
 * flow holds its tuple: see gives_up. A flow that loses its tuple is in pkt->gone afterwards: see
 * evict. It is for ingress, and global, so that the verifier walks it once.
 *
 * If two CPUs want one tuple at once, one of them gets it: only one can put the entry. A flow that
 * is confirmed meanwhile is in flows before it leaves half_open, so a holder that is not in
 * half_open when the entry is put is found in flows afterwards.
 */
__noinline int reserve(__u32 role, __u32 urgent)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	int why;

	if (!pkt)
		return REASON_DROP_FLOW_TABLE;
	comes_as(&pkt->flow, role, &pkt->key);
	pkt->flow.role = role;
	pkt->evicts = false;
	note_entry(&pkt->key, role, false, pkt->now);
	why = reserve_opening(pkt, urgent);
	if (why || !copy_holder(pkt, bpf_map_lookup_elem(&sl_flows, &pkt->key)))
		return why;

	if (!gives_up(urgent)) {
		drop_half_open(&pkt->key);
		pkt->evicts = false;
		return REASON_DROP_MASQUERADE_PORT;
	}
	pkt->evicts = true;
	drop_flow(&pkt->key); /* flows is looked up first */
	return REASON_NEXT;
}

/*
 * put_opening puts the entry that pkt->flow has in this role, if any, into half_open. The entry
 * needs no reservation, because no other flow can have its tuple, except an earlier one of the same
 * client. It is for ingress, and global, so that the verifier walks it once.
 */
__noinline int put_opening(__u32 role)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	struct flow *f;

	if (!pkt || !has_role(&pkt->flow, role))
		return REASON_NEXT;
	f = &pkt->flow;
	comes_as(f, role, &pkt->key);
	f->role = role;
	note_entry(&pkt->key, role, false, pkt->now);
	if (!put_half_open(&pkt->key, f, BPF_NOEXIST))
		count_flows(COUNT_HALF_OPEN_PUT, 1);
	else if (put_half_open(&pkt->key, f, BPF_ANY))
		return REASON_DROP_FLOW_TABLE;
	drop_flow(&pkt->key);
	return REASON_NEXT;
}

/*
 * complete_opening replaces the entry that pkt->flow has reserved in this role, because each entry
 * has the whole flow, which was not complete then.
 */
static __always_inline int complete_opening(struct packet *pkt, __u32 role)
{
	comes_as(&pkt->flow, role, &pkt->key);
	pkt->flow.role = role;
	return put_half_open(&pkt->key, &pkt->flow, BPF_ANY) ? REASON_DROP_FLOW_TABLE : REASON_NEXT;
}

/*
 * evict is called after a reservation. It forgets the flow that has lost its tuple, so that the
 * tables need no more room than there are tuples. An earlier flow of the same client to the same
 * address is replaced entry by entry.
 */
static __always_inline void evict(struct packet *pkt)
{
	if (!pkt->evicts)
		return;
	pkt->evicts = false;
	report_bytes(&pkt->gone);
	if (!is_same(&pkt->gone, &pkt->flow))
		forget_all(pkt);
}

/*
 * Masquerading: giving a flow an address and a port of this node, where the backend's reply would
 * bypass the node.
 */

/* How many ports are tried: the first ones in turn, then random ones. */
#define MAX_PORT_TRIES 64
#define PORTS_IN_TURN 8

/*
 * After a search that has found no free port, the next ones for that backend only try so many for this long, unless one
 * of them finds a free port. Otherwise first packets would be dear where nearly all ports are held.
 */
#define SCARCE_TRIES 24
#define SCARCE_NS (100 * 1000000ULL)

/*
 * The search for a port of the window, by a hash of the backend: so a flow gets the port that its backend
 * has not seen for the longest time. Two backends may share an index. Each program has turns of its own, which
 * begin when it is loaded: a port that has not rested costs another try, since flows are pinned and show
 * who holds it.
 */
#define PORT_TURNS 4096

struct port_turn {
	__u64 scarce; /* when a search has found no free port, and none has found one since; else 0 */
	__u32 next;
	__u32 reserved;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PORT_TURNS);
	__type(key, __u32);
	__type(value, struct port_turn);
} sl_port_turns SEC(".maps");

/* tuple_hash spreads flows over the ports, so that the same tuple tries the same port first. */
static __always_inline __u32 tuple_hash(const struct flow *f)
{
	__u32 h = f->client.words[0] ^ f->client.words[1] ^ f->client.words[2] ^ f->client.words[3];

	h = h * 0x9e3779b1 + (f->client_port | (__u32)f->original_port << 16);
	h = (h ^ h >> 15) * 0x85ebca6b + f->original_dst.words[3];
	h = (h ^ h >> 13) * 0xc2b2ae35;
	return h ^ h >> 16;
}

/* port_of_window is global, as reserve_as is. */
__noinline __u32 port_of_window(__u32 number)
{
	__u32 size = config_masquerade_high - config_masquerade_low + 1;
	__u32 more = config_masquerade_more_high - config_masquerade_more_low + 1;

	__u32 beyond;

	number %= size + more;
	beyond = (size - 1 - number) >> 31; /* without a branch, which the loop would multiply */
	return bpf_htons(config_masquerade_low + number +
			 beyond * (config_masquerade_more_low - size - config_masquerade_low));
}

/*
 * reserve_as reserves the entry of this role of the flow of the packet, with a port of the window.
 * See reserve. It is global, because the verifier would walk it again for each port.
 */
__noinline int reserve_as(struct __sk_buff *ctx, __u32 role, __u32 port, __u32 urgent)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);

	if (!pkt)
		return REASON_DROP_FLOW_TABLE;
	if (role == FLOW_FROM_BACKEND)
		pkt->flow.masquerade_port = port;
	else
		pkt->flow.stack_port = port;
	return is_taken(ctx, role) ? REASON_DROP_MASQUERADE_PORT : reserve(role, urgent);
}

/*
 * reserve_port finds a port of the window with which no other flow holds the tuple that the flow
 * of the packet has in this role, and puts that entry into half_open. See reserve.
 *
 * Connections take ports in turn. The datagrams of a client get the port that they had before, if
 * their flow has expired meanwhile. If all ports that are tried are held, and some by flows that
 * give them up, the oldest of these loses its tuple.
 */
__noinline int reserve_port(struct __sk_buff *ctx, __u32 role)
{
	struct packet *pkt = packet_at(HOOK_INGRESS);
	int why = REASON_DROP_MASQUERADE_PORT;
	struct port_turn *turn;
	__u32 place, number;
	int i, tries;

	if (!pkt)
		return why;
	place = hash(&pkt->flow.backend, sizeof(pkt->flow.backend)) ^ pkt->flow.backend_port;
	place %= PORT_TURNS;
	turn = bpf_map_lookup_elem(&sl_port_turns, &place);
	if (!turn)
		return why;
	number = turn->next;
	__sync_fetch_and_add(&turn->next, 1);
	if (pkt->flow.proto == IPPROTO_UDP)
		number = tuple_hash(&pkt->flow);
	tries = elapsed(pkt->now, turn->scarce) <= SCARCE_NS ? SCARCE_TRIES : MAX_PORT_TRIES;
	pkt->weak = 0;
	for (i = 0; i < tries; i++) {
		why = reserve_as(ctx, role, port_of_window(number), false);
		if (why != REASON_DROP_MASQUERADE_PORT)
			break;
		number = i < PORTS_IN_TURN ? number + 1 : bpf_get_prandom_u32();
	}
	if (i && pkt->flow.proto != IPPROTO_UDP)
		turn->next = number + 1;
	if (i == MAX_PORT_TRIES)
		turn->scarce = pkt->now;
	else if (turn->scarce && i < tries)
		turn->scarce = 0;
	count_flows(COUNT_MASQUERADE_RETRIES, i);
	if (why == REASON_DROP_MASQUERADE_PORT && pkt->weak)
		why = reserve_as(ctx, role, pkt->weak_port, true);
	return why;
}

/*
 * reserve_own_port reserves the replies to the flow of the packet with the client's own port. See
 * reserve. A backend that connects from the very port on which it answers needs another one,
 * because the stack could not tell requests and replies apart. So does a foreign flow: what the backend
 * sends to that port may be for another host.
 */
static __always_inline int reserve_own_port(struct __sk_buff *ctx, const struct flow *f)
{
	if (is_foreign(f) ||
	    (addr_equal(&f->client, &f->backend) && f->client_port == f->backend_port))
		return REASON_DROP_MASQUERADE_PORT;
	if (is_taken(ctx, FLOW_TO_CLIENT))
		return REASON_DROP_MASQUERADE_PORT;
	return reserve(FLOW_TO_CLIENT, false);
}

/* masquerade gives pkt->flow an address and a port of this node. */
static __always_inline int masquerade(struct __sk_buff *ctx, struct packet *pkt)
{
	struct flow *f = &pkt->flow;
	struct route way;

	if (!find_route(ctx, &f->client, &f->backend, &way) || addr_is_any(&way.source))
		return REASON_DROP_MASQUERADE_ADDR;
	f->masquerade = way.source;
	return reserve_port(ctx, FLOW_FROM_BACKEND);
}

#endif
