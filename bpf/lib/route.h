/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Routes: how a packet leaves the node, with or without the stack. */
#ifndef SLUICE_ROUTE_H
#define SLUICE_ROUTE_H

#include <stdbool.h>
#include <stddef.h>
#include <linux/udp.h>

#include "headers.h"

/* The route by which the node would send a packet, and the source address that it would use. */

#ifndef BPF_FIB_LOOKUP_SRC
#define BPF_FIB_LOOKUP_SRC (1U << 4)
#endif

#define AF_INET 2
#define AF_INET6 10

struct route {
	__u32 ifindex; /* of the device by which the packet leaves */
	bool neighbour; /* mac is that of the next hop */
	bool gateway; /* the next hop is another address than the destination */
	__u8 mac[ETH_ALEN];
	struct addr source; /* the address of this node on that route, or unspecified */
};

static __always_inline bool is_link_local(const struct addr *a)
{
	if (addr_is_v4(a))
		return (a->words[3] & bpf_htonl(0xffff0000)) == bpf_htonl(0xa9fe0000);
	return (a->words[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000);
}

static __always_inline void set_fib_addrs(struct bpf_fib_lookup *fib, const struct addr *src,
					  const struct addr *dst)
{
	if (addr_is_v4(dst)) {
		fib->family = AF_INET;
		fib->ipv4_src = src->words[3];
		fib->ipv4_dst = dst->words[3];
	} else {
		fib->family = AF_INET6;
		__builtin_memcpy(fib->ipv6_src, src, sizeof(*src));
		__builtin_memcpy(fib->ipv6_dst, dst, sizeof(*dst));
	}
}

/*
 * device_source sets source to the address that this node uses on a device, if the device is
 * known.
 */
static __always_inline void device_source(__u32 ifindex, bool v4, struct addr *source)
{
	const struct device *dev = bpf_map_lookup_elem(&sl_devices, &ifindex);

	if (dev)
		*source = v4 ? dev->source_v4 : dev->source_v6;
}

/*
 * device_in returns the device on which the stack sees a packet arrive: the bridge, not its port.
 */
static __always_inline __u32 device_in(struct __sk_buff *ctx)
{
	__u32 ifindex = ctx->ifindex;
	const struct device *dev;

	if (!config_bridge_port)
		return ifindex;
	dev = bpf_map_lookup_elem(&sl_devices, &ifindex);
	return dev && dev->bridge ? dev->bridge : ifindex;
}

/*
 * find_route_as looks up the route from src to dst, and is false if there is none, or if dst is this
 * node. flags: 0, or BPF_FIB_LOOKUP_OUTPUT for a route by the device at hand.
 */
static __noinline bool find_route_as(struct __sk_buff *ctx, const struct addr *src,
				     const struct addr *dst, struct route *to, __u32 flags)
{
	/* One byte: the stack handles packets that are longer than the MTU of the route. */
	struct bpf_fib_lookup fib = { .ifindex = device_in(ctx), .tot_len = 1 };
	bool v4 = addr_is_v4(dst);
	long found;

	set_fib_addrs(&fib, src, dst);
	found = bpf_fib_lookup(ctx, &fib, sizeof(fib),
			       flags | (config_fib_source ? BPF_FIB_LOOKUP_SRC : 0));
	if (found == BPF_FIB_LKUP_RET_UNSUPP_LWT || found == BPF_FIB_LKUP_RET_FWD_DISABLED) {
		/* There is a route, but the kernel does not return it. */
		*to = (struct route){};
		device_source(device_in(ctx), v4, &to->source);
		return true;
	}
	if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return false;

	to->ifindex = fib.ifindex;
	to->neighbour = found == BPF_FIB_LKUP_RET_SUCCESS;
	to->gateway = v4 ? fib.family != AF_INET || fib.ipv4_dst != dst->words[3] :
			   __builtin_memcmp(fib.ipv6_dst, dst, sizeof(*dst)) != 0;
	__builtin_memcpy(to->mac, fib.dmac, sizeof(to->mac));
	if (!config_fib_source)
		to->source = addr_any(dst);
	else if (v4)
		to->source = addr_of_v4(fib.ipv4_src);
	else
		__builtin_memcpy(&to->source, fib.ipv6_src, sizeof(to->source));
	if (addr_is_any(&to->source) || is_link_local(&to->source))
		device_source(to->ifindex, v4, &to->source);
	return true;
}

/* find_route is find_route_as for what arrives by the device at hand. */
static __always_inline bool find_route(struct __sk_buff *ctx, const struct addr *src,
				       const struct addr *dst, struct route *to)
{
	return find_route_as(ctx, src, dst, to, 0);
}

/*
 * source_here sets source to the address of this node for what leaves from src to dst by the device at hand. It
 * stays unspecified if there is none.
 */
static __always_inline void source_here(struct __sk_buff *ctx, const struct addr *src,
					const struct addr *dst, struct addr *source)
{
	struct route way;

	if (find_route_as(ctx, src, dst, &way, BPF_FIB_LOOKUP_OUTPUT) &&
	    way.ifindex == device_in(ctx))
		*source = way.source;
	else
		device_source(device_in(ctx), addr_is_v4(dst), source);
}

/* leads_out reports whether a device leads to other hosts only. */
static __always_inline bool leads_out(__u32 ifindex)
{
	const struct device *dev = bpf_map_lookup_elem(&sl_devices, &ifindex);

	return dev && dev->flags & DEVICE_LEADS_OUT;
}

/* is_unseen reports whether what leaves by a device, which does not lead out, passes no program there. */
static __always_inline bool is_unseen(__u32 ifindex)
{
	const struct device *dev = bpf_map_lookup_elem(&sl_devices, &ifindex);

	return dev && dev->flags & DEVICE_UNSEEN;
}

/*
 * encrypts reports whether the stack has policies of IPsec. It has applied them to a packet at egress as it has routed
 * that: one that leaves by another route, or to another backend, may have to be encrypted, or not to leave. Datagrams of a process of this node to a
 * Service's address, of a socket that has connected before there was a backend, leave by the route to the backend without
 * that: the policies were applied to the Service's address.
 */
static __always_inline bool encrypts(struct __sk_buff *ctx)
{
	__u32 ifindex = ctx->ifindex;
	const struct device *dev = bpf_map_lookup_elem(&sl_devices, &ifindex);

	return dev && dev->flags & DEVICE_ENCRYPTS;
}

/*
 * is_here reports whether a backend that is said to be on this node is: no route leads out to it.
 */
static __always_inline bool is_here(struct __sk_buff *ctx, const struct backend *be,
				    const struct addr *client)
{
	struct route way;

	return be->flags & BACKEND_LOCAL &&
	       !(find_route(ctx, client, &be->addr, &way) && leads_out(way.ifindex));
}

/* pkt->back, if no route leads to the client. */
#define NO_DEVICE (~0U)

/* find_back finds the route by which the node sends what comes from an address to a client. */
static __always_inline void find_back(struct __sk_buff *ctx, struct packet *pkt,
				      const struct addr *from, const struct addr *client)
{
	struct route back;
	bool found = find_route(ctx, from, client, &back);

	pkt->back = found ? back.ifindex : NO_DEVICE;
	pkt->by_gateway = found && back.gateway;
}

/*
 * is_behind_device reports whether the source of a first packet is behind the device by which the packet has
 * come: after find_back, answers would leave by that device. Several uplinks may lead to the same hosts, and
 * a CNI may route to all of its pods by one device, from which packets go on to the devices of the pods: as behind
 * a bridge, routes do not tell such pods apart. A route that the kernel does not return may be the right one. Any
 * other source may belong to another host than the sender: see FLOW_OF_NODE in flow_types.h.
 */
static __always_inline bool is_behind_device(struct __sk_buff *ctx, const struct packet *pkt)
{
	return !pkt->back || pkt->back == device_in(ctx) ||
	       (config_device_class == DEVICE_UPLINK ? leads_out(pkt->back) : is_unseen(pkt->back));
}

/*
 * is_client_here reports whether the client of the flow of the packet at a hook is behind the device at hand, which the
 * route from the flow's backend shows, as it did when the flow began. It is global, so that the verifier walks it once.
 */
__noinline int is_client_here(struct __sk_buff *ctx, __u32 hook)
{
	struct packet *pkt = packet_at(hook);

	if (!pkt)
		return false;
	find_back(ctx, pkt, &pkt->flow.backend, &pkt->flow.client);
	return pkt->back && is_behind_device(ctx, pkt);
}

/*
 * is_pod reports whether the client at the device at hand is a pod of this node, to which all nodes
 * send what is for it by way of this one: after find_back. What a pod forwards for others, as a gateway of
 * a VPN does, comes from an address to which that pod is the gateway, or the way of which is another one.
 */
static __always_inline bool is_pod(struct __sk_buff *ctx, const struct packet *pkt)
{
	if (config_device_class != DEVICE_PODS || pkt->back == NO_DEVICE)
		return false;
	return !leads_out(pkt->back) && !(pkt->by_gateway && pkt->back == device_in(ctx));
}

/*
 * Turning packets around at the device on which they arrive. A packet of a client outside to a
 * backend on another node passes this node only to be masqueraded: that happens at ingress, and
 * the packet leaves by the device of its route. Answers are turned around in the same way. The
 * stack sees neither, and the flow needs no entries at egress.
 *
 * A packet that the stack has to see goes there with the backend's address, and its flow stays in
 * the stack from then on. That is decided for each packet before it is written, because the stack
 * drops packets from an address of this node.
 */

#define MIN_HOPS 2 /* this node takes one */

/*
 * is_plain reports whether a router would only look at the addresses and the hop limit of a
 * packet. Fragments, options and invalid packets are for the stack.
 */
static __always_inline bool is_plain(struct __sk_buff *ctx, const struct headers *ip)
{
	const struct ipv6hdr *v6;
	const struct iphdr *v4;

	/* bpf_redirect_neigh requires an untagged Ethernet frame that is addressed to this node. */
	if (ctx->vlan_present || ctx->pkt_type != PACKET_HOST || ip->l3 != ETH_HLEN || ip->fragment)
		return false;
	if (ip->v6) {
		v6 = peek(ctx, ip->l3, sizeof(*v6));
		return v6 && ip->l4 == ip->l3 + sizeof(*v6) && v6->hop_limit >= MIN_HOPS;
	}
	v4 = peek(ctx, ip->l3, sizeof(*v4));
	return v4 && ip->l4 == ip->l3 + sizeof(*v4) && v4->ttl >= MIN_HOPS;
}

/*
 * length_of returns the length of the IP packet on the wire, or that of each segment if it will be
 * segmented; 0 if it is too long to be turned around.
 */
static __always_inline __u16 length_of(struct __sk_buff *ctx, const struct headers *ip)
{
	const struct tcp_header *tcp;
	__u32 length = ip->end - ip->l3;

	if (ctx->gso_size) {
		length = ip->l4 - ip->l3 + sizeof(struct udphdr) + ctx->gso_size;
		if (ip->key.proto == IPPROTO_TCP) {
			tcp = peek(ctx, ip->l4, sizeof(*tcp));
			if (!tcp)
				return 0;
			length += (tcp->length >> 4) * 4 - sizeof(struct udphdr);
		}
	}
	return length <= 0xffff ? length : 0;
}

/* may_be_cut reports whether a router may fragment a packet. */
static __always_inline bool may_be_cut(struct __sk_buff *ctx, const struct headers *ip)
{
	const struct iphdr *v4 = ip->v6 ? NULL : peek(ctx, ip->l3, sizeof(*v4));

	return v4 && !(v4->frag_off & V4_DONT_FRAGMENT);
}

/*
 * find_turn finds the route of a packet to pkt->to.dst that bypasses the stack, as the stack would
 * send it. It is false if there is none, and sets pkt->mtu if the packet is too long for the
 * route. See DEVICE_TURNS.
 */
static __noinline bool find_turn(struct __sk_buff *ctx, struct packet *pkt)
{
	struct bpf_fib_lookup fib = { .ifindex = ctx->ifindex };
	const struct device *dev;
	__u32 out;
	long found;

	if (config_device_class != DEVICE_UPLINK || config_bridge_port || !is_plain(ctx, &pkt->ip))
		return false;
	fib.tot_len = length_of(ctx, &pkt->ip);
	if (!fib.tot_len)
		return false;
	set_fib_addrs(&fib, &pkt->ip.key.src, &pkt->to.dst);
	found = bpf_fib_lookup(ctx, &fib, sizeof(fib), 0);
	if (found == BPF_FIB_LKUP_RET_FRAG_NEEDED && !pkt->is_error && !may_be_cut(ctx, &pkt->ip))
		pkt->mtu = fib.mtu_result;
	/*
	 * Without the Ethernet address of the next hop, the stack asks for it, and tells the sender if
	 * there is no answer.
	 */
	if (found != BPF_FIB_LKUP_RET_SUCCESS)
		return false;
	out = fib.ifindex;
	dev = bpf_map_lookup_elem(&sl_devices, &out);
	if (!dev || !(dev->flags & DEVICE_TURNS))
		return false;
	pkt->out = out;
	pkt->next.nh_family = fib.family;
	__builtin_memcpy(pkt->next.ipv6_nh, fib.ipv6_dst, sizeof(pkt->next.ipv6_nh));
	pkt->turns = true;
	return true;
}

/*
 * try_turn reports whether the flow of a new packet to a remote backend may be turned around. Its
 * answers have to leave by the device on which the client came: after find_back.
 */
static __always_inline bool try_turn(struct __sk_buff *ctx, struct packet *pkt,
				     const struct backend *be)
{
	if (be->flags & BACKEND_LOCAL)
		return false;
	pkt->to.dst = be->addr;
	if (pkt->back == ctx->ifindex && find_turn(ctx, pkt))
		return true;
	pkt->mtu = 0; /* the stack sends the error */
	return false;
}

/*
 * Pods behind a bridge. A packet to a Service goes to the node, which is their router, but the
 * reply of a backend behind the same bridge goes directly to the client. Netfilter would see only
 * one direction, and treat the third packet as INVALID. So the first packet is sent to the backend
 * directly, too.
 */

/*
 * is_behind reports whether the route from src to dst leaves by this device. way->mac is the next
 * hop on it.
 */
static __always_inline bool is_behind(struct __sk_buff *ctx, __u32 device, const struct addr *src,
				      const struct addr *dst, struct route *way)
{
	return find_route(ctx, src, dst, way) && way->ifindex == device;
}

/*
 * is_beside reports whether the destination of a frame is behind the bridge of the port at hand: the
 * sender addresses it to that, and not to the node.
 */
static __always_inline bool is_beside(struct __sk_buff *ctx, const struct flow_key *came)
{
	__u32 port = ctx->ifindex;
	const struct device *dev = bpf_map_lookup_elem(&sl_devices, &port);
	struct route way;

	return dev && dev->bridge && is_behind(ctx, dev->bridge, &came->src, &came->dst, &way);
}

/*
 * bypass_node addresses the frame to the backend itself if client and backend are behind the bridge
 * of this device. It is false if the frame could not be written. It is global, so that the verifier
 * walks it once. The lookup does not count as a use of the neighbour, so the agent has the kernel
 * confirm it from time to time: see ConfirmNeighbours in pkg/node.
 */
__noinline int bypass_node(struct __sk_buff *ctx)
{
	const struct packet *pkt = packet_at(HOOK_INGRESS);
	const struct flow_key *to;
	__u32 port = ctx->ifindex;
	const struct device *dev;
	struct route way;
	__u32 bridge;

	if (!config_ethernet || config_device_class != DEVICE_PODS || !pkt ||
	    addr_equal(&pkt->to.src, &pkt->to.dst))
		return true;
	to = &pkt->to;
	dev = bpf_map_lookup_elem(&sl_devices, &port);
	bridge = dev ? dev->bridge : 0;
	if (!bridge || !is_behind(ctx, bridge, &to->dst, &to->src, &way) ||
	    !is_behind(ctx, bridge, &to->src, &to->dst, &way) || !way.neighbour)
		return true;
	return !bpf_skb_store_bytes(ctx, 0, way.mac, sizeof(way.mac), 0);
}

/*
 * Sending replies by the device on which the client came. Where addresses have routes of their own
 * (rules "from ADDRESS lookup TABLE"), the stack routes a reply by the backend's address, and the
 * network behind that device may drop it, because its source will be the original destination. The
 * node's own reply from the original destination would leave by the device on which the client
 * came; otherwise the flow would not have FLOW_RETURNS.
 */

/*
 * is_routed_again reports whether the packet at egress needs another route than that of the stack:
 * a reply that has to be routed from the original destination, or a packet of a process of this
 * node that goes to another backend than the one dialled.
 */
static __always_inline bool is_routed_again(const struct packet *pkt)
{
	if (pkt->role == FLOW_FROM_CLIENT)
		return pkt->to.dst_port != pkt->ip.key.dst_port ||
		       !addr_equal(&pkt->to.dst, &pkt->ip.key.dst);
	return pkt->role == FLOW_TO_CLIENT && pkt->flags & FLOW_RETURNS;
}

/*
 * route_again sends the packet at egress out by its route. A reply passes if that leaves by the
 * device at hand: the stack knows the next hop. It is global, so that the verifier walks it once.
 */
__noinline int route_again(struct __sk_buff *ctx)
{
	struct bpf_fib_lookup fib = { .ifindex = device_in(ctx) };
	const struct packet *pkt = packet_at(HOOK_EGRESS);
	struct bpf_redir_neigh next = {};
	long found;

	if (!pkt)
		return VERDICT_NEXT;
	/* The connection of a process was re-steered before there was a policy. */
	if ((pkt->role == FLOW_TO_CLIENT || pkt->ip.key.proto == IPPROTO_TCP) && encrypts(ctx))
		return pkt->role == FLOW_TO_CLIENT ? VERDICT_NEXT : VERDICT_DROP;
	/* Its masquerade is the address of the device by which its process would reach the backend. */
	set_fib_addrs(&fib, pkt->role == FLOW_FROM_CLIENT ? &pkt->ip.key.src : &pkt->to.src,
		      &pkt->to.dst);
	found = bpf_fib_lookup(ctx, &fib, sizeof(fib), 0);
	if ((found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH) ||
	    (fib.ifindex == device_in(ctx) && pkt->role == FLOW_TO_CLIENT))
		return VERDICT_NEXT;
	/*
	 * A packet that waits for its neighbour would be sent to the one of the route that the stack has chosen: so the
	 * kernel has to look up a route by the other device.
	 */
	if (found == BPF_FIB_LKUP_RET_NO_NEIGH)
		return bpf_redirect_neigh(fib.ifindex, NULL, 0, 0);
	next.nh_family = fib.family;
	__builtin_memcpy(next.ipv6_nh, fib.ipv6_dst, sizeof(next.ipv6_nh));
	return bpf_redirect_neigh(fib.ifindex, &next, sizeof(next), 0);
}

#endif
