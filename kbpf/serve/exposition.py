"""The Prometheus text format, version 0.0.4.

Our own forty lines instead of prometheus_client: its registry holds an object for each series and
formats each one's labels again at each scrape. With 10,000 Services that is more than the whole
scrape may cost (docs/observe.md has the figures); here labels are formatted once, and a page is
joined lines.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def format_labels(**values: str) -> str:
    """``{name="value",...}`` in the order given; "" without any."""
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in values.items())
    return f"{{{pairs}}}" if pairs else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def format_number(value: float) -> str:
    """As Go writes it: whole numbers without a point."""
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def format_metric(
    name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]
) -> Iterator[str]:
    """The lines of a counter or gauge: (labels(), value) each."""
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for label_set, value in samples:
        yield f"{name}{label_set} {format_number(value)}"


class Histogram:
    """Counts by upper bounds, both in the unit of what is observed. One lock is its owner's."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def format_samples(self, name: str, label_set: str = "") -> Iterator[str]:
        """Its samples, without HELP and TYPE. `told`: labels()."""
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
    """The lines of a histogram: (labels(), Histogram) each."""
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} histogram"
    for label_set, histogram in series:
        yield from histogram.format_samples(name, label_set)
