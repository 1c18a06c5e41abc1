"""The result of a probe: whether this kernel can do something."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probe:
    """True, False, or None when it could not be found out; why not, in a few words."""

    works: bool | None
    reason: str = ""
