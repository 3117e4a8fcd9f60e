/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Datagrams of one socket to one frontend stay together: two pins, one for
 * each way, keep the choice while datagrams flow. A hit on one brings back the
 * other, should the map have evicted it.
 */
#ifndef SLUICE_UDP_PIN_H
#define SLUICE_UDP_PIN_H

#include <stdbool.h>

#include "../../maps/maps.h"
#include "addr.h"
#include "backend.h"
#include "config.h"

static __always_inline struct udp_pin_key udp_pin_key(__u64 cookie, const struct addr *a,
						      __be16 port, enum udp_pin_way way)
{
	return (struct udp_pin_key){ .cookie = cookie, .addr = *a, .port = port, .way = way };
}

/* receive_key is the key of the way back, when send is answered by to. */
static __always_inline struct udp_pin_key receive_key(const struct udp_pin_key *send,
						      const struct choice *to)
{
	return udp_pin_key(send->cookie, &to->be.addr, to->be.port, UDP_PIN_RECEIVE);
}

/* live_pin returns the pin at key, or NULL if its flow has ended. */
static __always_inline struct udp_pin *live_pin(const struct udp_pin_key *key, __u64 now)
{
	struct udp_pin *pin = bpf_map_lookup_elem(&sl_udp_pins, key);

	return pin && now - pin->last_used < config_udp_idle_ns ? pin : NULL;
}

/* answers_for says that the backend of a receiving pin answers for send. */
static __always_inline bool answers_for(const struct udp_pin *receive,
					const struct udp_pin_key *send)
{
	return receive->port == send->port && addr_equal(&receive->addr, &send->addr);
}

/*
 * pick_pinned chooses the backend that the flow has, as long as it lives: one
 * that drains has no slot any more, but keeps its flows.
 */
static __always_inline bool pick_pinned(const struct frontend *fe, const struct udp_pin_key *send,
					__u64 now, struct choice *to)
{
	struct udp_pin *pin = live_pin(send, now);

	if (!pin || !pick_id(fe, pin->backend_id, to))
		return false;

	pin->last_used = now;
	return true;
}

/* is_taken says that the backend answers this socket for another frontend. */
static __always_inline bool is_taken(const struct udp_pin_key *send, const struct choice *to,
				     __u64 now)
{
	struct udp_pin_key key = receive_key(send, to);
	const struct udp_pin *pin = live_pin(&key, now);

	return pin && !answers_for(pin, send);
}

/*
 * pick_free chooses another backend of fe if the chosen one is taken: its
 * answers could come from either frontend. If all that we look at are, the
 * choice stays, and answers come from the frontend that was dialled last.
 */
static __always_inline void pick_free(const struct frontend *fe, const struct udp_pin_key *send,
				      __u64 now, struct choice *to)
{
	struct choice other;
	__u32 first, try;

	if (!is_taken(send, to, now))
		return;
	first = random_below(fe->slot_count);
	for (try = 0; try < MAX_PICKS; try++) {
		if (!pick_slot(fe, first, try, &other) || is_taken(send, &other, now))
			continue;
		*to = other;
		return;
	}
}

static __always_inline void pin_send(const struct frontend *fe, const struct udp_pin_key *send,
				     __u64 now, const struct choice *to)
{
	struct udp_pin pin = {
		.last_used = now,
		.addr = to->be.addr,
		.port = to->be.port,
		.frontend_id = fe->id,
		.backend_id = to->id,
	};

	bpf_map_update_elem(&sl_udp_pins, send, &pin, BPF_ANY);
}

/* pin_receive makes the backend's datagrams come from what was dialled. */
static __always_inline void pin_receive(const struct frontend *fe, const struct udp_pin_key *send,
					__u64 now, const struct choice *to)
{
	struct udp_pin_key key = receive_key(send, to);
	struct udp_pin *have = bpf_map_lookup_elem(&sl_udp_pins, &key);
	struct udp_pin pin = {
		.last_used = now,
		.addr = send->addr,
		.port = send->port,
		.frontend_id = fe->id,
		.backend_id = to->id,
	};

	if (have && answers_for(have, send)) {
		have->last_used = now;
		return;
	}
	bpf_map_update_elem(&sl_udp_pins, &key, &pin, BPF_ANY);
}

/* pinned_source gives the frontend that peer answers for, on this socket. */
static __always_inline bool pinned_source(__u64 cookie, const struct addr *peer, __be16 port,
					  __u64 now, struct addr *dialled, __be16 *dialled_port)
{
	struct udp_pin_key key = udp_pin_key(cookie, peer, port, UDP_PIN_RECEIVE);
	struct udp_pin *pin = live_pin(&key, now);

	if (!pin)
		return false;
	pin->last_used = now;
	*dialled = pin->addr;
	*dialled_port = pin->port;
	return true;
}

/* unpin_source lets datagrams of peer come from peer again. */
static __always_inline void unpin_source(__u64 cookie, const struct addr *peer, __be16 port)
{
	struct udp_pin_key key = udp_pin_key(cookie, peer, port, UDP_PIN_RECEIVE);

	bpf_map_delete_elem(&sl_udp_pins, &key);
}

/* unpin removes the pins of the last frontend that a closing socket used. */
static __always_inline void unpin(__u64 cookie, const struct sock_state *last)
{
	struct udp_pin_key send =
		udp_pin_key(cookie, &last->dialled, last->dialled_port, UDP_PIN_SEND);

	bpf_map_delete_elem(&sl_udp_pins, &send);
	unpin_source(cookie, &last->backend, last->backend_port);
}

#endif
