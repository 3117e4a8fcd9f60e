/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Backends by their ids. service.h tells why what is read is right. */
#ifndef SLUICE_BACKEND_H
#define SLUICE_BACKEND_H

#include "../../maps/maps.h"

/* read_once makes the compiler read a word that the agent may write exactly once. */
static __always_inline __u32 read_once(const __u32 *word)
{
	return *(volatile const __u32 *)word;
}

/* backend_place returns the place of a backend id, which may be another backend's by now. */
static __always_inline const struct backend *backend_place(__u32 id)
{
	__u32 chunk = (id & INDEX_MASK) / CHUNK_BACKENDS;
	__u32 place = (id & INDEX_MASK) % CHUNK_BACKENDS;
	void *places = bpf_map_lookup_elem(&sl_backends, &chunk);

	return places ? bpf_map_lookup_elem(places, &place) : NULL;
}

/* backend_at returns the backend with this id, or NULL if it is gone. */
static __always_inline const struct backend *backend_at(__u32 id)
{
	const struct backend *be = backend_place(id);

	return be && id && read_once(&be->id) == id ? be : NULL;
}

#endif
