/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Settings that the agent makes for a kind of device before it loads the programs. The verifier
 * prunes what they switch off.
 */
#ifndef SLUICE_DEVICE_CONFIG_H
#define SLUICE_DEVICE_CONFIG_H

#include <stdbool.h>
#include <linux/types.h>

#include "../../maps/types.h"

/* An enum device_class. */
volatile const __u32 config_device_class = DEVICE_UPLINK;

/* Packets begin with an Ethernet header, not with the IP header. */
volatile const bool config_ethernet = true;

/* The devices are ports of a bridge. */
volatile const bool config_bridge_port = false;

/* Only sources in local_cidrs are pods, among the packets that arrive on a device of pods. */
volatile const bool config_scope_by_source = false;

/*
 * The ports that a masquerade may use, in host byte order, both ends included, and a second range,
 * which is empty if it ends before it begins.
 */
volatile const __u16 config_masquerade_low = 10000;
volatile const __u16 config_masquerade_high = 29999;
volatile const __u16 config_masquerade_more_low = 1;
volatile const __u16 config_masquerade_more_high = 0;

/* The rate limit of ICMP errors to all hosts: the time per token, and the burst. 0: no limit. */
volatile const __u64 config_icmp_token_ns = 0;
volatile const __u64 config_icmp_tokens = 0;

/* Linux 6.7: bpf_fib_lookup returns the source address. */
volatile const bool config_fib_source = true;

/* Linux 6.16: bpf_l4_csum_replace knows BPF_F_IPV6. */
volatile const bool config_csum_ipv6 = true;

/* Linux 5.18, where connections are tracked: bpf_skb_ct_lookup is there. */
volatile const bool config_conntrack = true;

/* How many entries flows can have before the kernel starts to evict some. */
volatile const __s64 config_flows_room = 1LL << 62;

/*
 * How long a UDP flow keeps its backend without a datagram, and how long if it was never answered.
 */
volatile const __u64 config_udp_idle_ns = 120ULL * 1000 * 1000 * 1000;
volatile const __u64 config_udp_unanswered_ns = 30ULL * 1000 * 1000 * 1000;

/* The value and the mask of the mark that packets to Services get; 0: none. */
volatile const __u32 config_mark = 0;
volatile const __u32 config_mark_mask = 0;

#endif
