/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* SCTP's checksum after its ports have changed.
 *
 * CRC32c covers the whole packet, which a program cannot read; but it is linear: the CRC of what
 * changed, followed by as many zeros as the packet has bytes after it, is the difference. Four
 * bytes at the beginning of `length` bytes make the difference  changed · x^(8 · length)  modulo
 * the polynomial (RFC 9260 appendix A; Mark Adler's crc32_combine() does the same).
 *
 * All values are bit-reflected: the highest bit is the coefficient of x^0.
 */
#pragma once

#define SCTP_CHECK 8
#define CRC32C_POLYNOMIAL 0x82f63b78

/* The lowest bit, for a multiplication. The compiler would make a branch or a mask of it, and there
 * are verifiers that walk both ways of either, at each of some thousand bits. */
static __always_inline u32 lowest_bit(u32 value)
{
	value &= 1;
	asm volatile("" : "+r"(value));
	return value;
}

/* a · b modulo the polynomial. `a` is a constant, of which only the bits that are set cost. No
 * loop, no branch: the verifier walks through this once. */
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

/* Times a power of x, if the lowest bit of `wanted` says so. */
static __always_inline u32 crc_advance(u32 crc, u32 wanted, u32 power)
{
	return crc ^ lowest_bit(wanted) * (crc ^ crc_multiply(power, crc));
}

/* What changing the first four bytes of `length` by `change` does to the checksum. The constants
 * are x^8, x^16, x^32, ... modulo the polynomial: one, two, four, ... bytes. */
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

/* What the ports of this packet change by; 0: nothing, or it is no SCTP. */
static __always_inline u32 sctp_change(const struct packet *p, const struct tuple *new)
{
	struct ports old = {p->tuple.from.port, p->tuple.to.port};
	struct ports now = {new->from.port, new->to.port};

	return p->protocol == IPPROTO_SCTP ? *(u32 *)&old ^ *(u32 *)&now : 0;
}

/* Makes the checksum right for ports that were changed. */
static __always_inline int change_sctp_check(struct __sk_buff *skb, const struct packet *p,
					     u32 change)
{
	u32 check;

	/* It covers the other fragments too, and how long they are nobody knows yet. */
	if (p->fragment != WHOLE || bpf_skb_load_bytes(skb, p->l4 + SCTP_CHECK, &check, 4))
		return -1;
	if (!check) /* CHECKSUM_PARTIAL: whoever fills it in adds up what is there */
		return 0;
	check ^= crc_difference(change, ip_length(skb, p) - (p->l4 - p->l3));
	return bpf_skb_store_bytes(skb, p->l4 + SCTP_CHECK, &check, 4, BPF_F_RECOMPUTE_CSUM);
}
