/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Every map, grouped by who writes it. */
#ifndef SLUICE_MAPS_H
#define SLUICE_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "flow_types.h"
#include "monitor_types.h"
#include "types.h"

/*
 * Written by the agent; programs cannot. They are pinned in the folder of maps.Version.
 *
 * Every build reads service_ports, backends and addrs of every other build, to assign the same ids.
 * So their keys and the start of their values never change.
 */

/*
 * Arrays that the agent fills are arrays of chunks: it adds a chunk when there is no room, and maps
 * them into its memory, so that a write is a store and no system call. They lack BPF_F_RDONLY_PROG,
 * with which the kernel makes the memory of a map read-only for the agent as well. No program may
 * write to them.
 */

/* BTF only describes the values of chunks, which bpftool prints, if a variable has their type. */
static const struct frontend *const btf_frontend __attribute__((used));
static const struct pool *const btf_pool __attribute__((used));
static const struct backend *const btf_backend __attribute__((used));
static const struct backend_load *const btf_backend_load __attribute__((used));
static const struct backend_health *const btf_backend_health __attribute__((used));
static const struct port_counts *const btf_port_counts __attribute__((used));
static const struct handshakes *const btf_handshakes __attribute__((used));
static const struct backend_handshakes *const btf_backend_handshakes __attribute__((used));

/* The frontend id of a destination. */
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
	__uint(max_entries, MAX_SLOT_CHUNKS);
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

/* By service port id. No program reads these names. */
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

/* By ifindex; 0 is the node. */
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

/* One value: the filter of service_cidrs. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct cidr_covers);
} sl_cidr_covers SEC(".maps");

/* The sources that are pods of this node, if detectLocalMode requires addresses. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_RDONLY_PROG);
	__type(key, struct cidr_key);
	__type(value, __u32);
} sl_local_cidrs SEC(".maps");

/* The pods of this node whose sockets are left alone. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_RDONLY_PROG);
	__type(key, struct pod_uid);
	__type(value, __u32);
} sl_opted_out SEC(".maps");

/* One value: when the agent last ran, as bpf_ktime_get_ns(). No program reads it. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} sl_heartbeat SEC(".maps");

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
 * The affinity of clients at devices whose flow is unconfirmed. A flood of first packets only
 * evicts entries of this map.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
} sl_claims SEC(".maps");

/* The kernel deletes these with their socket. */
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
 * The flows of devices. The agent limits their memory, and deletes those that are idle, stale or
 * have ended. Programs put no more than there is room for.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 262144);
	__type(key, struct flow_key);
	__type(value, struct flow);
} sl_flows SEC(".maps");

/*
 * The FLOW_FROM_CLIENT keys of connections in flows that have ended. If there is no room for
 * another connection, the one that ended last is deleted, because the agent may have deleted the
 * earlier ones.
 */
struct {
	__uint(type, BPF_MAP_TYPE_STACK);
	__uint(max_entries, 4096);
	__type(value, struct flow_key);
} sl_ended SEC(".maps");

/*
 * Unconfirmed TCP and SCTP flows, and those without room in flows. They have a table of their own,
 * so that a flood of first packets cannot evict a confirmed connection.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 32768);
	__type(key, struct flow_key);
	__type(value, struct flow);
} sl_half_open SEC(".maps");

/* UDP flows before the first answer, and those without room in flows. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 32768);
	__type(key, struct flow_key);
	__type(value, struct flow);
} sl_unanswered SEC(".maps");

/* By a hash of the address: the sources that flows may have. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SOURCE_LINES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct source_line);
} sl_source_filter SEC(".maps");

/*
 * By port / PORTS_PER_LINE: the ports of this node that Services may use. The agent writes node
 * ports.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PORT_LINES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct port_line);
} sl_port_filter SEC(".maps");

/*
 * By enum flow_kind: the number of entries in flows. The agent corrects it, because the kernel does
 * not report evictions, and because an agent can be killed.
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

/* By the destination of the errors. */
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
 * By the index of a backend id. The agent adds a chunk with each chunk of backends, and corrects
 * what evicted flows leave behind.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_CHUNKS);
	__type(key, __u32);
	__array(values, struct load_chunk);
} sl_backend_load SEC(".maps");

struct health_chunk {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CHUNK_BACKENDS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct backend_health);
};

/* By the index of a backend id. The agent adds a chunk with each chunk of backends. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_CHUNKS);
	__type(key, __u32);
	__array(values, struct health_chunk);
} sl_backend_health SEC(".maps");

/* See enum reached. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, REACHED_WORDS);
	__type(key, __u32);
	__type(value, __u64);
} sl_reached SEC(".maps");

/* See enum silence. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SILENCE_WORDS);
	__type(key, __u32);
	__type(value, __u64);
} sl_silences SEC(".maps");

/* See enum refusal_debt. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, REFUSAL_DEBTS);
	__type(key, __u32);
	__type(value, __s32);
} sl_refusal_debt SEC(".maps");

/* By frontend, as turn_of in bpf/lib/pick.h: the number of the next flow, for ALGORITHM_RR. */
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
	__uint(max_entries, MAX_COUNT_CHUNKS);
	__type(key, __u32);
	__array(values, struct count_chunk);
} sl_port_counts SEC(".maps");

struct handshake_chunk {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CHUNK_COUNTS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct handshakes);
};

/* By the index of a service port id. The agent adds the chunks, if handshakes are measured. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_COUNT_CHUNKS);
	__type(key, __u32);
	__array(values, struct handshake_chunk);
} sl_handshakes SEC(".maps");

struct backend_handshake_chunk {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CHUNK_BACKENDS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct backend_handshakes);
};

/* By the index of a backend id. The agent adds the chunks, if these are shown. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_CHUNKS);
	__type(key, __u32);
	__array(values, struct backend_handshake_chunk);
} sl_be_handshake SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct refusal_key);
	__type(value, __u64);
} sl_refusals SEC(".maps");

/* One value: who listens to events. Each `sluice monitor` writes its place. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct listeners);
} sl_listeners SEC(".maps");

struct monitor_ring {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096); /* the real ones are larger: see maps/monitor.go */
};

/* By place in listeners: a ring buffer of struct monitor_event. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, LISTENERS);
	__type(key, __u32);
	__array(values, struct monitor_ring);
} sl_monitor_rings SEC(".maps");

/* By enum reason. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, RECENT_REASONS);
	__type(key, __u32);
	__type(value, struct recent);
} sl_recent SEC(".maps");

/* By enum reason. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASON_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} sl_reasons SEC(".maps");

#endif
