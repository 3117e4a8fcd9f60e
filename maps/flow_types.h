/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The map ABI of flows: what devices translate, fragments of it, and errors about it. */
#ifndef SLUICE_FLOW_TYPES_H
#define SLUICE_FLOW_TYPES_H

#include "types.h"

/* The hook of a device at which a packet arrives. */
enum hook {
	HOOK_INGRESS = 1, /* wire to stack */
	HOOK_EGRESS = 2, /* stack to wire */
};

/* The tuple of a packet as it arrives at a hook. */
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
 * The packets of a flow that an entry matches, and the tuple that they get:
 *
 *	role          hook     on arrival                translated
 *	FROM_CLIENT   ingress  client -> original        client' -> backend
 *	TO_CLIENT     egress   backend -> client'        original -> client
 *
 * and if the flow is masqueraded, also
 *
 *	TO_BACKEND    egress   client' -> backend        masquerade -> backend
 *	FROM_BACKEND  ingress  backend -> masquerade     backend -> client'
 *
 * client' is the client with stack_port: its own port, unless another flow of that port has
 * the same backend. original is original_dst with original_port.
 *
 * A masqueraded flow that is turned around has only the entries of ingress, and their packets
 * leave by a device at once:
 *
 *	FROM_CLIENT   ingress  client -> original        masquerade -> backend
 *	FROM_BACKEND  ingress  backend -> masquerade     original -> client
 *
 * The packets of a process of this node leave by a device before any arrives, so the hooks of its
 * flow are exchanged:
 *
 *	FROM_CLIENT   egress   client -> original        client' -> backend
 *	TO_CLIENT     ingress  backend -> client'        original -> client
 *
 * and its datagrams, which leave by another route than the stack has chosen, are masqueraded as if
 * the flow were turned around:
 *
 *	FROM_CLIENT   egress   client -> original        masquerade -> backend
 *	FROM_BACKEND  ingress  backend -> masquerade     original -> client
 */
enum flow_role {
	FLOW_FROM_CLIENT = 1,
	FLOW_TO_CLIENT = 2,
	FLOW_TO_BACKEND = 3,
	FLOW_FROM_BACKEND = 4,
};

/* The state of one side of a flow. UDP has the first two. */
enum flow_state {
	FLOW_NEW = 0, /* no packet, or only the first one and its retransmissions */
	FLOW_OPEN = 1,
	FLOW_FIN = 2, /* this side has closed and, with TCP, the other side has acknowledged that */
	FLOW_RESET =
		3, /* by a packet with a plausible number, or a valid tag: see bpf/lib/ending.h */
	FLOW_ABANDONED = 4, /* of a backend that was given up: see bpf/lib/resteer.h */
	FLOW_JOINING = 5, /* FLOW_NEW of a further subflow: see is_new in bpf/lib/flow.h */
};

/*
 * flow.ending: how this side of a TCP flow has ended, by valid sequence numbers: see
 * bpf/lib/ending.h.
 */
enum flow_ending {
	FLOW_FIN_SENT = 1, /* by a FIN, whose sequence number is before flow.end */
	FLOW_FIN_FIRST = 2, /* before the other side's FIN, so this side will be in TIME_WAIT */
	FLOW_RST_VALID = 4, /* by an RST that the other side accepts */
	FLOW_STAMPED = 8, /* flow.stamp is valid */
	/* Of both sides, set by either: */
	FLOW_OVER = 16, /* both have ended */
	FLOW_TIME_WAIT = 32, /* and the backend is in TIME_WAIT */
	/* Of this side: */
	FLOW_OWES_ACK =
		64, /* the other side's FIN, or what came before its RST, is yet to be acknowledged */
	/*
	 * Until there is an answer, the client has not been told of a refusal: by this backend or,
	 * on the client's side, by one before.
	 */
	FLOW_REFUSED = 128,
};

/* flow.flags */
enum flow_flag {
	FLOW_MASQUERADED = 1,
	FLOW_RETURNS =
		2, /* replies are routed from the original destination: see bpf/lib/route.h */
	FLOW_RESTEERED = 4, /* of a socket: original_dst is the backend that it has dialled */
	FLOW_SENT = 8, /* a packet has left as the masquerade */
	FLOW_COUNTED = 16, /* in the backend's load; valid in the entry of FLOW_FROM_CLIENT */
	FLOW_TURNED = 32, /* turned around: it does not pass the stack */
	FLOW_BY_PODS = 64, /* the client's packets arrive on devices of class DEVICE_PODS */
	FLOW_BY_UPLINKS =
		128, /* or of class DEVICE_UPLINK; neither: the client need not be there, see is_foreign in bpf/lib/flow.h */
	FLOW_OF_NODE =
		FLOW_BY_PODS |
		FLOW_BY_UPLINKS, /* both: the client is a process of this node, see enum flow_role */
};

/*
 * A flow. Each of its entries contains all of it, so that any can put back the others. The
 * addresses that a packet matches come first: see set_target in bpf/lib/flow.h.
 */
struct flow {
	struct addr client;
	struct addr original_dst;
	struct addr backend;
	struct addr masquerade;
	__be16 client_port;
	__be16 original_port;
	__be16 backend_port;
	__be16 masquerade_port;
	__be16 stack_port;
	__u8 proto; /* IPPROTO_* */
	__u8 role; /* enum flow_role */
	__u8 state; /* enum flow_state */
	__u8 flags; /* enum flow_flag */
	__u8 ending; /* enum flow_ending */
	__u8 stamp; /* TCP: the first byte of the timestamp of this side's FIN, or of the client's once both have ended */
	__u32 service_port_id;
	__u32 backend_id;
	__u64 created;
	__u64 last_seen; /* within a second */
	__u64 bytes; /* of packets that matched this entry, and are in no count yet */
	/* 0 is unknown. TCP sequence numbers, in host byte order: */
	__u32 end; /* of what this side has sent; SCTP: the tag of its packets */
	/*
	 * Of what it has received, or is to receive first. UDP, of the client's packets: when one was last checked, see
	 * checked_at in bpf/lib/flow.h.
	 */
	__u32 ack;
};

/* The kinds of flows that share the table of flows: see bpf/lib/flow.h. */
enum flow_kind {
	FLOWS_CONNECTED = 0, /* of TCP and SCTP */
	FLOWS_UDP = 1,
	FLOW_KIND_COUNT = 2,
};

/* The counts of flows, in entries. */
enum flow_count {
	COUNT_FLOWS_PUT = 0,
	COUNT_FLOWS_DELETED = 1, /* by programs; the agent counts its own */
	COUNT_HALF_OPEN_PUT = 2,
	COUNT_HALF_OPEN_DELETED = 3,
	COUNT_FLOWS_REPAIRED = 4, /* put back after an eviction */
	COUNT_MASQUERADE_RETRIES = 5, /* a masquerade port was in use */
	COUNT_STACK_PORTS = 6, /* flows whose client port was in use by another flow */
	FLOW_COUNT_COUNT = 7,
};

/* A datagram in fragments: only the first one has ports. */
struct fragment_key {
	struct addr src;
	struct addr dst;
	__u32 id;
	__u8 proto; /* IPPROTO_* */
	__u8 hook; /* enum hook: each counts the fragments that it has seen */
	__u8 reserved[2];
};

_Static_assert(sizeof(struct fragment_key) == 40, "fragment_key is hashed: no hidden padding");

struct fragment {
	__be16 src_port;
	__be16 dst_port;
	/*
	 * The bytes of the datagram that have not arrived yet. Negative until the last fragment,
	 * which ends the datagram, has arrived.
	 */
	__s32 missing;
	__u64 since; /* when the first one arrived */
};

/*
 * The token bucket of ICMP errors to a client: see bpf/lib/reject.h. An earlier build takes the time for that up to
 * which the tokens are spent, and adds what is reserved to them.
 */
struct icmp_budget {
	__u64 full; /* when it has all tokens again */
	__u64 reserved;
};

#endif
