/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The map ABI: every byte that the agent and the datapath both touch. C owns
 * the layout; bpf2go makes the Go types from it. Ports are in network byte
 * order, times in nanoseconds since boot.
 *
 * Builds that keep the same state share the maps that the datapath writes (see maps.h).
 * What is reserved in them is zero, and for later builds: they must do with a zero there,
 * which an earlier build has written.
 */
#ifndef SLUICE_TYPES_H
#define SLUICE_TYPES_H

#include <linux/bpf.h>
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

/*
 * How a pool chooses a backend for a new flow. Those that hash choose in the
 * pool's table (see struct pool).
 */
enum algorithm {
	ALGORITHM_RANDOM = 0,
	ALGORITHM_RR = 1, /* one after the other */
	ALGORITHM_LC = 2, /* of two at random, the one with fewer live connections */
	ALGORITHM_SED = 3, /* of all, or of 64 at least, the one with the fewest */
	ALGORITHM_NQ = 4, /* the first that has none, else as sed */
	ALGORITHM_SH = 5, /* by the client */
	ALGORITHM_DH = 6, /* by the address that was dialled */
	ALGORITHM_MAGLEV = 7, /* by the whole flow */
};

/* pool.flags */
enum pool_flag {
	POOL_DROP_IF_EMPTY = 1, /* no usable backend here, but on another node */
	POOL_SOURCE_RANGES = 2, /* source_ranges lists the allowed clients */
	POOL_NODE_IN_RANGES = 4, /* and this node is one of them */
	POOL_MASQUERADE = 8, /* backends see this node instead of the client */
};

/* backend.flags */
enum backend_flag {
	BACKEND_LOCAL = 1, /* on this node */
	BACKEND_TERMINATING = 2,
};

/* addr_use.flags */
enum addr_flag {
	ADDR_NODE = 1, /* an address of this node */
	ADDR_NODE_PORT = 2, /* node ports answer here */
	ADDR_SERVICE = 4, /* of a frontend, or of one that flows outlive */
};

/* What a device leads to. */
enum device_class {
	DEVICE_PODS = 0, /* its clients are pods of this node: replies always pass here */
	DEVICE_UPLINK = 1, /* everybody else's */
	DEVICE_CLASS_COUNT = 2,
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
	REASON_FLOW = 12, /* a packet of a known flow */
	REASON_FLOW_ERROR = 13, /* an ICMP error about one */
	REASON_PASS_BYSTANDER = 14, /* a packet to none of our addresses */
	REASON_PASS_NO_FLOW = 15, /* not the first packet of a flow, and of none that we know */
	REASON_PASS_FRAGMENT = 16, /* a fragment whose first one was not seen */
	REASON_PASS_MALFORMED = 17, /* headers that are cut short, or too many */
	REASON_REJECT_LIMITED = 18, /* refused without a word: the client had its share of ICMP */
	REASON_DROP_MASQUERADE_ADDR = 19, /* this node has no address on the way to the backend */
	REASON_DROP_MASQUERADE_PORT = 20, /* all ports that were tried are taken */
	REASON_DROP_FLOW_TABLE = 21, /* no room for the flow, or its tuple is another client's */
	REASON_DROP_REDIRECT = 22, /* an ICMP redirect would lead the client past us */
	REASON_DROP_REWRITE = 23, /* the kernel would not let us write the packet */
	REASON_COUNT = 24,
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
 * Ids of service ports and backends outlive a program's run: sockets, flows and
 * affinity remember them. Such an id is the index of a place in an array and, above
 * INDEX_BITS, the generation of that place, which changes each time it is given to
 * another service port or backend. Place 0 is never used, so no id is 0.
 */
enum id_layout {
	INDEX_BITS = 24,
	INDEX_MASK = 0xffffff,
};

/*
 * How many values one chunk of a growing array has, and how many chunks there can be:
 * see maps.h.
 */
enum chunk {
	CHUNK_FRONTENDS = 4096,
	CHUNK_POOLS = 4096,
	CHUNK_SLOTS = 16384,
	CHUNK_BACKENDS = 4096,
	CHUNK_COUNTS = 256,
	MAX_CHUNKS = 1024,
};

/*
 * A frontend, by frontend id. The key never changes while frontend_ids leads here;
 * pool_id is one word that the agent switches whenever the frontend gets other
 * backends, other settings or another owner.
 */
struct frontend {
	struct frontend_key key;
	__u32 pool_id;
	__u8 kind; /* enum kind; only people read it */
	__u8 reserved[3];
};

/*
 * A set of backends, and how to choose among them. What a program reads here does not
 * change, but for backends that are taken out of it: slot_count can only become less.
 *
 * The backends are the slots [slot_base, slot_base + slot_count), ascending by id.
 * Where the algorithm hashes, the slots [table_base, table_base + table_size) hold the
 * same backends many times: the table in which it looks a hash up.
 */
struct pool {
	__u32 slot_base;
	__u32 slot_count;
	__u32 table_base;
	__u32 table_size;
	__u32 service_port_id;
	__u32 affinity_seconds; /* 0: no session affinity */
	__u16 flags; /* enum pool_flag */
	__u8 algorithm; /* enum algorithm */
	__u8 reserved;
};

/*
 * What answers. In a place that is free, reserved is the generation of the next id. The id
 * of a backend says whether the backend that a program remembers is still the
 * one in this place; the agent writes it last, and clears it first.
 */
struct backend {
	__u32 id;
	__u32 service_port_id;
	struct addr addr;
	__be16 port;
	__u16 reserved;
	__u32 flags; /* enum backend_flag */
};

/*
 * How much a backend has to do for clients that this node translates: TCP sockets
 * from their first SYN until they are closed, UDP sockets from the moment they dial
 * until they dial another or are closed, and flows of devices. By the index of the
 * backend's id.
 */
struct backend_load {
	__s32 sockets;
	__s32 flows;
};

/*
 * What is counted of a service port, on each CPU, by the index of its id: new flows
 * that got a backend, and the bytes that its clients sent and received.
 */
struct port_counts {
	__u64 connections;
	__u64 bytes_sent;
	__u64 bytes_received;
	__u64 reserved;
};

/* New flows that got no backend. */
struct refusal_key {
	__u32 service_port_id;
	__u32 reason; /* enum reason */
};

/* What a service port id stands for, in the words of the Service object. */
struct service_port {
	char namespace[64]; /* NUL-terminated, as are the others */
	char name[64];
	char port[64];
	__u8 proto; /* IPPROTO_* */
	__u8 family; /* 4 or 6 */
	__u8 reserved[2];
};

/*
 * A bit for every address that is in addrs, by a hash: an address whose bit is clear is
 * none of ours. (A set bit says nothing.) The bit is set before the address is in addrs,
 * and cleared after.
 */
enum addr_filter {
	ADDR_FILTER_BITS = 1048576,
	ADDR_FILTER_WORDS = ADDR_FILTER_BITS / 64,
};

/*
 * A cell for the source of every entry of a flow at HOOK_EGRESS: a packet whose
 * cells are zero is of no flow. (Others may be of none, too.) An address has a line of cells,
 * by its hash, and in it cells for its ports, and one for all of them.
 *
 * Programs write the time there before they put an entry, unless the cell has one that is
 * younger than SOURCE_CELL_FRESH. The agent clears it: see pkg/flow.
 */
enum source_filter {
	SOURCE_LINES = 8192,
	SOURCE_CELLS = 16, /* of a line */
	SOURCE_CELL_ALL = 0, /* the cell of all ports */
	SOURCE_CELL_SHIFT = 30, /* the unit of times: 2^30 ns since boot */
	SOURCE_CELL_FRESH = 8,
};

struct source_line {
	__u32 cells[SOURCE_CELLS];
};

/*
 * A byte for every port of this node's own addresses: what comes to one that has zero is the
 * node's own business. Others were node ports since the node has booted, a flow was
 * masqueraded with them, or a backend on the node has them. A byte is set before the frontend or the entry is there, and stays.
 */
enum port_filter {
	PORTS_PER_LINE = 64,
	PORT_LINES = 65536 / PORTS_PER_LINE,
};

struct port_line {
	__u8 used[PORTS_PER_LINE];
};

/*
 * The Service CIDRs, so that comparing tells for most addresses that they are in none: a
 * prefix each of the first 64 bits of an address (IPv4: of its 32, and zeros), followed by
 * a 1 and zeros; or 0. So each is a single word, which is read as a whole. An address that
 * a prefix covers may still be in no Service CIDR. They are written before service_cidrs,
 * and cleared after.
 */
enum cidr_cover {
	CIDR_COVERS = 4,
};

struct cidr_covers {
	__u64 prefixes[CIDR_COVERS];
};

/* What an address is to us. An address that is in no map is none of our business. */
struct addr_use {
	__u32 ifindex; /* of the device that has it, or 0 */
	__u32 flags; /* enum addr_flag */
};

/* A device of this node, by its ifindex. */
struct device {
	struct addr source_v4; /* what this node sends there, if a route does not say otherwise */
	struct addr source_v6; /* unspecified: none but link-local addresses */
	__u32 bridge; /* ifindex of the bridge that it is a port of, or 0 */
	__u32 flags; /* enum device_flag */
};

/* device.flags */
enum device_flag {
	DEVICE_TURNS =
		1, /* packets may leave by it that have not passed the stack: see bpf/lib/turn.h */
};

/* Prefix lengths count from the first bit after prefix_len. */
struct source_range_key {
	__u32 prefix_len;
	__u32 service_port_id;
	struct addr addr;
};

struct cidr_key {
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
	__u32 service_port_id;
	__u32 client_kind; /* enum client_kind */
};

_Static_assert(sizeof(struct affinity_key) == 24, "affinity_key is hashed: no hidden padding");

struct affinity {
	__u64 last_used;
	__u32 backend_id;
	__u32 reserved[3];
};

/* What a connected socket dialled, and what it got. */
struct sock_state {
	struct addr dialled;
	struct addr backend;
	__be16 dialled_port;
	__be16 backend_port;
	__u32 service_port_id;
	__u32 backend_id;
	__u32 counted; /* in the backend's load */
	__u32 reserved[7];
	struct bpf_spin_lock lock;
};

/*
 * What a UDP socket that names an address with each datagram dialled, and what it got:
 * one place for each destination.
 */
struct udp_dial {
	struct addr dialled;
	struct addr backend;
	__be16 dialled_port;
	__be16 backend_port;
	__u32 service_port_id;
	__u32 backend_id; /* 0: the place is free */
	__u32 answers; /* what comes from the backend is shown as coming from what was dialled */
	__u64 last_used;
	__u32 reserved[2];
};

enum udp_dial_limit {
	UDP_DIALS = 4,
};

/* The destinations beyond are in udp_pins. */
struct udp_dials {
	struct udp_dial dials[UDP_DIALS];
	__u32 pinned; /* there are some in udp_pins */
	__u32 counted; /* the dials are in their backends' loads */
	__u32 reserved[5];
	struct bpf_spin_lock lock;
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
	__u32 service_port_id;
	__u32 backend_id;
	__u32 reserved2[3];
};

/* Where a device sees a packet. */
enum hook {
	HOOK_INGRESS = 1, /* wire to stack */
	HOOK_EGRESS = 2, /* stack to wire */
};

/* A packet as it comes to a hook. */
struct flow_key {
	struct addr src;
	struct addr dst;
	__be16 src_port;
	__be16 dst_port;
	__u8 proto; /* IPPROTO_* */
	__u8 hook; /* enum hook */
	__u16 reserved;
};

_Static_assert(sizeof(struct flow_key) == 40, "flow_key is hashed: no hidden padding");

/*
 * Which packets of a flow an entry is for, and what becomes of them:
 *
 *	role          hook     as it comes               as it goes
 *	FROM_CLIENT   ingress  client -> dialled         client' -> backend
 *	TO_CLIENT     egress   backend -> client'        dialled -> client
 *
 * and if the flow is masqueraded, also
 *
 *	TO_BACKEND    egress   client' -> backend        masquerade -> backend
 *	FROM_BACKEND  ingress  backend -> masquerade     backend -> client'
 *
 * client' is the client at stack_port: its own port, unless another flow of
 * that port has the same backend.
 *
 * A masqueraded flow that is turned has only the entries of ingress, and their packets leave
 * by a device at once:
 *
 *	FROM_CLIENT   ingress  client -> dialled         masquerade -> backend
 *	FROM_BACKEND  ingress  backend -> masquerade     dialled -> client
 */
enum flow_role {
	FLOW_FROM_CLIENT = 1,
	FLOW_TO_CLIENT = 2,
	FLOW_TO_BACKEND = 3,
	FLOW_FROM_BACKEND = 4,
};

/* What the packets of one entry have come to. UDP knows the first two. */
enum flow_state {
	FLOW_NEW = 0, /* none, or the first one, perhaps again */
	FLOW_OPEN = 1,
	FLOW_FIN = 2, /* this side has said its last, and TCP's other side has acknowledged that */
	FLOW_RESET = 3, /* by a packet whose number or tag is right: see bpf/lib/ending.h */
};

/*
 * flow.ending: how this side of a TCP flow has ended, as far as its sequence numbers bear it
 * out: see bpf/lib/ending.h.
 */
enum flow_ending {
	FLOW_LAST = 1, /* by a FIN, which is right before flow.end */
	FLOW_FIRST = 2, /* that FIN came before the other side's: this side is in TIME_WAIT then */
	FLOW_CUT = 4, /* by an RST that the other side takes for one */
	FLOW_STAMPED = 8, /* flow.stamp is one */
	/* Of both sides, noted by either: */
	FLOW_OVER = 16, /* both have ended */
	FLOW_REMEMBERED = 32, /* and the backend is in TIME_WAIT */
	/* Of this side: */
	FLOW_OWES_ACK = 64, /* the other side's FIN is yet to be acknowledged */
};

/* flow.flags */
enum flow_flag {
	FLOW_MASQUERADED = 1,
	FLOW_RETURNS = 2, /* replies are routed from what was dialled: see bpf/lib/return.h */
	FLOW_SENT = 8, /* a packet has left as the masquerade */
	FLOW_COUNTED = 16, /* in the backend's load; what FLOW_FROM_CLIENT says counts */
	FLOW_TURNED = 32, /* does not pass the stack */
	FLOW_BY_PODS = 64, /* the client's packets come by devices of class DEVICE_PODS */
	FLOW_BY_UPLINKS =
		128, /* or of class DEVICE_UPLINK; neither: an earlier build did not note it */
};

/*
 * One flow, told in full by each of its entries, so that any can bring back the
 * others. The addresses that a packet is recognized by come first: see flow.h.
 */
struct flow {
	struct addr client;
	struct addr dialled;
	struct addr backend;
	struct addr masquerade;
	__be16 client_port;
	__be16 dialled_port;
	__be16 backend_port;
	__be16 masquerade_port;
	__be16 stack_port;
	__u8 proto; /* IPPROTO_* */
	__u8 role; /* enum flow_role */
	__u8 state; /* enum flow_state */
	__u8 flags; /* enum flow_flag */
	__u8 ending; /* enum flow_ending */
	__u8 stamp; /* TCP: the first byte of the timestamp of this side's FIN, if it is over the client's */
	__u32 service_port_id;
	__u32 backend_id;
	__u64 created;
	__u64 last_seen; /* within a second */
	__u64 bytes; /* of packets that came to this entry, and are in no stat yet */
	/* 0 is not known. TCP, in host byte order: */
	__u32 end; /* of what this side has sent; SCTP: the tag that its packets bear */
	__u32 ack; /* of what it has received, or is to receive first */
};

/* What shares the table of flows: see bpf/lib/share.h. */
enum flow_kind {
	FLOWS_CONNECTED = 0, /* of TCP and SCTP */
	FLOWS_UDP = 1,
	FLOW_KIND_COUNT = 2,
};

/* What is counted of flows, in entries. */
enum flow_count {
	COUNT_FLOWS_PUT = 0,
	COUNT_FLOWS_DELETED = 1, /* by programs; the agent knows what it deletes */
	COUNT_HALF_OPEN_PUT = 2,
	COUNT_HALF_OPEN_DELETED = 3,
	COUNT_FLOWS_REPAIRED = 4, /* put because a sibling had lost it */
	COUNT_MASQUERADE_RETRIES = 5, /* a port was taken */
	COUNT_STACK_PORTS = 6, /* flows whose client port another flow had */
	FLOW_COUNT_COUNT = 7,
};

/* A datagram in fragments: only the first one has ports. */
struct fragment_key {
	struct addr src;
	struct addr dst;
	__u32 id;
	__u8 proto; /* IPPROTO_* */
	__u8 hook; /* enum hook: each counts what it has seen */
	__u8 reserved[2];
};

_Static_assert(sizeof(struct fragment_key) == 40, "fragment_key is hashed: no hidden padding");

struct fragment {
	__be16 src_port;
	__be16 dst_port;
	/*
	 * How many bytes of the datagram have not come. Below zero until the last fragment has told
	 * how long it is.
	 */
	__s32 missing;
	__u64 since; /* when the first one came */
};

/* How much ICMP a client has had: the kernel's rule, a token a second and six at most. */
struct icmp_budget {
	__u64 last;
	__u64 tokens; /* nanoseconds */
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
