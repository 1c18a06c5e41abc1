# SPDX-License-Identifier: Apache-2.0
"""kbpf's annotations of a Service, which control how connections are spread.

    kbpf.io/algorithm: maglev
    kbpf.io/weights: "web-0=3, 10.0.0.7=0, node:worker-2=2, zone:eu-1a=2, *=1"

An annotation is optional, so an invalid one harms only itself: invalid parts are skipped, with one
line for each annotation, and the Service is served without them.

To add one: docs/contributing.md, "An annotation of Services".
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from kbpf.errors import ObjectError
from kbpf.model.address import Addr, parse_addr
from kbpf.model.objects import Algorithm, Weights
from kbpf.source.decode.fields import LABEL_VALUE, SUBDOMAIN

ALGORITHM_ANNOTATION: Final = "kbpf.io/algorithm"
WEIGHTS_ANNOTATION: Final = "kbpf.io/weights"
MAX_WEIGHT: Final = 1000
_MAX_SHOWN: Final = 3
_SYNTAX_HINT: Final = (
    f"write NAME=WEIGHT, separated by commas, each name once: a Pod, an address, node:NODE, "
    f"zone:ZONE or *, and a whole number from 0 to {MAX_WEIGHT}"
)


class WeightRule(NamedTuple):
    """One part of kbpf.io/weights. `kind` is a field of Weights, or "others" for `*`."""

    kind: str
    name: Addr | str
    weight: int


def parse_algorithm(text: str | None, skipped: list[str]) -> Algorithm | None:
    """Parses kbpf.io/algorithm; None if it is missing or unknown."""
    if text is None:
        return None
    try:
        return Algorithm(text.strip())
    except ValueError:
        choices = " or ".join(Algorithm)
        skipped.append(f"{_annotation_path(ALGORITHM_ANNOTATION)}: {text[:64]!r} is unknown; write {choices}")
        return None


def parse_weights(text: str | None, skipped: list[str]) -> Weights | None:
    """Parses kbpf.io/weights; None if it is missing or has no valid part."""
    rules: dict[tuple[str, Addr | str], int] = {}
    bad: list[str] = []
    for part in (text or "").split(","):
        item = part.strip()
        rule = _parse_rule(item)
        if rule is not None and rules.setdefault(rule[:2], rule.weight) == rule.weight:
            continue
        if item:
            bad.append(item)
    if bad or (text is not None and not rules):
        quoted = [repr(item[:64]) for item in bad[:_MAX_SHOWN]] or ["''"]
        suffix = f" and {len(bad) - _MAX_SHOWN} more" if len(bad) > _MAX_SHOWN else ""
        skipped.append(
            f"{_annotation_path(WEIGHTS_ANNOTATION)}: cannot use {', '.join(quoted)}{suffix}; {_SYNTAX_HINT}"
        )
    return _build_weights(rules) if rules else None


def _annotation_path(annotation: str) -> str:
    return f"metadata.annotations[{annotation}]"


def _parse_rule(text: str) -> WeightRule | None:
    """Parses ``web-0=3`` and the like; None if it is invalid."""
    name, _, number = (part.strip() for part in text.rpartition("="))
    if not (number.isascii() and number.isdigit() and len(number) <= 4):
        return None
    weight = int(number)
    if weight > MAX_WEIGHT:
        return None
    target = _parse_target(name)
    return WeightRule(*target, weight) if target else None


def _parse_target(name: str) -> tuple[str, Addr | str] | None:
    """Returns what a rule applies to: its kind, and the name."""
    if name == "*":
        return "others", ""
    kind, _, value = name.partition(":")
    if kind == "node":
        return ("nodes", value) if _is_subdomain(value) else None
    if kind == "zone":
        return ("zones", value) if LABEL_VALUE.fullmatch(value) else None
    try:
        return "addresses", parse_addr(name)
    except (ObjectError, ValueError):
        return ("pods", name) if _is_subdomain(name) else None


def _is_subdomain(name: str) -> bool:
    return len(name) <= 253 and SUBDOMAIN.fullmatch(name) is not None


def _build_weights(rules: Mapping[tuple[str, Addr | str], int]) -> Weights:
    by_kind: dict[str, list[tuple[Addr | str, int]]] = {}
    for (kind, name), weight in sorted(rules.items(), key=lambda rule: (rule[0][0], rule[0][1])):
        by_kind.setdefault(kind, []).append((name, weight))
    default = by_kind.pop("others", [("", 1)])[0][1]
    return Weights(**{kind: tuple(targets) for kind, targets in by_kind.items()}, default=default)  # type: ignore[arg-type]
