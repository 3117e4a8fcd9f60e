/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet at a device: the memory in which a hook works on it, and the access to its bytes. */
#ifndef SLUICE_PACKET_H
#define SLUICE_PACKET_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/icmpv6.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/types.h>

#include "../../maps/maps.h"
#include "addr.h"

/*
 * Settings that the agent makes for a kind of device before it loads the programs. The verifier
 * prunes what they switch off.
 */

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

/* Before that: netfilter may track connections that cannot be looked up. */
volatile const bool config_conntrack_hidden = false;

/* resteers_sockets reports whether connections that were translated at sockets are re-steered here. */
static __always_inline bool resteers_sockets(void)
{
	return config_resteer && config_device_class == DEVICE_PODS;
}

/*
 * resteers_own reports whether those of the node's own processes are, where they leave the node. A
 * port of a bridge is not the device of a route, and bpf_redirect_neigh requires Ethernet.
 */
static __always_inline bool resteers_own(void)
{
	return config_resteer && config_device_class == DEVICE_UPLINK && config_ethernet &&
	       !config_bridge_port;
}

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

/* The largest offset at which a header is read. */
#define MAX_OFFSET 1000

/* How much of a packet an error quotes: all headers, and a little more. */
#define MAX_QUOTE 128

/* The return values of a hook: the numbers of tcx are also those of tc, for Linux before 6.6. */
enum verdict {
	VERDICT_NEXT = -1, /* the next program runs, then the stack */
	VERDICT_DROP = 2,
};

/* __sk_buff.pkt_type */
#define PACKET_HOST 0
#define PACKET_BROADCAST 1
#define PACKET_MULTICAST 2
#define PACKET_OTHERHOST 3

#define VLAN_ID 0xfff /* of vlan_tci; VLAN 0 has a priority only */

/*
 * is_of_vlan reports whether the kernel has taken the tag of a VLAN off the packet, or has yet to put it on. The packet
 * is that of the VLAN's own device, whose programs translate it before or after; without such a device the stack
 * drops it. A bridge passes on what its ports take in for a VLAN, by itself and without the tag.
 */
static __always_inline bool is_of_vlan(struct __sk_buff *ctx)
{
	return config_ethernet && !config_bridge_port && ctx->vlan_present &&
	       ctx->vlan_tci & VLAN_ID;
}

/* What a packet means for the connection of its flow. */
enum event {
	EVENT_NONE = 0,
	EVENT_OPEN = 1, /* opens a flow: a SYN, an INIT, or any datagram */
	EVENT_FIN = 2, /* its side closes the connection */
	EVENT_RESET = 3, /* it aborts the connection */
	EVENT_ACCEPT = 4, /* the answer to EVENT_OPEN: a SYN-ACK or an INIT-ACK */
	EVENT_INVALID = 5, /* its numbers or its tag do not fit the flow: it changes nothing */
};

/* The header of a TCP segment, in host byte order. */
struct segment {
	__u32 seq;
	__u32 end; /* the seq of the segment after it */
	__u32 ack;
	bool acks; /* ack is valid */
	bool syn;
	bool joins; /* a SYN of a further subflow of Multipath TCP */
	bool signs; /* a SYN with a signature (TCP-MD5, TCP-AO), or with many options */
	bool stamped; /* stamp is valid; only read from SYN and FIN */
	__u8 stamp; /* the first byte of the timestamp */
	__u8 fin; /* the bits of flow.ending that a FIN sets; 0: no FIN */
};

/* The tags of an SCTP packet. */
struct sctp_tags {
	__u32 tag; /* which its receiver has asked for, or 0 */
	__u32 asks; /* in the first packet of a side: the tag of packets to that side; 0: the packet is too short */
	bool reflects; /* if it ends the association, its tag is that of the packet that it answers */
	__u8 chunk; /* the type of its first chunk */
};

/* Where the headers of an IP packet are, in bytes from the start of the frame, and its tuple. */
struct headers {
	__u32 l3;
	__u32 l4;
	__u32 end; /* of the packet, by its IP header */
	__u32 fragment_id;
	__u32 piece; /* where a fragment's part of the datagram begins */
	struct flow_key key;
	__u8 v6;
	__u8 fragment; /* part of a fragmented datagram */
	__u8 later; /* a fragment other than the first: it has no ports */
	__u8 more; /* a fragment other than the last */
	__u16 offset; /* of a fragment in the datagram */
};

/*
 * A packet on its way through a hook, with all that is known about it. It lies in a map because
 * the verifier does not track the values of map memory, so it does not walk the same code again
 * for each of them.
 */
struct packet {
	struct headers ip;
	struct headers quoted; /* of the packet that an ICMP error quotes */
	struct flow_key
		came; /* the tuple of the flow that an ICMP error is about, or of a packet of no flow */
	struct flow_key to; /* the tuple that the packet gets */
	struct flow_key key; /* scratch: the tuple of an entry */
	struct flow flow; /* the flow that is opened or put back */
	struct flow gone; /* the flow that is deleted */
	struct pool pool; /* of the flow that is opened */
	struct backend backend; /* and the one that it gets */
	struct bpf_sock_tuple tuple; /* scratch for socket and conntrack lookups */
	__be32 quote[MAX_QUOTE / 4]; /* what a generated error quotes */
	__u64 now;
	struct segment tcp; /* not set for a later fragment */
	struct sctp_tags sctp; /* the same */
	__u64 weak; /* last_seen of the oldest flow that gives up a wanted tuple if no other is free; 0: none */
	__be16 weak_port; /* the port of that tuple */
	__u32 pos; /* the offset of the next header */
	__u32 service_port_id; /* that a new flow is for, or 0 */
	__u32 client; /* a hash of the tuple of a new flow's client: see beginning.h */
	__u64 replaces; /* when the flow was created that the packet replaces by a new one; 0: none */
	__u32 back; /* the device by which the node sends what is for a new flow's client: see find_back */
	bool by_gateway; /* and the next hop there is another host */
	bool evicts; /* gone has to be deleted */
	__u8 role; /* of the entry at egress: enum flow_role */
	__u8 flags; /* and its flags */
	__u32 given_up; /* the backend of a flow that is unanswered, which gets another one; 0: none */
	struct flow_key late; /* the tuple with which its answers arrive */
	bool refused; /* it has refused the SYN: see refusal.h */
	bool left; /* of a socket whose backend the Service has left: see left.h */
	bool turns; /* it is turned around: it leaves by the device out, to next */
	__u16 mtu; /* of the route, if the packet is too long for it and must not be fragmented; else 0 */
	__u32 out;
	struct bpf_redir_neigh next;
	__u32 enters; /* the device by which it enters the stack, if another one; else 0 */
	__u8 enters_as[ETH_ALEN]; /* and the address of that */
	__u8 event; /* enum event */
	__u8 icmp_type;
	__u8 is_error; /* an ICMP error */
};

/*
 * The packet at each hook, per CPU. A run of a hook may use it alone until it returns, because no
 * other run of that hook can start on its CPU meanwhile:
 *
 * - Both hooks run with bottom halves disabled: ingress in the softirq that receives packets,
 *   egress in __dev_queue_xmit(). So neither a softirq nor another task gets in between.
 * - A packet that a hook redirects is sent only after its program has returned.
 * - On PREEMPT_RT, softirqs and such tasks can be preempted, but local_bh_disable() holds a lock per
 *   CPU that keeps out all others. Since Linux 6.18 that lock depends on
 *   CONFIG_PREEMPT_RT_NEEDS_BH_LOCK, which a PREEMPT_RT kernel must set.
 *
 * For the same reasons, egress may use that of ingress as well, to open a flow: see resteer_own.
 *
 * No run reads what an earlier one left: new_packet resets the fields that are not written before
 * they are read.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, struct packet);
} sl_packet SEC(".maps");

/* packet_at returns the packet at a hook on this CPU; it is never NULL. */
static __always_inline struct packet *packet_at(enum hook hook)
{
	__u32 key = hook - HOOK_INGRESS;

	return bpf_map_lookup_elem(&sl_packet, &key);
}

static __always_inline struct packet *new_packet(enum hook hook)
{
	struct packet *pkt = packet_at(hook);

	if (pkt) {
		pkt->ip.key.hook = hook;
		pkt->ip.key.reserved = 0;
		pkt->event = EVENT_NONE;
		pkt->is_error = false;
		pkt->evicts = false;
		pkt->given_up = 0;
		pkt->refused = false;
		pkt->left = false;
		pkt->turns = false;
		pkt->enters = 0;
		pkt->mtu = 0;
		pkt->service_port_id = 0;
	}
	return pkt;
}

/* copy_sent makes pkt the packet at ingress of what leaves: all that open flows work on that. */
static __always_inline void copy_sent(const struct packet *sent, struct packet *pkt)
{
	new_packet(HOOK_INGRESS);
	pkt->ip = sent->ip;
	pkt->ip.key.hook = HOOK_INGRESS;
	pkt->event = sent->event;
	pkt->tcp = sent->tcp;
	pkt->now = sent->now;
	pkt->late = sent->late;
	pkt->refused = sent->refused;
}

/* reversed sets to to the tuple of the packets of the other direction. */
static __always_inline void reversed(const struct flow_key *tuple, struct flow_key *to)
{
	to->src = tuple->dst;
	to->dst = tuple->src;
	to->src_port = tuple->dst_port;
	to->dst_port = tuple->src_port;
	to->proto = tuple->proto;
	to->reserved = 0;
}

/*
 * peek returns the len bytes at an offset from the start of the frame, or NULL if the frame is
 * shorter or the offset too large. Bytes outside of the linear part are pulled into it, which
 * invalidates pointers from earlier calls.
 */
static __always_inline void *peek(struct __sk_buff *ctx, __u32 at, __u32 len)
{
	__u64 offset = at;
	void *pos;

	asm volatile("" : "+r"(offset)); /* the verifier needs the bound on this very register */
	if (offset > MAX_OFFSET)
		return NULL;
	pos = (void *)(long)ctx->data + offset;
	if (pos + len <= (void *)(long)ctx->data_end)
		return pos;
	if (bpf_skb_pull_data(ctx, offset + len))
		return NULL;
	pos = (void *)(long)ctx->data + offset;
	return pos + len <= (void *)(long)ctx->data_end ? pos : NULL;
}

#endif
