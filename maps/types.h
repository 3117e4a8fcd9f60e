/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The map ABI: every byte that the agent and the datapath share. C owns the layout, and bpf2go
 * generates the Go types from it. Ports are in network byte order, times in nanoseconds since
 * boot. flow_types.h has the types of flows, monitor_types.h those of events.
 *
 * Builds that keep the same state share the maps that the datapath writes (see maps.h). Reserved
 * fields in them are zero, for use by later builds, which must accept a zero that an earlier build
 * has written.
 */
#ifndef SLUICE_TYPES_H
#define SLUICE_TYPES_H

#include <linux/bpf.h>
#include <linux/types.h>

/* The scope of a lookup. */
enum scope {
	SCOPE_INTERNAL = 1, /* sockets of this node, devices that face pods */
	SCOPE_EXTERNAL = 2, /* uplinks */
};

/* The kind of address of a frontend. */
enum kind {
	KIND_CLUSTER_IP = 1,
	KIND_EXTERNAL_IP = 2,
	KIND_LOAD_BALANCER = 3,
	KIND_NODE_PORT = 4,
};

/*
 * How a pool picks a backend for a new flow. Those that hash use the table of the pool (see struct
 * pool).
 */
enum algorithm {
	ALGORITHM_RANDOM = 0,
	ALGORITHM_RR = 1, /* round robin */
	ALGORITHM_LC = 2, /* of two at random, the one with fewer live connections */
	ALGORITHM_SED = 3, /* of all, or of 64, the one with the fewest */
	ALGORITHM_NQ = 4, /* the same, since backends have no weights */
	ALGORITHM_SH = 5, /* by the client address */
	ALGORITHM_DH = 6, /* by the original destination */
	ALGORITHM_MAGLEV = 7, /* by the tuple */
};

/* pool.flags */
enum pool_flag {
	POOL_DROP_IF_EMPTY = 1, /* there are usable backends, but on other nodes only */
	POOL_SOURCE_RANGES = 2, /* source_ranges lists the allowed clients */
	POOL_NODE_IN_RANGES = 4, /* and this node is one of them */
	POOL_MASQUERADE = 8, /* backends see this node instead of the client */
	POOL_OPTED_OUT = 16, /* sockets of pods are left alone; devices translate */
	POOL_NO_EJECT = 32, /* suspects get new flows like the others: see struct backend_health */
	POOL_NO_RESTEER = 64, /* flows that have begun stay with suspects */
	POOL_PASS_IF_EMPTY = 128, /* without backends, packets go where routes lead them */
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
	ADDR_SERVICE = 4, /* of a frontend, or of a deleted one that still has flows */
	ADDR_LEFT =
		8, /* of a backend that Services have left, and connected UDP sockets have dialled */
};

/* The clients behind a device. */
enum device_class {
	DEVICE_PODS = 0, /* pods of this node: replies to them always pass it */
	DEVICE_UPLINK = 1, /* all other clients */
	DEVICE_CLASS_COUNT = 2,
};

/*
 * The outcome of a hook for a packet or a system call. REASON_NEXT means to go on; all others are
 * counted in reasons. Builds share these counts, so a number never changes. bpf/lib/reason.h has
 * the classes of reasons; a new one is at the end, and a drop unless it is put into another class.
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
	REASON_PASS_OTHER_TRAFFIC = 14, /* neither to an address of a Service nor of a flow */
	REASON_PASS_NO_FLOW = 15, /* not the first packet of a flow, and of no known one */
	REASON_PASS_FRAGMENT = 16, /* a fragment whose first one was not seen */
	REASON_PASS_MALFORMED = 17, /* headers that are truncated, or too many */
	REASON_REJECT_LIMITED = 18, /* dropped, because the ICMP rate limit is reached */
	REASON_DROP_MASQUERADE_ADDR = 19, /* this node has no address on the route to the backend */
	REASON_DROP_MASQUERADE_PORT = 20, /* all ports that were tried are taken */
	REASON_DROP_FLOW_TABLE = 21, /* flows has no room */
	REASON_DROP_REDIRECT =
		22, /* an ICMP redirect that would make the client bypass this node */
	REASON_DROP_REWRITE = 23, /* the kernel did not let the program write the packet */
	REASON_DROP_TUPLE_TAKEN = 24, /* the tuple belongs to the flow of a client elsewhere */
	REASON_DROP_ABANDONED =
		25, /* a late answer of a backend that was given up, or an error about it */
	REASON_REJECT_NO_FLOW = 26, /* reset: of no known flow, and not the first packet of one */
	REASON_DROP_NO_FLOW = 27, /* the same, but it is a reset itself, or cannot be answered */
	REASON_DROP_SOURCE = 28, /* the source of a first packet is none of a client */
	REASON_COUNT = 29,
};

/* An IPv6 address, or an IPv4 address mapped into ::ffff:0:0/96. */
struct addr {
	union {
		__u8 bytes[16];
		__be32 words[4];
	};
};

/* The destination of a client. Port and protocol zero: the catch-all of a ClusterIP. */
struct frontend_key {
	struct addr addr; /* a node port has 0.0.0.0 or :: */
	__be16 port;
	__u8 proto; /* IPPROTO_* */
	__u8 scope; /* enum scope */
};

_Static_assert(sizeof(struct frontend_key) == 20, "frontend_key is hashed: no hidden padding");

/*
 * Ids of service ports and backends are kept for longer than a program runs, by sockets, flows and
 * affinity. Such an id is the index of a place in an array and, above INDEX_BITS, the generation of
 * that place, which changes each time the place is given to another service port or backend. Place
 * 0 is never used, so no id is 0.
 */
enum id_layout {
	INDEX_BITS = 24,
	INDEX_MASK = 0xffffff,
};

/*
 * The values per chunk of a growing array, and the maximum number of chunks: see maps.h.
 */
enum chunk {
	CHUNK_FRONTENDS = 4096,
	CHUNK_POOLS = 4096,
	CHUNK_SLOTS = 16384,
	CHUNK_BACKENDS = 4096,
	CHUNK_COUNTS = 256,
	MAX_CHUNKS = 1024,
	MAX_SLOT_CHUNKS = 16384, /* a pool that hashes takes a chunk */
	MAX_COUNT_CHUNKS = 2048, /* as many service ports as service_ports has room for */
};

/*
 * A frontend, by frontend id. The key never changes while frontend_ids leads here;
 * pool_id is one word that the agent switches whenever the frontend gets other
 * backends, other settings or another owner.
 */
struct frontend {
	struct frontend_key key;
	__u32 pool_id;
	__u8 kind; /* enum kind; no program reads it */
	__u8 reserved[3];
};

/*
 * A set of backends, and how to pick one of them. A pool that programs can reach does not change,
 * except that backends are removed from it: slot_count only decreases.
 *
 * The backends are the slots [slot_base, slot_base + slot_count), ascending by id. If the algorithm
 * hashes, the slots [table_base, table_base + table_size) are its table, which holds the same
 * backends many times.
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
 * An address and port that answers. In a free place, reserved is the generation of the next id. The
 * id shows whether the backend that a program has kept is still in this place; the agent writes it
 * last, and clears it first.
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
 * The load of a backend by clients that this node translates: TCP sockets from their first SYN
 * until they are closed, UDP sockets from their first datagram until they connect to another
 * destination or are closed, and flows of devices. By the index of the id of the backend.
 */
struct backend_load {
	__s32 sockets;
	__s32 flows;
};

/* Why a backend is a suspect. */
enum health_cause {
	HEALTH_UNANSWERED = 1, /* connections that began a while ago have no answer yet */
	HEALTH_RETRANSMIT = 2, /* their first segments had to be sent again */
	HEALTH_REFUSED = 3,
	HEALTH_UNREACHABLE = 4, /* the network or the host reported so */
};

/* For how long, in milliseconds. */
enum health_time {
	HEALTH_MAX_PAUSE = 60000, /* a suspect is passed over at most */
	HEALTH_LOOKED_FOR = 2 * HEALTH_MAX_PAUSE, /* suspects are looked for after one was noted */
};

/*
 * How a backend treats new connections of clients that this node translates, by the index of its
 * id. Programs on several CPUs write it without a lock: what one of them overwrites is one
 * connection more or less. See bpf/lib/health.h.
 */
struct backend_health {
	__u32 id; /* of the backend that it is about; of another one nothing is known */
	/* Clients with unanswered connections: a bit for each, by a hash. */
	__u16 clients;
	__u16 clients_reaching; /* that reach other backends of the Service */
	__u64 answered; /* when it last answered, within ANSWER_STEP; 0: never */
	/* What speaks against it since it last answered: */
	__u64 unanswered; /* when the first of the connections began that are in evidence */
	__u16 evidence; /* a number that grows with each unanswered connection */
	__u16 evidence_reaching; /* the same, of clients_reaching, and the first report of others */
	__u16 refusals;
	__u8 cause; /* enum health_cause */
	__u8 level; /* of the pause: see pause_of */
	__u64 suspected; /* since when it is a suspect; 0: it is none */
	__u64 until; /* a suspect is passed over until then; in place 0: any is looked for */
	__u64 cleared; /* when it was a suspect last */
	__u32 episodes; /* how often it became a suspect, after a minute or more in which it was none */
	__u32 passed_over; /* new flows that went to another backend instead */
};

/*
 * Which clients reached which service ports lately, by a hash of both: the upper half of a word is
 * another hash of both, the lower half is the time in units of 2^REACHED_SHIFT ns.
 */
enum reached {
	REACHED_WORDS = 4096,
	REACHED_SHIFT = 23,
};

/*
 * How many datagrams' exchanges with a backend of a service port begin without an answer before one is answered, by a
 * hash of the port's id, which is the upper half of a word: see usual_silence in bpf/lib/health.h. Above its
 * SILENCE_BITS is when an answer came last, in units of 2^SILENCE_SHIFT ns.
 */
enum silence {
	SILENCE_WORDS = 4096,
	SILENCE_BITS = 20,
	SILENCE_SHIFT = 35,
};

/*
 * How many connections to a service port are yet to come until more refusals are hidden, by a hash of
 * its id, each for one of some groups of clients: see bpf/lib/refusal.h.
 */
enum refusal_debt {
	REFUSAL_DEBTS = 4096,
	REFUSAL_GROUPS = 4,
};

/*
 * The counts of a service port on each CPU, by the index of its id: new flows that got a backend,
 * the bytes that its clients sent and received, and refusals that clients were not told of.
 */
struct port_counts {
	__u64 connections;
	__u64 bytes_sent;
	__u64 bytes_received;
	__u64 hidden_refusals;
};

/*
 * The buckets of a histogram of durations, which are those of a native histogram of Prometheus with
 * this schema: 2^HISTOGRAM_SCHEMA for each factor of two, and bounds belong to the bucket below.
 * Bucket 0 has the durations up to 2^-HISTOGRAM_LEAST seconds, and the last one ends at
 * 2^HISTOGRAM_MOST seconds and also has what is longer.
 */
enum histogram {
	HISTOGRAM_SCHEMA = 2,
	HISTOGRAM_LEAST = 16, /* 15 microseconds */
	HISTOGRAM_MOST =
		7, /* 128 seconds, after which the kernel gives up a connect() by default */
	HISTOGRAM_BUCKETS = 1 + ((HISTOGRAM_LEAST + HISTOGRAM_MOST) << HISTOGRAM_SCHEMA),
	/* Of numbers of SYNs, with schema 0: 1, 2, 3 to 4, 5 to 8, and more. */
	HISTOGRAM_SYN_BUCKETS = 5,
};

/*
 * The TCP handshakes of sockets that clients of a service port have connected, by the index of its
 * id. Those that were answered are in the buckets, by the time from connect() to the answer.
 */
struct handshakes {
	__u64 buckets[HISTOGRAM_BUCKETS];
	__u64 time; /* of all of them, in nanoseconds */
	__u64 failed; /* refused, timed out, or closed before the answer */
	__u64 syn_buckets[HISTOGRAM_SYN_BUCKETS]; /* of both, by how many SYNs were sent again */
	__u64 syn_retransmits; /* so far, also of handshakes that have no outcome yet */
	__u64 retransmits; /* of segments after the handshake */
};

/* The same of one backend, by the index of its id. */
struct backend_handshakes {
	__u64 answered;
	__u64 time; /* of these, in nanoseconds */
	__u64 failed;
	__u64 syn_retransmits;
};

/* New flows that got no backend. */
struct refusal_key {
	__u32 service_port_id;
	__u32 reason; /* enum reason */
};

/* The name of a service port id, as in the Service object. */
struct service_port {
	char namespace[64]; /* NUL-terminated, as are the others */
	char name[64];
	char port[64];
	__u8 proto; /* IPPROTO_* */
	__u8 family; /* 4 or 6 */
	__u8 reserved[2];
};

/*
 * A bit for every address in addrs, by a hash: an address whose bit is clear is not in addrs; one
 * whose bit is set may be. The bit is set before the address is put into addrs, and cleared after
 * it is deleted. An address of this node has a second bit, by the inverse of the hash, which is set
 * before the address gets the flag ADDR_NODE.
 */
enum addr_filter {
	ADDR_FILTER_BITS = 1048576,
	ADDR_FILTER_WORDS = ADDR_FILTER_BITS / 64,
};

/*
 * A cell for the source of every entry of a flow at HOOK_EGRESS: a packet whose cells are zero
 * belongs to no flow; others may. An address has a line of cells, by its hash, with cells for its
 * ports, and one for all ports.
 *
 * Programs write the time to a cell before they put an entry, unless its time is younger than
 * SOURCE_CELL_FRESH. The agent clears cells: see pkg/flow.
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
 * A byte for every port of this node's own addresses: packets to a port with a zero belong to the
 * node itself. The others were node ports, ports of a masquerade, or those of a backend on the node
 * since it booted. A byte is set before the frontend or the entry is put, and stays.
 */
enum port_filter {
	PORTS_PER_LINE = 64,
	PORT_LINES = 65536 / PORTS_PER_LINE,
};

struct port_line {
	__u8 used[PORTS_PER_LINE];
};

/*
 * A filter of the Service CIDRs, which excludes most addresses by comparison. Each element is 0 or
 * a prefix of the first 64 bits of an address (IPv4: of its 32, and zeros), followed by a 1 and
 * zeros; so it is a single word, which is read at once. An address that a prefix covers may still
 * be in no Service CIDR. A prefix is written before service_cidrs, and cleared after.
 */
enum cidr_cover {
	CIDR_COVERS = 4,
};

struct cidr_covers {
	__u64 prefixes[CIDR_COVERS];
};

/* How an address is used. Packets to an address without an entry are other traffic. */
struct addr_use {
	__u32 ifindex; /* of the device that has it, or 0 */
	__u32 flags; /* enum addr_flag */
};

/* A device of this node, by its ifindex. At 0 are the addresses by which the node's own processes are clients. */
struct device {
	struct addr
		source_v4; /* source address of this node on the device, if the route has none */
	struct addr source_v6; /* unspecified: it only has link-local addresses */
	__u32 bridge; /* ifindex of the bridge that it is a port of, or 0 */
	__u32 flags; /* enum device_flag */
	__u32 peer_netns; /* 1 + this node's number of the network namespace of its other end, or 0 */
};

/* device.flags */
enum device_flag {
	DEVICE_TURNS =
		1, /* packets may leave by it without passing the stack: see bpf/lib/route.h */
	DEVICE_LEADS_OUT = 2, /* to other hosts only, and to no pod of this node */
	/* It does not lead out, and what leaves by it passes no program there, nor at a port of it. */
	DEVICE_UNSEEN = 4,
	DEVICE_ENCRYPTS = 8, /* the stack has policies of IPsec: see encrypts in bpf/lib/route.h */
	/* Packets from the wire pass another device here first: that below an ipvlan, a port of the bridge below a VLAN. */
	DEVICE_ABOVE = 16,
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

/* What service_cidrs says of a prefix; the longest one that contains an address counts. */
enum cidr_use {
	CIDR_OF_SERVICES = 1, /* an address of no Service is dropped */
	CIDR_OF_OTHER_PROXY = 2, /* the address of a Service that another proxy serves */
};

/*
 * A pod by its UID, as the kubelet writes it in the name of the pod's cgroup: with dashes, or with
 * underscores if systemd makes the cgroups.
 */
struct pod_uid {
	char text[36];
};

/* How session affinity identifies a client. */
enum client_kind {
	CLIENT_NETNS = 1, /* by the network namespace of its socket, if that has no address */
	CLIENT_ADDR = 2, /* by its address, which is the source of its packets */
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

/*
 * The original destination of a connected socket, and the backend that it got: backend_id is another
 * one than backend if the connection was re-steered.
 */
struct sock_state {
	struct addr original_dst;
	struct addr backend;
	__be16 original_port;
	__be16 backend_port;
	__u32 service_port_id;
	__u32 backend_id;
	__u32 counted; /* in the backend's load */
	__u64 since; /* the connect(); 0: an earlier build did not record it */
	__u16 handshake_counted; /* TCP: in struct handshakes */
	__u16 answered; /* UDP: a datagram of the backend was received */
	__u32 client; /* a hash: see client_of in bpf/lib/client.h */
	__u32 syn_retransmits;
	__u16 resteered; /* a flow leads to backend_id instead of backend, and shows its health */
	__u16 more_syns; /* TCP: in the number of SYNs that the socket sends: see bpf/syn.c */
	__u16 refused; /* TCP: by backend, and the application was not told */
	__u16 shows_nothing; /* TCP: of its backend: see shows_nothing in bpf/lib/sock.h */
	struct bpf_spin_lock lock;
};

/*
 * One destination of a UDP socket that sends without connecting, and the backend that it got.
 */
struct udp_dial {
	struct addr original_dst;
	struct addr backend;
	__be16 original_port;
	__be16 backend_port;
	__u32 service_port_id;
	__u32 backend_id; /* 0: the place is free */
	__u32 answers; /* datagrams of the backend appear to come from the original destination */
	__u64 last_used;
	__u32 answered; /* a datagram of the backend was received */
	__u32 client; /* as in sock_state; 0: an earlier build did not record it */
};

enum udp_dial_limit {
	UDP_DIALS = 4,
};

/* The destinations of a UDP socket; those without a place are in udp_pins. */
struct udp_dials {
	struct udp_dial dials[UDP_DIALS];
	__u32 pinned; /* there are some in udp_pins */
	__u32 counted; /* the dials are in their backends' loads */
	__u32 reserved[5];
	struct bpf_spin_lock lock;
};

/* The direction in which a udp_pin is looked up. */
enum udp_pin_way {
	UDP_PIN_SEND = 1, /* key: the frontend; value: its backend */
	UDP_PIN_RECEIVE = 2, /* key: the backend; value: the frontend */
	/* key: a server that a socket of the node asks; value: the source, a Service's port */
	UDP_PIN_ASKED = 3,
};

struct udp_pin_key {
	__u64 cookie; /* of the socket, but for UDP_PIN_ASKED */
	struct addr addr;
	__be16 port;
	__u16 way; /* enum udp_pin_way */
	__be16 asks_from; /* the port of a UDP_PIN_ASKED */
	__u16 reserved;
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

/* A socket that was translated, and one of its destinations, as the iterators return it. */
struct translated_sock {
	__u64 cookie;
	struct sock_state state; /* of an unconnected UDP socket: from its udp_dial */
	__u32 netns; /* inode number */
	__u32 device; /* that the socket is bound to, or 0 */
	struct addr source;
	struct addr peer; /* as the kernel has it now; unspecified: none */
	__be16 source_port;
	__be16 peer_port;
	__u16 family; /* AF_INET or AF_INET6 */
	__u8 proto; /* IPPROTO_* */
	__u8 tcp_state; /* as the kernel has it now, also of UDP sockets */
	__u32 retransmits; /* this and the next three: TCP only */
	__u32 rtt; /* microseconds, smoothed; 0: not measured yet */
	__u64 bytes_sent; /* without retransmissions */
	__u64 bytes_received;
	__u64 inode; /* of the socket; 0: no process has it open */
	__u64 cgroup; /* id of that of the process that made it; 0: unknown */
	__u64 last_used; /* by an unconnected UDP socket, else 0 */
	__u32 pinned; /* it has further destinations in udp_pins */
	__u32 reserved;
};

#endif
