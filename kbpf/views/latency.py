# SPDX-License-Identifier: Apache-2.0
"""The latencies of a Service port, as quantiles of its histograms."""

import msgspec

from kbpf.model.metrics import LATENCY_BOUNDS, ServiceLatencies


class LatencyRow(msgspec.Struct, frozen=True):
    """Quantiles of connections of sockets of this node, in milliseconds: at most twice the exact
    value, None without values. `connect`: from the first SYN until the handshake ended.
    `round_trip`: the smoothed time when the connection ended.
    """

    connect_p50_ms: float | None
    connect_p99_ms: float | None
    round_trip_p50_ms: float | None
    round_trip_p99_ms: float | None


def build_latency_row(latencies: ServiceLatencies) -> LatencyRow:
    seconds = [
        latency.quantile(share) for latency in (latencies.connect, latencies.round_trip) for share in (0.5, 0.99)
    ]
    return LatencyRow(*(None if value is None else round(value * 1000, 3) for value in seconds))


def format_milliseconds(time: float | None) -> str:
    """In seconds from 1000 on; "-" if it is not known. Infinity is above all bounds."""
    if time is None:
        return "-"
    if time == float("inf"):
        return f">{LATENCY_BOUNDS[-1]:g}s"
    return f"{time:.3g}ms" if time < 1000 else f"{time / 1000:.3g}s"


def format_latency(row: LatencyRow) -> str:
    """All four quantiles, in words."""
    return (
        f"connect {_format_quantiles(row.connect_p50_ms, row.connect_p99_ms)}; "
        f"round trip {_format_quantiles(row.round_trip_p50_ms, row.round_trip_p99_ms)}"
    )


def _format_quantiles(median: float | None, p99: float | None) -> str:
    if median is None or p99 is None:
        return "-"
    return f"50 % within {format_milliseconds(median)}, 99 % within {format_milliseconds(p99)}"
