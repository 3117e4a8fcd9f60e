/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The destinations for which udp_dial.h has no place: two pins, one for each direction, keep the
 * choice while datagrams flow. A hit on one puts the other back, in case the map has evicted it.
 */
#ifndef SLUICE_UDP_PIN_H
#define SLUICE_UDP_PIN_H

#include <stdbool.h>

#include "clock.h"
#include "sock.h"

static __always_inline struct udp_pin_key udp_pin_key(__u64 cookie, const struct addr *a,
						      __be16 port, enum udp_pin_way way)
{
	return (struct udp_pin_key){ .cookie = cookie, .addr = *a, .port = port, .way = way };
}

/* receive_key returns the key of the answers of be to the datagrams of send. */
static __always_inline struct udp_pin_key receive_key(const struct udp_pin_key *send,
						      const struct backend *be)
{
	return udp_pin_key(send->cookie, &be->addr, be->port, UDP_PIN_RECEIVE);
}

/* live_pin returns the pin at key, or NULL if its flow has expired. */
static __always_inline struct udp_pin *live_pin(const struct udp_pin_key *key, __u64 now)
{
	struct udp_pin *pin = bpf_map_lookup_elem(&sl_udp_pins, key);

	return pin && elapsed(now, pin->last_used) < config_udp_idle_ns ? pin : NULL;
}

/* answers_for reports whether the backend of a receiving pin answers for send. */
static __always_inline bool answers_for(const struct udp_pin *receive,
					const struct udp_pin_key *send)
{
	return receive->port == send->port && addr_equal(&receive->addr, &send->addr);
}

/*
 * pick_pinned returns the backend that the flow has, as long as that is in the maps, else NULL: a
 * backend that drains has no slot any more, but keeps its flows.
 */
static __always_inline const struct backend *pick_pinned(const struct pool *pool,
							 const struct udp_pin_key *send, __u64 now)
{
	struct udp_pin *pin = live_pin(send, now);
	const struct backend *be = pin ? pick_id(pool, pin->backend_id) : NULL;

	if (be)
		pin->last_used = now;
	return be;
}

/* is_pinned reports whether the backend answers this socket for another frontend. */
static __always_inline bool is_pinned(const struct udp_pin_key *send, const struct backend *be,
				      __u64 now)
{
	struct udp_pin_key key = receive_key(send, be);
	const struct udp_pin *pin = live_pin(&key, now);

	return pin && !answers_for(pin, send);
}

static __always_inline void pin_send(const struct udp_pin_key *send, __u64 now,
				     const struct backend *be)
{
	struct udp_pin pin = {
		.last_used = now,
		.addr = be->addr,
		.port = be->port,
		.service_port_id = be->service_port_id,
		.backend_id = be->id,
	};

	bpf_map_update_elem(&sl_udp_pins, send, &pin, BPF_ANY);
}

/* pin_receive makes the backend's datagrams appear to come from the original destination. */
static __always_inline void pin_receive(const struct udp_pin_key *send, __u64 now,
					const struct backend *be)
{
	struct udp_pin_key key = receive_key(send, be);
	struct udp_pin *have = bpf_map_lookup_elem(&sl_udp_pins, &key);
	struct udp_pin pin = {
		.last_used = now,
		.addr = send->addr,
		.port = send->port,
		.service_port_id = be->service_port_id,
		.backend_id = be->id,
	};

	if (have && answers_for(have, send)) {
		have->last_used = now;
		return;
	}
	bpf_map_update_elem(&sl_udp_pins, &key, &pin, BPF_ANY);
}

/*
 * pinned_source sets the original destination for which peer answers this socket, and is false if
 * there is none.
 */
static __always_inline bool pinned_source(__u64 cookie, const struct addr *peer, __be16 port,
					  __u64 now, struct addr *original_dst,
					  __be16 *original_port)
{
	struct udp_pin_key key = udp_pin_key(cookie, peer, port, UDP_PIN_RECEIVE);
	struct udp_pin *pin = live_pin(&key, now);

	if (!pin)
		return false;
	pin->last_used = now;
	*original_dst = pin->addr;
	*original_port = pin->port;
	return true;
}

/* unpin_source makes datagrams of peer appear to come from peer again. */
static __always_inline void unpin_source(__u64 cookie, const struct addr *peer, __be16 port)
{
	struct udp_pin_key key = udp_pin_key(cookie, peer, port, UDP_PIN_RECEIVE);

	bpf_map_delete_elem(&sl_udp_pins, &key);
}

#endif
