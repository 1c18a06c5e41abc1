# SPDX-License-Identifier: Apache-2.0
"""The Accept header of a request: which forms of a page its sender prefers."""

from collections.abc import Mapping
from typing import Final, NamedTuple


class AcceptClause(NamedTuple):
    """One media type of an Accept header, with its weight (`q`) and its other parameters."""

    main_type: str
    subtype: str
    weight: float
    parameters: Mapping[str, str]

    def matches(self, media: str) -> bool:
        """Whether the clause names this media type, or is a wildcard that includes it."""
        main_type, _, subtype = media.partition("/")
        return (self.main_type, self.subtype) in (
            (main_type, subtype),
            (main_type, "*"),
            ("*", "*"),
        )


ANY_CLAUSE: Final = AcceptClause("*", "*", 1.0, {})


def parse_accept(accept: str) -> list[AcceptClause]:
    """Parses an Accept header. Sorted by weight; of equal weight, wildcards come last."""
    clauses = []
    for part in accept.split(","):
        media, *parameter_texts = part.split(";")
        main_type, _, subtype = (text.strip(" ") for text in media.partition("/"))
        parameters = {}
        for text in parameter_texts:
            name, _, value = text.partition("=")
            if value and "=" not in value:
                parameters[name.strip(" ")] = value.strip(" ")
        weight = parameters.pop("q", "1")
        if subtype or main_type == "*":
            clauses.append(
                AcceptClause(main_type, subtype or "*", _parse_weight(weight), parameters)
            )
    return sorted(
        clauses, key=lambda clause: (-clause.weight, clause.main_type == "*", clause.subtype == "*")
    )


def _parse_weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
