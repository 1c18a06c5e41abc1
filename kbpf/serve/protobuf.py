# SPDX-License-Identifier: Apache-2.0
"""The page of metrics in Prometheus' protobuf format (io.prometheus.client.MetricFamily,
delimited), the only one that has native histograms.

A Prometheus asks for it if `scrape_native_histograms` is on. The page is converted from our own
text, so both formats always have the same series. Histograms whose bounds are powers of two are
native ones of schema 0 as well, with the same buckets; the others have only classic buckets.
"""

import math
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from struct import Struct
from typing import Final, NamedTuple

from kbpf.serve.accept import parse_accept

CONTENT_TYPE: Final = (
    "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
)
METRIC_TYPES: Final = {"counter": 0, "gauge": 1, "summary": 2, "histogram": 4}
VALUE_FIELDS: Final = {"counter": 3, "gauge": 2}
"""The fields of `Metric` with the value."""

SUMMARY_FIELD: Final = 4
HISTOGRAM_FIELD: Final = 7
LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\.)*)"')
ESCAPE: Final = re.compile(r"\\(.)")
DOUBLE: Final = Struct("<d")
VARINT, FIXED64, BYTES = 0, 1, 2
"""Wire types of protobuf."""


class Sample(NamedTuple):
    """A line of the text format. `suffix`: what follows the name of the family: "", ``_bucket``,
    ``_sum`` or ``_count``. `labels`: without braces, and without `le`. `bound`: the value of `le`.
    """

    suffix: str
    labels: str
    bound: float
    value: float


def is_preferred(accept: str) -> bool:
    """Whether the sender of this Accept header prefers protobuf to text."""
    for clause in parse_accept(accept):
        parameters = clause.parameters
        if (clause.main_type, clause.subtype) == ("application", "vnd.google.protobuf"):
            if parameters.get("encoding") == "delimited" and parameters.get("proto", "").endswith(
                "MetricFamily"
            ):
                return True
        elif clause.matches("text/plain"):
            return False
    return False


def encode_page(text: str) -> bytes:
    """Converts a page of the text format, as kbpf writes it."""
    parts: list[bytes] = []
    name = help_text = kind = ""
    samples: list[Sample] = []
    for line in text.split("\n"):
        if line.startswith("# HELP "):
            if samples:
                parts.append(_encode_family(name, help_text, kind, samples))
            samples = []
            name, _, help_text = line[7:].partition(" ")
        elif line.startswith("# TYPE "):
            kind = line.rpartition(" ")[2]
        elif line:
            samples.append(_parse_sample(line, name))
    if samples:
        parts.append(_encode_family(name, help_text, kind, samples))
    return b"".join(_varint(len(part)) + part for part in parts)


def _parse_sample(line: str, name: str) -> Sample:
    series, _, value = line.rpartition(" ")
    full_name, _, labels = series.partition("{")
    labels = labels.removesuffix("}")
    bound = math.nan
    if full_name.endswith("_bucket"):
        labels, _, bound_text = labels.rpartition('le="')
        labels, bound = labels.rstrip(","), float(bound_text.rstrip('"'))
    return Sample(full_name.removeprefix(name), labels, bound, float(value))


def _encode_family(name: str, help_text: str, kind: str, samples: Sequence[Sample]) -> bytes:
    field = VALUE_FIELDS.get(kind)
    metrics = (
        (_encode_labels(sample.labels) + _field(field, _double(1, sample.value))
         for sample in samples)
        if field is not None
        else _encode_distributions(kind, samples)
    )  # fmt: skip
    return b"".join((
        _field(1, name.encode()),
        _field(2, help_text.encode()),
        _number(3, METRIC_TYPES[kind]),
        *(_field(4, metric) for metric in metrics),
    ))  # fmt: skip


def _encode_distributions(kind: str, samples: Sequence[Sample]) -> Iterator[bytes]:
    """The metrics of a family of summaries or histograms, one for each set of labels."""
    by_labels: dict[str, list[Sample]] = {}
    for sample in samples:
        by_labels.setdefault(sample.labels, []).append(sample)
    for labels, own in by_labels.items():
        buckets = [
            (sample.bound, int(sample.value)) for sample in own if sample.suffix == "_bucket"
        ]
        values = {sample.suffix: sample.value for sample in own}
        body = _number(1, int(values["_count"])) + _double(2, values["_sum"])
        if kind == "histogram":
            body += b"".join(
                _field(3, _number(1, count) + _double(2, bound)) for bound, count in buckets
            )
            body += _encode_native(buckets)
            yield _encode_labels(labels) + _field(HISTOGRAM_FIELD, body)
        else:
            yield _encode_labels(labels) + _field(SUMMARY_FIELD, body)


def _encode_native(buckets: Sequence[tuple[float, int]]) -> bytes:
    """The native histogram with the same buckets; b"" if their bounds are no powers of two.

    Bucket i of schema 0 has the values above 2^(i-1) up to 2^i. Those of the first bucket are in
    the zero bucket, and those above all bounds are in the bucket above the last one.
    """
    powers = [math.frexp(bound) for bound, _ in buckets[:-1]]
    if any(mantissa != 0.5 for mantissa, _ in powers):
        return b""
    exponents = [exponent - 1 for _, exponent in powers]
    if exponents != list(range(exponents[0], exponents[0] + len(exponents))):
        return b""
    cumulative = [count for _, count in buckets]
    counts = [after - before for before, after in pairwise(cumulative)]
    deltas = [after - before for before, after in pairwise([0, *counts])]
    span = _number(1, _zigzag(exponents[0] + 1)) + _number(2, len(counts))
    packed = b"".join(_varint(_zigzag(delta)) for delta in deltas)
    return b"".join((
        _number(5, _zigzag(0)),  # the schema
        _double(6, buckets[0][0]),  # the upper bound of the zero bucket
        _number(7, cumulative[0]),
        _field(12, span),
        _field(13, packed),
    ))  # fmt: skip


@lru_cache(maxsize=8192)
def _encode_labels(labels: str) -> bytes:
    return b"".join(
        _field(1, _field(1, name.encode()) + _field(2, _unescape(value).encode()))
        for name, value in LABEL.findall(labels)
    )


def _unescape(text: str) -> str:
    return ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], text)


# ---- the wire format ---------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _zigzag(value: int) -> int:
    return value << 1 if value >= 0 else (-value << 1) - 1


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | VARINT) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | FIXED64) + DOUBLE.pack(value)


def _field(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | BYTES) + _varint(len(value)) + value
