# SPDX-License-Identifier: Apache-2.0
"""Formats metrics in the Prometheus text format, version 0.0.4.

prometheus_client is not used because its registry holds an object for every series and formats the
labels again on every scrape. With 10,000 Services that alone costs more than a scrape may cost
(figures: docs/observe.md). Here a metric is one entry of a table, with a function that reads its
value, and a page is a join of lines.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
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


class Histogram:
    """Counts observations by upper bound. The bounds have the unit of the observations. Not
    thread-safe.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] = (), total: float = 0.0) -> None:
        """`counts`: the number of values by bound so far, the last one of those above all bounds;
        `total`: their sum.
        """
        self._bounds = tuple(bounds)
        self._counts = list(counts) or [0] * (len(self._bounds) + 1)
        self._sum = total

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


class Summary(NamedTuple):
    """The sum of observations, and their number; without quantiles."""

    total: float
    observations: int

    def format_samples(self, name: str, label_set: str = "") -> Iterator[str]:
        """See Histogram."""
        yield f"{name}_sum{label_set} {format_number(self.total)}"
        yield f"{name}_count{label_set} {self.observations}"


Value = float | Histogram | Summary
LabelValues = tuple[str, ...]
Series = tuple[LabelValues | str, Value]
"""The values of the labels, or the labels as formatted by format_labels()."""
Reader = Callable[[T], Value | Iterable[Series] | None]
"""Returns the value of a metric, or its series; None: the metric is left out."""


class Metric(NamedTuple, Generic[T]):
    """One entry of a table of metrics. `labels` are the names of its labels."""

    name: str
    kind: str
    help: str
    read: Reader[T]
    labels: tuple[str, ...] = ()


def format_metrics(metrics: Iterable[Metric[T]], source: T) -> Iterator[str]:
    """Yields the lines of these metrics, which are read from `source`."""
    for metric in metrics:
        result = metric.read(source)
        if result is None:
            continue
        name = metric.name
        yield f"# HELP {name} {metric.help}"
        yield f"# TYPE {name} {metric.kind}"
        series = [("", result)] if isinstance(result, float | int | Histogram | Summary) else result
        for values, value in series:
            labels = (
                values if isinstance(values, str) else format_labels(**dict(zip(metric.labels, values, strict=True)))
            )
            if isinstance(value, Histogram | Summary):
                yield from value.format_samples(name, labels)
            else:
                yield f"{name}{labels} {format_number(value)}"
