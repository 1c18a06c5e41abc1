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
#define X_TO_THE_0 0x80000000
#define X_TO_THE_8 0x00800000

static __always_inline u32 crc_multiply(u32 a, u32 b)
{
	u32 product = 0;

#pragma clang loop unroll(disable)
	for (int i = 0; i < 32; i++) {
		product ^= b & -(a >> 31);
		a <<= 1;
		b = (b >> 1) ^ (CRC32C_POLYNOMIAL & -(b & 1));
	}
	return product;
}

/* What changing the first four bytes of `length` by `change` does to the checksum. */
static __always_inline u32 crc_difference(u32 change, u32 length)
{
	u32 power = X_TO_THE_8;

#pragma clang loop unroll(disable)
	for (int bit = 0; bit < 16; bit++) {
		/* No branch, of which the verifier would walk both sides at each bit. */
		u32 mask = -((length >> bit) & 1);

		change = crc_multiply((power & mask) | (X_TO_THE_0 & ~mask), change);
		power = crc_multiply(power, power);
	}
	return change;
}

static __always_inline int change_sctp_ports(struct __sk_buff *skb, const struct packet *p,
					     const struct ports *old, struct ports *new)
{
	u32 check;

	/* The checksum covers the other fragments too, and how long they are nobody knows yet. */
	if (p->fragment != WHOLE || bpf_skb_load_bytes(skb, p->l4 + SCTP_CHECK, &check, 4))
		return -1;
	check ^= crc_difference(*(u32 *)old ^ *(u32 *)new, ip_length(skb, p) - (p->l4 - p->l3));
	return bpf_skb_store_bytes(skb, p->l4, new, sizeof(*new), BPF_F_RECOMPUTE_CSUM) ||
	       bpf_skb_store_bytes(skb, p->l4 + SCTP_CHECK, &check, 4, BPF_F_RECOMPUTE_CSUM);
}
