/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Settings that the agent makes before it loads the socket programs. The verifier prunes what they
 * switch off.
 */
#ifndef SLUICE_CONFIG_H
#define SLUICE_CONFIG_H

#include <stdbool.h>
#include <linux/types.h>

/* Which UDP sockets are translated. */
enum udp_mode {
	UDP_OFF = 0, /* none: the device programs translate UDP */
	UDP_CONNECTED = 1, /* those that connect() */
	UDP_ALL = 2, /* and each sendto() */
};

volatile const __u32 config_udp_mode = UDP_ALL;

/* How long a UDP flow keeps its backend without a datagram. */
volatile const __u64 config_udp_idle_ns = 120ULL * 1000 * 1000 * 1000;

/* The cookie of the node's network namespace; 0: that of the kernel's first one. */
volatile const __u64 config_host_netns_cookie = 0;

/* Linux 6.1: connect and sendmsg hooks may set their errno. */
volatile const bool config_has_set_retval = true;

/* Node ports also answer the node's own processes on loopback. */
volatile const bool config_localhost_node_ports = true;

#endif
