/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The checksum of SCTP is a CRC-32C of the whole packet. It is linear: when some
 * bytes change, it changes by the CRC of the difference alone, which is the
 * difference times x^8 for each byte from there to the end, modulo the polynomial.
 */
#ifndef SLUICE_SCTP_H
#define SLUICE_SCTP_H

#include <linux/types.h>

#define CRC32C 0x82f63b78 /* the polynomial; the highest bit is x^0 */

/* Bytes in a packet, in bits. */
#define MAX_LENGTH_BITS 16

/*
 * crc_times multiplies two polynomials, modulo CRC32C. It is not static: what the
 * verifier knew of the factors would only keep it from seeing that all ways
 * through crc_change are alike.
 */
__noinline __u32 crc_times(__u32 a, __u32 b)
{
	__u32 product = 0;
	int i;

	for (i = 0; i < 32; i++) {
		product ^= b & -(a >> 31);
		a <<= 1;
		b = (b >> 1) ^ (CRC32C & -(b & 1));
	}
	return product;
}

/*
 * crc_change returns by how much the checksum of a packet changes if its first
 * four bytes change by diff: both as they lie in memory. len is from the first of
 * these bytes to the end of the packet.
 */
static __noinline __u32 crc_change(__u32 diff, __u32 len)
{
	__u32 power = 0x00800000; /* x^8 */
	int i;

	for (i = 0; i < MAX_LENGTH_BITS; i++) {
		if (len & 1)
			diff = crc_times(diff, power);
		power = crc_times(power, power);
		len >>= 1;
	}
	return diff;
}

#endif
