/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The treaty: every byte that the agent and the datapath both touch. C owns
 * the layout; bpf2go makes the Go types from it. Ports are in network byte
 * order, times in nanoseconds since boot.
 */
#ifndef SLUICE_TYPES_H
#define SLUICE_TYPES_H

#include <linux/types.h>

/* Where a lookup starts. */
enum scope {
	SCOPE_INTERNAL = 1, /* sockets of this node, devices that face pods */
	SCOPE_EXTERNAL = 2, /* uplinks */
};

/* What makes an address a frontend. */
enum kind {
	KIND_CLUSTER_IP = 1,
	KIND_EXTERNAL_IP = 2,
	KIND_LOAD_BALANCER = 3,
	KIND_NODE_PORT = 4,
};

/* frontend.flags */
enum frontend_flag {
	FRONTEND_DROP_IF_EMPTY = 1, /* no usable backend here, but on another node */
	FRONTEND_SOURCE_RANGES = 2, /* source_ranges says who may connect */
	FRONTEND_NODE_IN_RANGES = 4, /* and this node may */
};

/* backend.flags */
enum backend_flag {
	BACKEND_LOCAL = 1, /* on this node */
	BACKEND_TERMINATING = 2,
};

/* node_addr.flags */
enum node_addr_flag {
	NODE_ADDR_NODE_PORT = 1, /* node ports answer here */
};

/*
 * Why a hook stopped where it did. REASON_NEXT is "go on"; every other one is
 * counted in reason_counts.
 */
enum reason {
	REASON_NEXT = 0,
	REASON_TRANSLATED = 1,
	REASON_TRANSLATED_UNREMEMBERED = 2, /* the socket had no room for its state */
	REASON_PASS_PROTOCOL = 3,
	REASON_PASS_DISABLED = 4,
	REASON_PASS_NO_FRONTEND = 5,
	REASON_REJECT_NO_BACKEND = 6,
	REASON_REJECT_NO_PORT = 7,
	REASON_DROP_NO_LOCAL_BACKEND = 8,
	REASON_DROP_SOURCE_RANGE = 9,
	REASON_DROP_UNALLOCATED = 10,
	REASON_DROP_BACKEND_MISSING = 11,
	REASON_COUNT = 12,
};

/* An IPv6 address, or an IPv4 address mapped into ::ffff:0:0/96. */
struct addr {
	union {
		__u8 bytes[16];
		__be32 words[4];
	};
};

/* What a client dials. Port and protocol zero: the catch-all of a ClusterIP. */
struct frontend_key {
	struct addr addr; /* a node port has 0.0.0.0 or :: */
	__be16 port;
	__u8 proto; /* IPPROTO_* */
	__u8 scope; /* enum scope */
};

_Static_assert(sizeof(struct frontend_key) == 20, "frontend_key is hashed: no hidden padding");

/*
 * A frontend's backends are the slots [slot_base, slot_base + slot_count), in
 * ascending order of backend id. Frontends of one service port and family share their id.
 */
struct frontend {
	__u32 id;
	__u32 slot_base;
	__u32 slot_count;
	__u32 affinity_seconds; /* 0: no session affinity */
	__u16 flags; /* enum frontend_flag */
	__u8 kind; /* enum kind */
	__u8 reserved;
};

/* What answers. */
struct backend {
	struct addr addr;
	__u32 frontend_id; /* whose backend it is: ids in slots may be stale */
	__be16 port;
	__u16 flags; /* enum backend_flag */
};

/* What a frontend id stands for, in the words of the Service object. */
struct service_port {
	char namespace[64]; /* NUL-terminated, as are the others */
	char name[64];
	char port[64];
	__u8 proto; /* IPPROTO_* */
	__u8 family; /* 4 or 6 */
	__u8 reserved[2];
};

struct node_addr {
	__u32 ifindex;
	__u32 flags; /* enum node_addr_flag */
};

/* Prefix lengths count from the first bit after prefix_len. */
struct source_range_key {
	__u32 prefix_len;
	__u32 frontend_id;
	struct addr addr;
};

struct service_cidr_key {
	__u32 prefix_len;
	struct addr addr;
};

/* What a client is, for session affinity. */
enum client_kind {
	CLIENT_NETNS = 1, /* a socket: the cookie of its network namespace */
	CLIENT_ADDR = 2, /* a packet: its source address */
};

struct affinity_key {
	union {
		__u8 client[16];
		__u64 netns_cookie;
		struct addr addr;
	};
	__u32 frontend_id;
	__u32 client_kind; /* enum client_kind */
};

_Static_assert(sizeof(struct affinity_key) == 24, "affinity_key is hashed: no hidden padding");

struct affinity {
	__u64 last_used;
	__u32 backend_id;
	__u32 reserved;
};

/* What a connected socket dialled, and what it got. */
struct sock_state {
	struct addr dialled;
	struct addr backend;
	__be16 dialled_port;
	__be16 backend_port;
	__u32 frontend_id;
	__u32 backend_id;
};

/* Which way a udp_pin is looked up. */
enum udp_pin_way {
	UDP_PIN_SEND = 1, /* key: the frontend; value: its backend */
	UDP_PIN_RECEIVE = 2, /* key: the backend; value: the frontend */
};

struct udp_pin_key {
	__u64 cookie; /* of the socket */
	struct addr addr;
	__be16 port;
	__u16 way; /* enum udp_pin_way */
	__u32 reserved;
};

_Static_assert(sizeof(struct udp_pin_key) == 32, "udp_pin_key is hashed: no hidden padding");

struct udp_pin {
	__u64 last_used;
	struct addr addr;
	__be16 port;
	__u16 reserved;
	__u32 frontend_id;
	__u32 backend_id;
	__u32 reserved2;
};

/* A connected UDP socket that Sluice translated, as the iterator tells it. */
struct translated_sock {
	__u64 cookie;
	struct sock_state state;
	__u32 netns; /* inode number */
	__u32 device; /* that the socket is bound to, or 0 */
	struct addr source;
	struct addr peer; /* as the kernel has it now */
	__be16 source_port;
	__be16 peer_port;
	__u16 family; /* AF_INET or AF_INET6 */
	__u16 reserved[3];
};

#endif
