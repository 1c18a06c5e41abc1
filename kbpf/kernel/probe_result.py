# SPDX-License-Identifier: Apache-2.0
"""The result of a probe: whether this kernel supports something."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probe:
    """`works`: True, False, or None if unknown; `reason`: why not, in a few words."""

    works: bool | None
    reason: str = ""
