# SPDX-License-Identifier: Apache-2.0
"""Formats metrics in the Prometheus text format, version 0.0.4.

prometheus_client is not used because its registry holds an object for every series and formats the
labels again on every scrape. With 10,000 Services that alone costs more than a scrape may cost
(figures: docs/observe.md). Here labels are formatted once, and a page is a join of lines.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def format_labels(**values: str) -> str:
    """Formats labels as ``{name="value",...}``, in the given order; "" if there are none."""
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in values.items())
    return f"{{{pairs}}}" if pairs else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def format_number(value: float) -> str:
    """Formats a number as Go does: integers without a decimal point."""
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def format_metric(
    name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]
) -> Iterator[str]:
    """Yields the lines of a counter or gauge. Each sample is (labels from format_labels(),
    value).
    """
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for label_set, value in samples:
        yield f"{name}{label_set} {format_number(value)}"


class Histogram:
    """Counts observations by upper bound. The bounds have the unit of the observations. Not
    thread-safe.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def format_samples(self, name: str, label_set: str = "") -> Iterator[str]:
        """Yields the samples, without HELP and TYPE. `label_set` comes from format_labels()."""
        label_prefix = label_set[1:-1] + "," if label_set else ""
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{label_prefix}le="{format_number(bound)}"}} {total}'
        yield f"{name}_sum{label_set} {format_number(self._sum)}"
        yield f"{name}_count{label_set} {total}"


def format_histograms(
    name: str, text: str, series: Iterable[tuple[str, Histogram]]
) -> Iterator[str]:
    """Yields the lines of a histogram. Each item is (labels from format_labels(), Histogram)."""
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} histogram"
    for label_set, histogram in series:
        yield from histogram.format_samples(name, label_set)
