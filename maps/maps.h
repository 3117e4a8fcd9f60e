/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Every map, grouped by who writes it. */
#ifndef SLUICE_MAPS_H
#define SLUICE_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "types.h"

/*
 * Written by the agent; programs cannot. They are pinned in the folder of maps.Version.
 *
 * Every build reads service_ports, backends and addrs of every other, to give out the same
 * ids: their keys and the beginning of their values never change.
 */

/*
 * Arrays that the agent fills are arrays of chunks: it adds a chunk when there is no
 * room, and has them in its memory, so that a write is a store and no system call. They
 * lack BPF_F_RDONLY_PROG because the kernel does not let anyone write to the memory of
 * a map that has it; that no program writes to them is up to us.
 */

/* BTF describes the values of chunks, which bpftool prints, only if a variable does, too. */
static const struct frontend *const btf_frontend __attribute__((used));
static const struct pool *const btf_pool __attribute__((used));
static const struct backend *const btf_backend __attribute__((used));
static const struct backend_load *const btf_backend_load __attribute__((used));
static const struct port_counts *const btf_port_counts __attribute__((used));

/* The frontend id of what a client dials. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 524288);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_RDONLY_PROG);
	__type(key, struct frontend_key);
	__type(value, __u32);
} sl_frontend_ids SEC(".maps");

struct frontend_chunk {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CHUNK_FRONTENDS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct frontend);
};

/* By frontend id. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_CHUNKS);
	__type(key, __u32);
	__array(values, struct frontend_chunk);
} sl_frontends SEC(".maps");

struct pool_chunk {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CHUNK_POOLS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct pool);
};

/* By pool id. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_CHUNKS);
	__type(key, __u32);
	__array(values, struct pool_chunk);
} sl_pools SEC(".maps");

struct slot_chunk {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CHUNK_SLOTS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u32);
};

/* Backend ids. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_CHUNKS);
	__type(key, __u32);
	__array(values, struct slot_chunk);
} sl_slots SEC(".maps");

struct backend_chunk {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CHUNK_BACKENDS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct backend);
};

/* By the index of a backend id. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_CHUNKS);
	__type(key, __u32);
	__array(values, struct backend_chunk);
} sl_backends SEC(".maps");

/* By service port id. Only people read it: a name for every number. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 524288);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_RDONLY_PROG);
	__type(key, __u32);
	__type(value, struct service_port);
} sl_service_ports SEC(".maps");

/* 64 bits of enum addr_filter each. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ADDR_FILTER_WORDS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} sl_addr_filter SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_RDONLY_PROG);
	__type(key, struct addr);
	__type(value, struct addr_use);
} sl_addrs SEC(".maps");

/* By ifindex. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_RDONLY_PROG);
	__type(key, __u32);
	__type(value, struct device);
} sl_devices SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_RDONLY_PROG);
	__type(key, struct source_range_key);
	__type(value, __u32);
} sl_source_ranges SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_RDONLY_PROG);
	__type(key, struct cidr_key);
	__type(value, __u32);
} sl_service_cidrs SEC(".maps");

/* One value: what is looked at before service_cidrs. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct cidr_covers);
} sl_cidr_covers SEC(".maps");

/* Which sources are pods', among what comes by their devices, where detectLocalMode asks for addresses. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_RDONLY_PROG);
	__type(key, struct cidr_key);
	__type(value, __u32);
} sl_local_cidrs SEC(".maps");

/*
 * Written by the datapath. They are pinned in the folder of maps.StateVersion, and shared by
 * builds whose agents fill their maps in different layouts. Socket storage cannot be copied:
 * the layout of sock_state and udp_dials never changes.
 */

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
} sl_affinity SEC(".maps");

/*
 * The same of clients at devices whose first packet has come, and nothing yet that proves who sent
 * it: a flood of these pushes out its like.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
} sl_claims SEC(".maps");

/* Dies with the socket. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct sock_state);
} sl_sock_state SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct udp_dials);
} sl_udp_dials SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 131072);
	__type(key, struct udp_pin_key);
	__type(value, struct udp_pin);
} sl_udp_pins SEC(".maps");

/*
 * What devices translate. The agent says how much memory they may take, and
 * deletes what is idle, stale or over. Programs put no more than there is room for.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 262144);
	__type(key, struct flow_key);
	__type(value, struct flow);
} sl_flows SEC(".maps");

/*
 * Connections in flows that have ended, by what comes from the client. If there is no room for
 * another connection, the one goes that ended last: those from before the agent may have deleted.
 */
struct {
	__uint(type, BPF_MAP_TYPE_STACK);
	__uint(max_entries, 4096);
	__type(value, struct flow_key);
} sl_ended SEC(".maps");

/*
 * Flows that may never come to be, and those that have no room in flows. They live apart, so that
 * a flood cannot push out a connection that works: TCP and SCTP before it is proven that there is
 * a client.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 32768);
	__type(key, struct flow_key);
	__type(value, struct flow);
} sl_half_open SEC(".maps");

/* And UDP before the first answer. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 32768);
	__type(key, struct flow_key);
	__type(value, struct flow);
} sl_unanswered SEC(".maps");

/* By a hash of the address: which sources of packets may be those of flows. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SOURCE_LINES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct source_line);
} sl_source_filter SEC(".maps");

/* By port / PORTS_PER_LINE: which ports of this node may be ours. The agent writes node ports. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PORT_LINES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct port_line);
} sl_port_filter SEC(".maps");

/*
 * By enum flow_kind: how many entries flows has. The agent puts right what may be wrong, since the
 * kernel does not tell what it pushes out, and an agent can be killed.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, FLOW_KIND_COUNT);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} sl_flow_usage SEC(".maps");

/* By enum flow_count. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, FLOW_COUNT_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} sl_flow_counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct fragment_key);
	__type(value, struct fragment);
} sl_fragments SEC(".maps");

/* By the address that errors go to. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct addr);
	__type(value, struct icmp_budget);
} sl_icmp_budgets SEC(".maps");

struct load_chunk {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CHUNK_BACKENDS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct backend_load);
};

/*
 * By the index of a backend id. The agent adds a chunk with each of backends, and puts
 * right what evicted flows leave behind.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_CHUNKS);
	__type(key, __u32);
	__array(values, struct load_chunk);
} sl_backend_load SEC(".maps");

/* By service port id: whose turn it is, for ALGORITHM_RR. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, __u32);
} sl_turns SEC(".maps");

struct count_chunk {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, CHUNK_COUNTS);
	__type(key, __u32);
	__type(value, struct port_counts);
};

/* By the index of a service port id. The agent adds the chunks. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_CHUNKS);
	__type(key, __u32);
	__array(values, struct count_chunk);
} sl_port_counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct refusal_key);
	__type(value, __u64);
} sl_refusals SEC(".maps");

/* By enum reason. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASON_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} sl_reasons SEC(".maps");

#endif
