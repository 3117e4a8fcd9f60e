/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The checksum of SCTP, a CRC-32C of the whole packet. A CRC is linear: when some bytes change, it
 * changes by the CRC of the difference alone, which is the difference times x^8 for each byte from
 * there to the end, modulo the polynomial.
 */
#ifndef SLUICE_SCTP_H
#define SLUICE_SCTP_H

#include <linux/types.h>

#define CRC32C 0x82f63b78 /* the polynomial; the highest bit is x^0 */

/* The bits of the length of a packet. */
#define MAX_LENGTH_BITS 16

/*
 * crc_times multiplies two polynomials, modulo CRC32C. It is global because what the verifier
 * knows of the factors would keep it from recognizing equal states in crc_change.
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
 * crc_change returns the change of the checksum of a packet when its first four bytes change by
 * diff, both as they lie in memory. len is the number of bytes from the first of these to the end
 * of the packet.
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
