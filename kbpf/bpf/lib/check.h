/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Check words of values that are read while another CPU may replace them.
 *
 * A program copies such a value and then computes its check word. A copy that mixes an old and a
 * new value has a wrong check word, on every architecture: no memory order has to be assumed. Call
 * check_add(check, word) for each word, starting with 0; layout.py computes the same.
 */
#pragma once

#include "types.h"

#define CHECK_FACTOR 0x9e3779b1 /* odd, so that a change of one word always changes the result */

static __always_inline u32 check_add(u32 check, u32 word)
{
	return (check + word) * CHECK_FACTOR;
}

static __always_inline u32 check_address(u32 check, const struct address *a)
{
	check = check_add(check, a->word[0]);
	check = check_add(check, a->word[1]);
	check = check_add(check, a->word[2]);
	return check_add(check, a->word[3]);
}

/* The check word of an entry of `services`. It covers the key as well, since the kernel may give
 * the memory of a deleted entry to another key at once (Linux v6.1, fba1a1c6c912). */
static __always_inline u32 check_of_service(const struct target *key, const struct service *s)
{
	u32 check = check_address(0, &key->address);

	check = check_add(check, key->port | (u32)key->protocol << 16);
	check = check_add(check, s->id);
	check = check_add(check, s->flags);
	check = check_add(check, s->affinity_timeout);
	check = check_add(check, s->cluster_set);
	check = check_add(check, s->cluster_size);
	check = check_add(check, s->local_set);
	check = check_add(check, s->local_size);
	check = check_add(check, s->cluster_table);
	return check_add(check, s->local_table);
}
