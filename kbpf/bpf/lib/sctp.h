/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Updates the SCTP checksum after a change of ports.
 *
 * CRC32c covers the whole packet, which a program cannot read, but it is linear: the difference is
 * the CRC of the changed bytes, followed by as many zero bytes as the packet has behind them. For
 * the first four of `length` bytes, it is  changed · x^(8 · length)  modulo the polynomial (RFC
 * 9260 appendix A; Mark Adler's crc32_combine() does the same).
 *
 * All values are bit-reflected: the highest bit is the coefficient of x^0.
 */
#pragma once

#include "lib/packet.h"

#define SCTP_CHECK 8
#define CRC32C_POLYNOMIAL 0x82f63b78

/* The lowest bit, to multiply with. Without the asm, the compiler would turn the multiplication
 * into a branch or a mask, and some verifiers explore both values for each of some thousand
 * bits. */
static __always_inline u32 lowest_bit(u32 value)
{
	value &= 1;
	asm volatile("" : "+r"(value));
	return value;
}

/* a · b modulo the polynomial. `a` is a constant, and only its set bits cost anything. There is no
 * loop and no branch, so the verifier walks through once. */
static __always_inline u32 crc_multiply(u32 a, u32 b)
{
	u32 product = 0;

#pragma unroll
	for (int i = 0; i < 32; i++) {
		if (a & (0x80000000 >> i))
			product ^= b;
		b = (b >> 1) ^ lowest_bit(b) * CRC32C_POLYNOMIAL;
	}
	return product;
}

/* Multiplies by a power of x if the lowest bit of `bits` is set. */
static __always_inline u32 crc_advance(u32 crc, u32 bits, u32 power)
{
	return crc ^ lowest_bit(bits) * (crc ^ crc_multiply(power, crc));
}

/* The change of the checksum if the first four of `length` bytes change by `change` (XOR). The
 * constants are x^8, x^16, x^32, ... modulo the polynomial, for one, two, four, ... bytes. */
static __always_inline u32 crc_difference(u32 change, u32 length)
{
	change = crc_advance(change, length >> 0, 0x00800000);
	change = crc_advance(change, length >> 1, 0x00008000);
	change = crc_advance(change, length >> 2, 0x82f63b78);
	change = crc_advance(change, length >> 3, 0x6ea2d55c);
	change = crc_advance(change, length >> 4, 0x18b8ea18);
	change = crc_advance(change, length >> 5, 0x510ac59a);
	change = crc_advance(change, length >> 6, 0xb82be955);
	change = crc_advance(change, length >> 7, 0xb8fdb1e7);
	change = crc_advance(change, length >> 8, 0x88e56f72);
	change = crc_advance(change, length >> 9, 0x74c360a4);
	change = crc_advance(change, length >> 10, 0xe4172b16);
	change = crc_advance(change, length >> 11, 0x0d65762a);
	change = crc_advance(change, length >> 12, 0x35d73a62);
	change = crc_advance(change, length >> 13, 0x28461564);
	change = crc_advance(change, length >> 14, 0xbf455269);
	change = crc_advance(change, length >> 15, 0xe2ea32dc);
	return change;
}

/* The XOR of old and new ports; 0: no change, or not SCTP. */
static __always_inline u32 sctp_change(const struct packet *p, const struct tuple *new)
{
	struct ports old = {p->tuple.from.port, p->tuple.to.port};
	struct ports now = {new->from.port, new->to.port};

	return p->protocol == IPPROTO_SCTP ? *(u32 *)&old ^ *(u32 *)&now : 0;
}

/* Updates the checksum after the ports have changed by `change`. */
static __always_inline int change_sctp_check(struct __sk_buff *skb, const struct packet *p,
					     u32 change)
{
	u32 check;

	/* It also covers the other fragments, whose length is not known yet. */
	if (p->fragment != WHOLE || bpf_skb_load_bytes(skb, p->l4 + SCTP_CHECK, &check, 4))
		return -1;
	if (!check) /* CHECKSUM_PARTIAL: it will be computed over the final bytes */
		return 0;
	check ^= crc_difference(change, ip_length(skb, p) - (p->l4 - p->l3));
	return bpf_skb_store_bytes(skb, p->l4 + SCTP_CHECK, &check, 4, BPF_F_RECOMPUTE_CSUM);
}
