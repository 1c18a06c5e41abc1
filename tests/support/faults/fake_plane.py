# SPDX-License-Identifier: Apache-2.0
"""The part of a data plane that a fake need not have: what every agent calls, without an effect."""

from collections.abc import Callable
from typing import Any

from kbpf.dataplane.base import PlaneStatus
from kbpf.model.status import ModeChoice


class FakePlane:
    """A data plane whose other methods return nothing. A test's fake derives from it, and defines
    what it is asked for.
    """

    name = "fake"

    def status(self) -> PlaneStatus:
        return PlaneStatus(ModeChoice(self.name, self.name))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_: None
