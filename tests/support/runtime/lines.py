# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of Python code by counting executed lines instead of timing."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(action: Callable[[], Any]) -> int:
    """How many lines of Python `action` executes, counting each iteration of a loop."""
    count = 0

    def trace(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count
