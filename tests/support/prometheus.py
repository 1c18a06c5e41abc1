# SPDX-License-Identifier: Apache-2.0
"""A strict parser of the Prometheus text format, independent of kbpf: what Prometheus would refuse
is an error here.
"""

import re
from typing import NamedTuple

_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? "
    r"(?P<value>[-+]?(?:[0-9.]+(?:e[-+]?[0-9]+)?|Inf)|NaN)"
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"(?:,|$)')
_SUFFIXES = ("_bucket", "_sum", "_count")
_UNESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}

Labels = frozenset[tuple[str, str]]


class Family(NamedTuple):
    """One metric family: its type, its help text, and its values by name and labels."""

    kind: str
    help: str
    samples: dict[tuple[str, Labels], float]

    def value(self, **labels: str) -> float:
        """The value of the only sample that has these labels, among others."""
        found = [v for (_, own), v in self.samples.items() if own >= set(labels.items())]
        assert len(found) == 1, (labels, found)
        return found[0]

    @property
    def label_names(self) -> frozenset[str]:
        return frozenset(name for _, labels in self.samples for name, _ in labels)

    @property
    def bounds(self) -> list[float]:
        """The buckets' upper bounds."""
        return sorted({float(v) for _, labels in self.samples for k, v in labels if k == "le"})


def parse(text: str) -> dict[str, Family]:
    """The metric families of a page, by name."""
    assert text.endswith("\n")
    found: dict[str, Family] = {}
    helps: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, words = line.split(" ", 3)
            helps[name] = words
        elif line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert current not in found, f"{current} comes twice"
            found[current] = Family(kind, helps[current], {})
        else:
            _add(found[current], current, line)
    return found


def _add(family: Family, current: str, line: str) -> None:
    match = _SAMPLE.fullmatch(line)
    assert match, f"not a sample: {line!r}"
    name, inside = match["name"], match["labels"] or ""
    base = name
    if family.kind in ("histogram", "summary"):
        base = next((name.removesuffix(s) for s in _SUFFIXES if name.endswith(s)), name)
    assert base == current, f"{name} is listed under {current}"
    pairs = _LABEL.findall(inside)
    assert "".join(m[0] for m in _LABEL.finditer(inside)) == inside, line
    labels = frozenset((k, re.sub(r"\\.", lambda m: _UNESCAPED[m[0]], v)) for k, v in pairs)
    assert len(labels) == len(pairs) == len({k for k, _ in pairs}), line
    assert (name, labels) not in family.samples, f"comes twice: {line}"
    family.samples[name, labels] = float(match["value"])
