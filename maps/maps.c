//go:build ignore

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Compiled only for its BTF: the maps, and the types that no map holds. */
#include "maps.h"

const enum scope *btf_scope __attribute__((unused));
const enum kind *btf_kind __attribute__((unused));
const enum health_time *btf_health_time __attribute__((unused));
const enum algorithm *btf_algorithm __attribute__((unused));
const enum pool_flag *btf_pool_flag __attribute__((unused));
const enum cidr_use *btf_cidr_use __attribute__((unused));
const enum backend_flag *btf_backend_flag __attribute__((unused));
const enum addr_flag *btf_addr_flag __attribute__((unused));
const enum device_flag *btf_device_flag __attribute__((unused));
const enum device_class *btf_device_class __attribute__((unused));
const enum hook *btf_hook __attribute__((unused));
const enum flow_role *btf_flow_role __attribute__((unused));
const enum flow_state *btf_flow_state __attribute__((unused));
const enum flow_ending *btf_flow_ending __attribute__((unused));
const enum flow_flag *btf_flow_flag __attribute__((unused));
const enum flow_kind *btf_flow_kind __attribute__((unused));
const enum flow_count *btf_flow_count __attribute__((unused));
const enum reason *btf_reason __attribute__((unused));
const enum id_layout *btf_id_layout __attribute__((unused));
const enum health_cause *btf_health_cause __attribute__((unused));
const enum reached *btf_reached __attribute__((unused));
const enum chunk *btf_chunk __attribute__((unused));
const enum addr_filter *btf_addr_filter __attribute__((unused));
const enum source_filter *btf_source_filter __attribute__((unused));
const enum cidr_cover *btf_cidr_cover __attribute__((unused));
const enum port_filter *btf_port_filter __attribute__((unused));
const enum histogram *btf_histogram __attribute__((unused));
const enum client_kind *btf_client_kind __attribute__((unused));
const enum udp_dial_limit *btf_udp_dial_limit __attribute__((unused));
const enum udp_pin_way *btf_udp_pin_way __attribute__((unused));
const enum monitor_kind *btf_monitor_kind __attribute__((unused));
const enum monitor_place *btf_monitor_place __attribute__((unused));
const enum listener_limit *btf_listener_limit __attribute__((unused));
const enum recent_limit *btf_recent_limit __attribute__((unused));
const struct translated_sock *btf_translated_sock __attribute__((unused));

char maps_license[] SEC("license") = "Dual BSD/GPL";
