/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What socket programs leave alone, so that the packets carry the original destination as far as
 * the device of the pod, where it is translated. A proxy in the pod that redirects connections
 * sees the Service (SO_ORIGINAL_DST).
 */
#ifndef SLUICE_OPT_OUT_H
#define SLUICE_OPT_OUT_H

#include <stdbool.h>
#include <asm/socket.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/types.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "kernel.h"
#include "netns.h"
#include "sock.h"

/* Pods can opt out, which costs each new flow of a pod to a Service a look at its cgroup. */
volatile const bool config_pod_opt_out = false;

/* How far above its own cgroup the pods of a process are looked for. */
#define MAX_CGROUPS 64

/* What the name of a pod's cgroup ends with; ".slice" follows if systemd has made the cgroup. */
struct pod_name {
	char pod[3]; /* "pod" */
	struct pod_uid uid;
};

#define SLICE ".slice"
#define SLICE_LEN (sizeof(SLICE) - 1)

/* The kubelet's names have 73 characters at most, if it has no --cgroup-root. */
#define MAX_PIECES 3

/*
 * read_pod_name sets pod to the end of a cgroup's name, and reports whether that is the name of a
 * pod. It measures the name piece by piece, because the stack has no room for all of it.
 */
static __always_inline bool read_pod_name(const struct cgroup *cg, struct pod_name *pod)
{
	const char *name = BPF_CORE_READ(cg, kn, name);
	char end[SLICE_LEN] = {};
	long len = 0, piece;
	int i;

	for (i = 0; i < MAX_PIECES; i++) {
		piece = bpf_probe_read_kernel_str(pod, sizeof(*pod), name + len) - 1;
		if (piece < 0)
			return false;
		len += piece;
		if (piece < (long)sizeof(*pod) - 1)
			break;
	}
	if (len < (long)sizeof(*pod))
		return false;
	bpf_probe_read_kernel(end, sizeof(end), name + len - SLICE_LEN);
	if (!__builtin_memcmp(end, SLICE, SLICE_LEN))
		len -= SLICE_LEN;
	if (len < (long)sizeof(*pod))
		return false;
	bpf_probe_read_kernel(pod, sizeof(*pod), name + len - sizeof(*pod));
	return pod->pod[0] == 'p' && pod->pod[1] == 'o' && pod->pod[2] == 'd';
}

/*
 * is_opted_out reports whether a cgroup is that of a pod that has opted out. It is global, so that
 * the verifier walks it once: the address of the cgroup is a number.
 */
__noinline int is_opted_out(__u64 cgroup)
{
	struct pod_name pod = {};

	return read_pod_name((const struct cgroup *)cgroup, &pod) &&
	       bpf_map_lookup_elem(&sl_opted_out, &pod.uid);
}

/*
 * is_pod_opted_out reports whether the calling process is in the cgroup of a pod that has opted
 * out, or below it: a pod of a cluster in a pod has the names of both.
 */
__noinline int is_pod_opted_out(void)
{
	const struct task_struct *task = (void *)bpf_get_current_task();
	const struct cgroup *cg = BPF_CORE_READ(task, cgroups, dfl_cgrp);
	int i;

	for (i = 0; i < MAX_CGROUPS && cg; i++) {
		if (is_opted_out((__u64)cg))
			return true;
		cg = BPF_CORE_READ(cg, self.parent, cgroup);
	}
	return false;
}

/*
 * has_opted_out is is_pod_opted_out, which costs something for each name, once in a while for a
 * cgroup.
 */
static __always_inline bool has_opted_out(void)
{
	__u64 h = ~bpf_get_current_cgroup_id() * 0x9e3779b97f4a7c15;

	if (is_known(h))
		return false;
	if (is_pod_opted_out())
		return true;
	note_known(h);
	return false;
}

/*
 * is_left_to_node reports whether the destination is a ClusterIP that this node has as an address.
 * It is served here, on those ports on which a socket of the node is bound to it (NodeLocal
 * DNSCache). For a socket in a pod, the pod's device finds out which they are.
 */
static __always_inline bool is_left_to_node(struct bpf_sock_addr *ctx, bool v6)
{
	struct frontend_key original_dst = frontend_key_of(ctx, v6);

	if (!is_nodes_cluster_ip(&original_dst))
		return false;
	return !is_host_netns(ctx) ||
	       is_served_here(ctx, &original_dst.addr, original_dst.port, original_dst.proto);
}

/* is_left_to_node as global functions, which the verifier walks once. */

__noinline int is_left_to_node_v4(struct bpf_sock_addr *ctx)
{
	return is_left_to_node(ctx, false);
}

__noinline int is_left_to_node_v6(struct bpf_sock_addr *ctx)
{
	return is_left_to_node(ctx, true);
}

/*
 * is_admitted_by_device reports whether the program at the pod's device decides whether the source
 * ranges of a service port admit a socket of a pod. Its address here shows only who is refused: the
 * pod may send by another one of its own, or masquerade. Where no device sees the packets, its
 * address decides.
 */
static __always_inline bool is_admitted_by_device(struct bpf_sock_addr *ctx, bool v6,
						  __u32 service_port_id)
{
	struct addr dst = hook_addr(ctx, v6), source;
	enum source known;

	if (find_in_netns(ctx, &dst) & LEADS_PAST_DEVICE)
		return false;
	known = source_of(ctx, v6, &dst, &source);
	return known == SOURCE_FIRST ||
	       (known == SOURCE_ONLY && is_in_ranges_of(service_port_id, &source));
}

/* is_admitted_by_device as global functions, which the verifier walks once. */

__noinline int is_admitted_by_device_v4(struct bpf_sock_addr *ctx, __u32 service_port_id)
{
	return is_admitted_by_device(ctx, false, service_port_id);
}

__noinline int is_admitted_by_device_v6(struct bpf_sock_addr *ctx, __u32 service_port_id)
{
	return is_admitted_by_device(ctx, true, service_port_id);
}

/* is_left_to_others is is_left_alone without source ranges. */
static __always_inline bool is_left_to_others(struct bpf_sock_addr *ctx, bool v6,
					      const struct frontend_key *original_dst,
					      const struct pool *pool)
{
	if (!is_host_netns(ctx)) {
		if (pool->flags & POOL_OPTED_OUT || is_left_to_pod(ctx, &original_dst->addr))
			return true;
		if (config_pod_opt_out && has_opted_out())
			return true;
	}
	if (!may_be_nodes(addr_hash(&original_dst->addr)))
		return false;
	return v6 ? is_left_to_node_v6(ctx) : is_left_to_node_v4(ctx);
}

/*
 * is_left_to_others as functions of their own, because Linux 5.10 admits 512 bytes for the stacks
 * of a chain of calls, and counts each as whole 32. A program must have no function of the other
 * family: it would read addresses that the hook does not have.
 */

static __noinline bool is_left_to_others_v4(struct bpf_sock_addr *ctx,
					    const struct frontend_key *original_dst,
					    const struct pool *pool)
{
	return is_left_to_others(ctx, false, original_dst, pool);
}

static __noinline bool is_left_to_others_v6(struct bpf_sock_addr *ctx,
					    const struct frontend_key *original_dst,
					    const struct pool *pool)
{
	return is_left_to_others(ctx, true, original_dst, pool);
}

/*
 * is_left_alone reports whether a socket must not be translated, although its destination is an
 * address of Services. The node's own sockets are translated here or nowhere: no device translates
 * what they send. pool is that of the destination, or empty.
 */
static __always_inline bool is_left_alone(struct bpf_sock_addr *ctx, bool v6,
					  const struct frontend_key *original_dst,
					  const struct pool *pool)
{
	if (v6 ? is_left_to_others_v6(ctx, original_dst, pool) :
		 is_left_to_others_v4(ctx, original_dst, pool))
		return true;
	if (is_host_netns(ctx) || !(pool->flags & POOL_SOURCE_RANGES))
		return false;
	return v6 ? is_admitted_by_device_v6(ctx, pool->service_port_id) :
		    is_admitted_by_device_v4(ctx, pool->service_port_id);
}

/*
 * The mark of a socket of the agent that is left alone while it connects. The first packets to an
 * address that is no Service's carry it, so it has none of the bits by which others match: 0x2000,
 * 0x4000 and 0x8000 (host ports of CNI, kube-proxy, kubelet), 0x80 (VPC CNI of AWS), 0xf00 (Cilium),
 * 0xffff0000 (Calico), and the lowest, by which people mark first.
 */
enum agent_mark {
	AGENT_MARK = 0x1050,
};

/*
 * is_agents_own reports whether a TCP socket is a connection of this node's agent to the API server
 * that must not depend on what is programmed, and takes its mark off.
 */
static __always_inline bool is_agents_own(struct bpf_sock_addr *ctx)
{
	int none = 0;

	if (ctx->protocol != IPPROTO_TCP || ctx->sk->mark != AGENT_MARK || !is_host_netns(ctx))
		return false;
	bpf_setsockopt(ctx, SOL_SOCKET, SO_MARK, &none, sizeof(none));
	return true;
}

#endif
