/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Flows: how packets find their entries, and how entries are put and deleted. flow_types.h lists the
 * roles of entries.
 */
#ifndef SLUICE_FLOW_H
#define SLUICE_FLOW_H

#include <stdbool.h>
#include <stddef.h>
#include <linux/errno.h>
#include <linux/in.h>

#include "clock.h"
#include "headers.h"
#include "reason.h"

/*
 * The shares of connections and of UDP in the table of flows.
 *
 * The table is an LRU map, which never refuses an entry: it would evict a connection that has been
 * idle for an hour for the answer to a datagram. So programs put no more entries into it than it
 * holds without eviction. Half of these are reserved for connections and a quarter for UDP; the
 * rest is first come, first served. A flow without a share stays in half_open, where it works, but
 * may be evicted.
 */

/* The most entries that a flow has. */
#define FLOW_ENTRIES 4

/* kind_of returns the kind in which flows of a protocol are counted. */
static __always_inline enum flow_kind kind_of(__u8 proto)
{
	return proto == IPPROTO_UDP ? FLOWS_UDP : FLOWS_CONNECTED;
}

static __always_inline __u64 *usage_of(enum flow_kind kind)
{
	__u32 key = kind;

	return bpf_map_lookup_elem(&sl_flow_usage, &key);
}

/* count_usage counts entries of a protocol that were put into flows, or deleted. */
static __always_inline void count_usage(__u8 proto, __s64 entries)
{
	__u64 *used = usage_of(kind_of(proto));

	if (used)
		__sync_fetch_and_add(used, entries);
}

/* has_share reports whether there is room in flows for another flow of a protocol. */
static __always_inline bool has_share(__u8 proto)
{
	enum flow_kind kind = kind_of(proto);
	const __u64 *used = usage_of(kind);
	const __u64 *others = usage_of(kind == FLOWS_UDP ? FLOWS_CONNECTED : FLOWS_UDP);
	__s64 kept = kind == FLOWS_UDP ? config_flows_room >> 1 : config_flows_room >> 2;

	if (!used || !others)
		return false;
	if ((__s64)*others > kept)
		kept = *others;
	return (__s64)*used + FLOW_ENTRIES + kept <= config_flows_room;
}

#define REFRESH_NS 1000000000ULL

/* The unit of flow.ack of UDP is 2^CHECKED_SHIFT ns, and datagrams of a client are checked again after CHECKED_FOR such. */
#define CHECKED_SHIFT 27
#define CHECKED_FOR 7

/* checked_at returns a time as flow.ack of UDP has it. */
static __always_inline __u32 checked_at(__u64 now)
{
	return now >> CHECKED_SHIFT;
}

/*
 * is_due reports whether the client's datagram is to be checked, as one is about once a second: whether the client and
 * the backend of the open flow are what they were. The time that an answer was seen is no substitute, since
 * answers may come all the time.
 */
static __always_inline bool is_due(const struct flow *f, __u64 now)
{
	return (__s32)(checked_at(now) - f->ack) > CHECKED_FOR;
}

static __always_inline void count_flows(__u32 what, __u32 entries)
{
	__u64 *n = bpf_map_lookup_elem(&sl_flow_counts, &what);

	if (n)
		*n += entries;
}

static __always_inline bool is_masqueraded(const struct flow *f)
{
	return f->flags & FLOW_MASQUERADED;
}

/*
 * is_of_node returns 1 if the client of a flow is a process of this node, else 0. It has no branches:
 * see same_tuple.
 */
static __always_inline __u32 is_of_node(const struct flow *f)
{
	__u32 both = f->flags / FLOW_BY_PODS & f->flags / FLOW_BY_UPLINKS & 1;

	asm volatile("" : "+r"(both));
	return both;
}

/* class_flag returns the flag for a client's packets that arrive on devices of a class. */
static __always_inline __u8 class_flag(enum device_class class)
{
	return class == DEVICE_PODS ? FLOW_BY_PODS : FLOW_BY_UPLINKS;
}

/*
 * is_foreign reports whether the first packet of a flow had a source that is not behind the device by which it
 * came: see is_behind_device. A gateway forwards such packets, and pods can forge them. So the flow holds
 * nothing that may be another host's: the backend sees another port of the source, the first packet of a client
 * that is behind its device replaces the flow, and how the backend answers is no evidence of its health.
 */
static __always_inline bool is_foreign(const struct flow *f)
{
	return !(f->flags & FLOW_OF_NODE);
}

/*
 * is_stray reports whether the packet at hand, which matches f, arrives on a device of another
 * class than the client's packets did. It is not the client's, unless that is behind this device now: see
 * is_client_here. A device gets another class, as an uplink does that becomes the port of a bridge.
 */
static __always_inline bool is_stray(const struct flow *f)
{
	__u8 other = config_device_class == DEVICE_PODS ? DEVICE_UPLINK : DEVICE_PODS;

	return f->role == FLOW_FROM_CLIENT && f->flags & class_flag(other);
}

/*
 * is_new reports whether a side has sent nothing but its first packet. In the state FLOW_JOINING that
 * is the SYN of a further subflow of Multipath TCP, which only the backend of the first one can accept.
 * It gets any backend, because no tuple shows which that is. So its outcome shows nothing of the health
 * of a backend, and it is tried nowhere else.
 */
static __always_inline bool is_new(const struct flow *f)
{
	return f->state == FLOW_NEW || f->state == FLOW_JOINING;
}

static __always_inline bool is_turned(const struct flow *f)
{
	return f->flags & FLOW_TURNED;
}

/*
 * has_role reports whether a flow has an entry of this role. It has no branches: see same_tuple.
 */
static __always_inline bool has_role(const struct flow *f, __u32 role)
{
	__u32 masqueraded = f->flags / FLOW_MASQUERADED % 2, turned = f->flags / FLOW_TURNED % 2;
	__u32 roles = 1 << FLOW_FROM_CLIENT | (1 - turned) << FLOW_TO_CLIENT |
		      (masqueraded & (1 - turned)) << FLOW_TO_BACKEND |
		      masqueraded << FLOW_FROM_BACKEND;

	asm volatile("" : "+r"(roles));
	return roles >> role & 1;
}

/* comes_as sets key to the tuple with which packets of f in this role arrive at the hook. */
static __always_inline void comes_as(const struct flow *f, __u8 role, struct flow_key *key)
{
	bool to_client = role == FLOW_TO_CLIENT, from_backend = role == FLOW_FROM_BACKEND;
	__u32 leaves = (to_client || role == FLOW_TO_BACKEND) ^ (is_of_node(f) & !from_backend);

	key->proto = f->proto;
	key->hook = HOOK_INGRESS + leaves;
	key->reserved = 0;
	if (to_client || from_backend) {
		key->src = f->backend;
		key->src_port = f->backend_port;
		key->dst = to_client ? f->client : f->masquerade;
		key->dst_port = to_client ? f->stack_port : f->masquerade_port;
	} else {
		key->src = f->client;
		key->src_port = role == FLOW_FROM_CLIENT ? f->client_port : f->stack_port;
		key->dst = role == FLOW_FROM_CLIENT ? f->original_dst : f->backend;
		key->dst_port = role == FLOW_FROM_CLIENT ? f->original_port : f->backend_port;
	}
}

/*
 * answer_comes_as sets key to the tuple of the packets that leave for the client, as they arrive
 * at the hook where they do.
 */
static __always_inline void answer_comes_as(const struct flow *f, struct flow_key *key)
{
	if (is_turned(f))
		comes_as(f, FLOW_FROM_BACKEND, key);
	else
		comes_as(f, FLOW_TO_CLIENT, key);
}

/*
 * goes_as sets key to the tuple with which packets of f in this role leave the hook. If the flow
 * is turned around, a packet leaves ingress as it would otherwise leave egress.
 */
static __always_inline void goes_as(const struct flow *f, __u8 role, struct flow_key *key)
{
	bool to_client = role == FLOW_TO_CLIENT || role == FLOW_FROM_BACKEND;
	bool to_stack = !is_turned(f) && (role == FLOW_FROM_CLIENT || role == FLOW_FROM_BACKEND);

	if (to_client) {
		key->src = to_stack ? f->backend : f->original_dst;
		key->src_port = to_stack ? f->backend_port : f->original_port;
		key->dst = f->client;
		key->dst_port = to_stack ? f->stack_port : f->client_port;
	} else {
		key->src = to_stack ? f->client : f->masquerade;
		key->src_port = to_stack ? f->stack_port : f->masquerade_port;
		key->dst = f->backend;
		key->dst_port = f->backend_port;
	}
}

/* same_tuple compares without branches: each branch would be one more path for the verifier. */
static __always_inline bool same_tuple(const struct flow_key *a, const struct flow_key *b)
{
	const __u32 *x = (const __u32 *)a, *y = (const __u32 *)b;
	__u32 differ = 0, i;

	for (i = 0; i < offsetof(struct flow_key, proto) / sizeof(*x); i++)
		differ |= x[i] ^ y[i];
	asm volatile("" : "+r"(differ)); /* otherwise the compiler adds branches */
	return !differ;
}

/*
 * set_target sets pkt->to to what the packets of key become, and is false if f is no longer an entry of
 * key: a full LRU map gives the memory of an entry to another flow, even while a program reads it.
 * The new tuple is written first, so it is compared last.
 */
static __always_inline bool set_target(struct packet *pkt, const struct flow *f,
				       const struct flow_key *key)
{
	goes_as(f, f->role, &pkt->to);
	barrier();
	comes_as(f, f->role, &pkt->key);
	return same_tuple(&pkt->key, key);
}

/* The type of the tables of half-open flows. */
struct half_open {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct flow_key);
	__type(value, struct flow);
};

/*
 * By enum flow_kind. The verifier does not distinguish the two, so it walks the code that follows
 * once.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, FLOW_KIND_COUNT);
	__type(key, __u32);
	__array(values, struct half_open);
} sl_opening SEC(".maps") = {
	.values = {
		[FLOWS_CONNECTED] = (void *)&sl_half_open,
		[FLOWS_UDP] = (void *)&sl_unanswered,
	},
};

/* opening_of returns the table of the half-open flows of a protocol; it is never NULL. */
static __always_inline void *opening_of(__u8 proto)
{
	__u32 kind = kind_of(proto);

	return bpf_map_lookup_elem(&sl_opening, &kind);
}

/* half_open_at returns the half-open entry at key, or NULL. */
static __always_inline struct flow *half_open_at(const struct flow_key *key)
{
	void *opening = opening_of(key->proto);

	return opening ? bpf_map_lookup_elem(opening, key) : NULL;
}

/*
 * put_half_open returns 0 or an error. Before Linux 6.4, only the lower half of what the helper
 * returns is valid.
 */
static __always_inline int put_half_open(const struct flow_key *key, const struct flow *f,
					 __u64 how)
{
	void *opening = opening_of(key->proto);

	return opening ? bpf_map_update_elem(opening, key, f, how) : -ENOENT;
}

/* entry_since returns the entry at key of the flow that was created at a time, or NULL. */
static __always_inline struct flow *entry_since(const struct flow_key *key, __u64 created)
{
	struct flow *entry = half_open_at(key);

	if (entry && entry->created == created)
		return entry;
	entry = bpf_map_lookup_elem(&sl_flows, key);
	return entry && entry->created == created ? entry : NULL;
}

/*
 * entry_at returns the entry of f at pkt->key, or NULL if the flow has lost it. It need not be in
 * the table where f is: another CPU may have confirmed the flow meanwhile.
 */
static __always_inline struct flow *entry_at(struct packet *pkt, const struct flow *f)
{
	return entry_since(&pkt->key, f->created);
}

/* entry_of returns the entry of f in a role. See entry_at. */
static __always_inline struct flow *entry_of(struct packet *pkt, const struct flow *f, __u8 role)
{
	comes_as(f, role, &pkt->key);
	return entry_at(pkt, f);
}

/* answers_of returns the entry of f whose packets leave for the client. See entry_at. */
static __always_inline struct flow *answers_of(struct packet *pkt, const struct flow *f)
{
	answer_comes_as(f, &pkt->key);
	return entry_at(pkt, f);
}

/* drop_flow deletes an entry from flows, and counts it. */
static __always_inline void drop_flow(const struct flow_key *key)
{
	if (bpf_map_delete_elem(&sl_flows, key))
		return;
	count_flows(COUNT_FLOWS_DELETED, 1);
	count_usage(key->proto, -1);
}

static __always_inline void drop_half_open(const struct flow_key *key)
{
	void *opening = opening_of(key->proto);

	if (opening && !bpf_map_delete_elem(opening, key))
		count_flows(COUNT_HALF_OPEN_DELETED, 1);
}

/*
 * report_bytes adds the bytes that an entry has seen to the counts of its service port. Those of a
 * re-steered connection are counted by its socket.
 */
static __always_inline void report_bytes(struct flow *f)
{
	__u64 bytes = f->bytes;

	if (!bytes || f->flags & FLOW_RESTEERED)
		return;
	f->bytes = 0;
	if (f->role == FLOW_FROM_CLIENT)
		count_bytes(f->service_port_id, bytes, 0);
	else
		count_bytes(f->service_port_id, 0, bytes);
}

/*
 * release deletes the entry of this role that the flow of the packet at a hook has in half_open,
 * if it is still its own. It is global, so that the verifier walks it once.
 */
__noinline int release(__u32 hook, __u32 role)
{
	struct packet *pkt = packet_at(hook);
	struct flow *had;

	if (!pkt || !has_role(&pkt->flow, role))
		return 0;
	comes_as(&pkt->flow, role, &pkt->key);
	had = half_open_at(&pkt->key);
	if (had && had->created == pkt->flow.created) {
		report_bytes(had);
		drop_half_open(&pkt->key);
	}
	return 0;
}

/*
 * note_entry marks an entry that is about to be put in the filters, so that its packets pass them. Its flow is
 * confirmed or not: see note_source.
 */
static __always_inline void note_entry(const struct flow_key *key, __u32 role, bool confirmed,
				       __u64 now)
{
	if (key->hook == HOOK_EGRESS)
		note_source(&key->src, key->src_port, confirmed && role == FLOW_TO_BACKEND, now);
	else if (role != FLOW_FROM_CLIENT)
		note_port(key->dst_port);
}

/*
 * put_back puts the entry of this role of the flow of the packet at a hook into flows, if it is
 * missing there, and returns 1 if it did. A half-open flow that has started since keeps the tuple.
 * An entry that is itself half open leaves half_open for flows with its state, but is open from now
 * on; the state of an entry that was lost is unknown. Without room in flows, an entry stays in half_open,
 * and one that was lost is put there.
 */
__noinline int put_back(__u32 hook, __u32 role, __u32 room)
{
	struct packet *pkt = packet_at(hook);
	struct flow *opening, *f;
	__u8 state;
	int failed;

	if (!pkt || !has_role(&pkt->flow, role))
		return 0;
	f = &pkt->flow;
	state = f->state;
	comes_as(f, role, &pkt->key);
	f->role = role;
	opening = half_open_at(&pkt->key);
	if (opening && opening->created != f->created)
		return 0;
	if (!room && (opening || bpf_map_lookup_elem(&sl_flows, &pkt->key)))
		return 0;
	f->state = opening && !is_new(opening) ? opening->state : FLOW_OPEN;
	f->ending = opening ? opening->ending : 0;
	f->stamp = opening ? opening->stamp : 0;
	f->end = opening ? opening->end : 0;
	f->ack = opening ? opening->ack : 0;
	note_entry(&pkt->key, role, true, pkt->now);
	if (room)
		failed = bpf_map_update_elem(&sl_flows, &pkt->key, f, BPF_NOEXIST);
	else
		failed = put_half_open(&pkt->key, f, BPF_NOEXIST);
	f->state = state;
	if (failed && failed != -EEXIST)
		return 0;
	if (!room) {
		count_flows(COUNT_HALF_OPEN_PUT, !failed);
		return !failed;
	}
	if (opening) {
		report_bytes(opening);
		drop_half_open(&pkt->key);
	}
	if (failed)
		return 0;
	count_flows(COUNT_FLOWS_PUT, 1);
	count_usage(f->proto, 1);
	return 1;
}

/*
 * put_back_all puts back all entries of pkt->flow, for which there is room in flows or not, and returns how
 * many were missing.
 */
static __always_inline int put_back_all(struct packet *pkt, bool room)
{
	__u32 hook = pkt->ip.key.hook;

	return put_back(hook, FLOW_FROM_CLIENT, room) + put_back(hook, FLOW_TO_CLIENT, room) +
	       put_back(hook, FLOW_TO_BACKEND, room) + put_back(hook, FLOW_FROM_BACKEND, room);
}

/*
 * find_flow returns the entry of key, or NULL, and sets pkt->to to the tuple of its packets.
 *
 * Another CPU may confirm the flow meanwhile, which puts it into flows before it leaves half_open:
 * one of two lookups finds it if half_open is first. A first packet is looked up in this order,
 * because it is in neither table as a rule. Other packets are in flows as a rule, and need a third
 * lookup if they are in neither. All do if the entry in half_open was given to another flow before it was read.
 */
static __always_inline struct flow *find_flow(struct packet *pkt, const struct flow_key *key,
					      bool *half_open)
{
	bool first = pkt->event == EVENT_OPEN && key->proto != IPPROTO_UDP;
	struct flow *f = first ? NULL : bpf_map_lookup_elem(&sl_flows, key);

	*half_open = !f;
	if (!f)
		f = half_open_at(key);
	if (!f || (*half_open && !set_target(pkt, f, key))) {
		f = bpf_map_lookup_elem(&sl_flows, key);
		*half_open = false;
	}
	if (!f || !set_target(pkt, f, key))
		return NULL;
	return f->role == FLOW_FROM_BACKEND && !(f->flags & FLOW_SENT) ? NULL : f;
}

#endif
