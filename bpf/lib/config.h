/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the agent decides before it loads: the verifier prunes the rest. */
#ifndef SLUICE_CONFIG_H
#define SLUICE_CONFIG_H

#include <stdbool.h>
#include <linux/types.h>

/* Which UDP sockets are translated. */
enum udp_mode {
	UDP_OFF = 0, /* none: the devices do it */
	UDP_CONNECTED = 1, /* those that connect() */
	UDP_ALL = 2, /* and each sendto() */
};

volatile const __u32 config_udp_mode = UDP_ALL;

/* How long a UDP flow without a datagram keeps its backend. */
volatile const __u64 config_udp_idle_ns = 120ULL * 1000 * 1000 * 1000;

/* Of the node's network namespace; 0: the first one of this kernel. */
volatile const __u64 config_host_netns_cookie = 0;

/* Linux 6.1: connect and sendmsg hooks may choose their errno. */
volatile const bool config_has_set_retval = true;

/* Node ports answer the node's own processes on loopback, too. */
volatile const bool config_localhost_node_ports = true;

#endif
