/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The few fields of kernel structures that programs read. The loader relocates them for the
 * running kernel (CO-RE).
 */
#ifndef SLUICE_KERNEL_H
#define SLUICE_KERNEL_H

#include <stdbool.h>
#include <linux/in6.h>
#include <linux/types.h>

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct list_head {
	struct list_head *next;
};

struct ns_common {
	unsigned int inum;
};

struct netns_ipv4 {
	int sysctl_ip_prot_sock; /* of IPv6, too */
};

struct net {
	struct ns_common ns;
	struct list_head dev_base_head;
	struct netns_ipv4 ipv4;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct in_ifaddr {
	struct in_ifaddr *ifa_next;
	__be32 ifa_local;
	unsigned char ifa_scope;
};

struct in_device {
	struct in_ifaddr *ifa_list;
};

struct inet6_ifaddr {
	struct in6_addr addr;
	struct list_head if_list;
	__u16 scope;
};

struct inet6_dev {
	struct list_head addr_list;
};

struct rtnl_link_ops {
	const char *kind;
};

struct net_device {
	unsigned int flags;
	struct list_head dev_list;
	struct in_device *ip_ptr;
	struct inet6_dev *ip6_ptr;
	struct {
		struct list_head lower;
	} adj_list;
	const struct rtnl_link_ops *rtnl_link_ops;
	possible_net_t nd_net;
};

struct netdev_adjacent {
	struct net_device *dev;
	struct list_head list;
};

struct kernfs_node {
	const char *name;
	__u64 id;
};

struct cgroup_subsys_state {
	struct cgroup *cgroup;
	struct cgroup_subsys_state *parent;
};

struct cgroup {
	struct cgroup_subsys_state self;
	struct kernfs_node *kn;
};

struct css_set {
	struct cgroup *dfl_cgrp; /* that of version 2 */
};

struct task_struct {
	struct css_set *cgroups;
};

typedef struct {
	__s64 counter;
} atomic64_t;

struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	int skc_bound_dev_if;
	int skc_incoming_cpu;
	possible_net_t skc_net;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
	atomic64_t skc_cookie;
};

struct inode {
	unsigned long i_ino;
};

struct file {
	struct inode *f_inode;
};

struct socket {
	struct file *file;
};

struct sock_cgroup_data {
	struct cgroup *cgroup;
};

typedef struct {
	__u32 val;
} kuid_t;

/* Before Linux 5.16: the address of the cgroup, or, if one of the lowest two bits is set, none. */
struct sock_cgroup_data___val {
	__u64 val;
};

struct sock {
	struct sock_common __sk_common;
	__u16 sk_protocol;
	int sk_err;
	int sk_forward_alloc;
	int sk_reserved_mem; /* from Linux 5.16 on */
	__u8 sk_kern_sock : 1, sk_userlocks : 4;
	kuid_t sk_uid; /* who has made it, as the node's own user namespace sees that */
	struct socket *sk_socket;
	struct sock_cgroup_data sk_cgrp_data;
};

struct tcp_sock {
	__u64 bytes_sent;
	__u64 bytes_retrans;
	__u64 bytes_received;
	__u64 bytes_acked;
	__u32 snd_una;
	__u32 write_seq;
	__u32 total_retrans;
	__u32 srtt_us; /* in eighths */
	bool is_mptcp;
	__u8 repair : 1;
};

struct ipv6_pinfo {
	__s16 hop_limit : 9; /* -1: that of the route; some kernels have no bit field */
	__u8 min_hopcount;
};

struct inet_sock {
	struct ipv6_pinfo *pinet6;
	__s16 uc_ttl; /* -1: the default */
	__u8 min_ttl;
};

struct inet_connection_sock {
	__u32 icsk_rto;
	void *icsk_ulp_data;
};

struct mptcp_subflow_context {
	__u32 request_join : 1;
};

struct ip_ct_tcp {
	__u8 state;
};

union nf_conntrack_proto {
	struct ip_ct_tcp tcp;
};

union nf_inet_addr {
	__u32 all[4]; /* an IPv4 address is the first */
};

union nf_conntrack_man_proto {
	__be16 all;
};

struct nf_conntrack_man {
	union nf_inet_addr u3;
	union nf_conntrack_man_proto u;
};

struct nf_conntrack_tuple {
	struct nf_conntrack_man src;
};

struct nf_conntrack_tuple_hash {
	struct nf_conntrack_tuple tuple;
};

struct nf_conn {
	struct nf_conntrack_tuple_hash tuplehash[2]; /* of the first packet, and of the replies */
	unsigned long status;
	union nf_conntrack_proto proto;
};

struct sk_buff {
	__u8 ip_summed : 2;
};

struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
};

struct bpf_iter__bpf_sk_storage_map {
	struct bpf_iter_meta *meta;
	void *map;
	struct sock *sk;
	void *value;
};

#pragma clang attribute pop

#endif
