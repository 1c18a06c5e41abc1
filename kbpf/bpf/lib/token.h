/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Token buckets. */
#pragma once

/* Takes a token, and moves `spent` forward by `interval`; it may be ahead of the clock by `burst`
 * intervals. CPUs that run this at the same time may take the same token: at most one too many for
 * each CPU. Time only goes forward, so a bucket never holds more than `burst`. */
static __always_inline bool take_token(u64 *spent, u64 interval, u64 burst, u64 now)
{
	u64 from = *spent > now ? *spent : now;

	if (from + interval > now + burst * interval)
		return false;
	*spent = from + interval;
	return true;
}
