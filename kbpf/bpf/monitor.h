/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Shows events to the commands that watch them (`kbpf monitor`, `kbpf top`).
 *
 * Each command puts its own ring buffer into `monitor_rings`, and writes into `monitors` which
 * events it wants. It renews a time every second, so one that was killed is soon ignored. Nothing
 * is done for a packet of a known flow. While no command watches, a new connection costs one lookup
 * in an array, which the kernel inlines.
 */
#pragma once

#include "types.h"
#include "maps.h"
#include "lib/compat.h"
#include "lib/token.h"

#define EVERY_MONITOR MONITORS

/* index of a monitor -> until when it watches (ns, CLOCK_MONOTONIC); 0: it does not. EVERY_MONITOR:
 * until when any does. Written by the commands. */
BPF_TABLE("array", u32, u64, monitored_until, MONITORS + 1);

/* index -> what it wants to see. A command writes it when it begins, the programs what they use up
 * and leave out. */
BPF_TABLE("array", u32, struct monitor, monitors, MONITORS);

/* index -> the ring buffer of struct event that this command has made and reads. Full: the event is
 * counted as left out. `monitor_ring` only says what type of map these are. */
BPF_RINGBUF_OUTPUT(monitor_ring, 1);
BPF_ARRAY_OF_MAPS(monitor_rings, "monitor_ring", MONITORS);

static __always_inline bool is_monitored(void)
{
	u32 every = EVERY_MONITOR;
	u64 *until = monitored_until.lookup(&every);

	/* The clock is not read unless a command watches, or has been killed. */
	return until && *until && *until > bpf_ktime_get_ns();
}

static __always_inline void report_to(u32 index, const struct event *event)
{
	u64 *until = monitored_until.lookup(&index);
	struct monitor *monitor = monitors.lookup(&index);
	void *ring = monitor_rings.lookup((int *)&index);

	if (!until || !monitor || !ring || *until <= event->time ||
	    !(monitor->reasons >> (event->reason & 63) & 1))
		return;
	if (!take_token(&monitor->spent, monitor->interval, monitor->burst, event->time) ||
	    ringbuf_output(ring, (void *)event, sizeof(*event)))
		__sync_fetch_and_add(&monitor->left_out, 1);
}

/* Shows an event to all commands that want to see it. To be called if is_monitored(). */
static __always_inline void report(struct event *event)
{
	event->time = bpf_ktime_get_ns();
#pragma clang loop unroll(disable)
	for (u32 index = 0; index < MONITORS; index++)
		report_to(index, event);
}
