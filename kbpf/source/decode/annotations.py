"""The annotations of a Service that are ours: how its connections are spread.

    kbpf.io/algorithm: maglev
    kbpf.io/weights: "web-0=3, 10.0.0.7=0, node:worker-2=2, zone:eu-1a=2, *=1"

An annotation is an extra, so a bad one costs only itself: what cannot be read is left out, with one
line for each annotation that says so, and the Service is served without it.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from kbpf.errors import ObjectError
from kbpf.model.address import Addr, parse_addr
from kbpf.model.objects import Algorithm, Weights
from kbpf.source.decode.fields import LABEL_VALUE, SUBDOMAIN

ALGORITHM: Final = "kbpf.io/algorithm"
WEIGHTS: Final = "kbpf.io/weights"
LARGEST: Final = 1000
_MOST_SHOWN: Final = 3
_FORM: Final = (
    f"write NAME=WEIGHT with commas between them, each name once: a Pod, an address, node:NODE, "
    f"zone:ZONE or *, and a whole number from 0 to {LARGEST}"
)


class Rule(NamedTuple):
    """One part of kbpf.io/weights: `kind` is a field of Weights."""

    kind: str
    name: Addr | str
    weight: int


def read_algorithm(text: str | None, skipped: list[str]) -> Algorithm | None:
    """What the annotation says; None when it says nothing, or nothing that is known."""
    if text is None:
        return None
    try:
        return Algorithm(text.strip())
    except ValueError:
        known = " or ".join(Algorithm)
        skipped.append(f"{_path(ALGORITHM)}: {text[:64]!r} is not known; write {known}")
        return None


def read_weights(text: str | None, skipped: list[str]) -> Weights | None:
    """The rules of the annotation; None when there is none that can be read."""
    rules: dict[tuple[str, Addr | str], int] = {}
    bad: list[str] = []
    for part in (text or "").split(","):
        word = part.strip()
        rule = _rule(word)
        if rule is not None and rules.setdefault(rule[:2], rule.weight) == rule.weight:
            continue
        if word:
            bad.append(word)
    if bad or (text is not None and not rules):
        words = [repr(word[:64]) for word in bad[:_MOST_SHOWN]] or ["''"]
        more = f" and {len(bad) - _MOST_SHOWN} more" if len(bad) > _MOST_SHOWN else ""
        skipped.append(f"{_path(WEIGHTS)}: cannot use {', '.join(words)}{more}; {_FORM}")
    return _weights(rules) if rules else None


def _path(annotation: str) -> str:
    return f"metadata.annotations[{annotation}]"


def _rule(word: str) -> Rule | None:
    """``web-0=3`` and the like; None when it is none."""
    name, _, number = (half.strip() for half in word.rpartition("="))
    if not (number.isascii() and number.isdigit() and len(number) <= 4):
        return None
    weight = int(number)
    if weight > LARGEST:
        return None
    named = _named(name)
    return Rule(*named, weight) if named else None


def _named(name: str) -> tuple[str, Addr | str] | None:
    """Whom a rule is for: the field of Weights, and the name there."""
    if name == "*":
        return "others", ""
    kind, _, rest = name.partition(":")
    if kind == "node":
        return ("nodes", rest) if _is_subdomain(rest) else None
    if kind == "zone":
        return ("zones", rest) if LABEL_VALUE.fullmatch(rest) else None
    try:
        return "addresses", parse_addr(name)
    except (ObjectError, ValueError):
        return ("pods", name) if _is_subdomain(name) else None


def _is_subdomain(name: str) -> bool:
    return len(name) <= 253 and SUBDOMAIN.fullmatch(name) is not None


def _weights(rules: Mapping[tuple[str, Addr | str], int]) -> Weights:
    by_kind: dict[str, list[tuple[Addr | str, int]]] = {}
    for (kind, name), weight in sorted(rules.items(), key=lambda rule: (rule[0][0], rule[0][1])):
        by_kind.setdefault(kind, []).append((name, weight))
    others = by_kind.pop("others", [("", 1)])[0][1]
    return Weights(**{kind: tuple(named) for kind, named in by_kind.items()}, others=others)  # type: ignore[arg-type]
