# SPDX-License-Identifier: Apache-2.0
"""The part of a data plane that a fake need not have: what every agent calls, without an effect."""

from collections.abc import Callable
from typing import Any


class FakePlane:
    """A data plane whose other methods return nothing. A test's fake derives from it, and defines
    what it is asked for.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return {
            "is_ready": lambda: True,
            "problems": tuple,
            "take_udp_cuts": tuple,
            "faults": tuple,
        }.get(name, lambda *_: None)
