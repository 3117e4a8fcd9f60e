/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Every map, grouped by who writes it. */
#ifndef SLUICE_MAPS_H
#define SLUICE_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "types.h"

/* Written by the agent; programs cannot. */

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 524288);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_RDONLY_PROG);
	__type(key, struct frontend_key);
	__type(value, struct frontend);
} sl_frontends SEC(".maps");

/*
 * Backend ids. Memory-mapped by the agent, and therefore without
 * BPF_F_RDONLY_PROG: the kernel lets nobody write into the memory of a map
 * that has it. The stride is 8 bytes anyhow.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2097152);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u32);
} sl_slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1048576);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_RDONLY_PROG);
	__type(key, __u32);
	__type(value, struct backend);
} sl_backends SEC(".maps");

/* By frontend id. Only people read it: a name for every number. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 524288);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_RDONLY_PROG);
	__type(key, __u32);
	__type(value, struct service_port);
} sl_service_ports SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536); /* kube-ipvs0 has every ClusterIP */
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_RDONLY_PROG);
	__type(key, struct addr);
	__type(value, struct node_addr);
} sl_node_addrs SEC(".maps");

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
	__type(key, struct service_cidr_key);
	__type(value, __u32);
} sl_service_cidrs SEC(".maps");

/* Written by the datapath. */

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
} sl_affinity SEC(".maps");

/* Dies with the socket. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct sock_state);
} sl_sock_state SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 131072);
	__type(key, struct udp_pin_key);
	__type(value, struct udp_pin);
} sl_udp_pins SEC(".maps");

/* By enum reason. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASON_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} sl_reasons SEC(".maps");

#endif
