"""What Python costs, counted instead of timed."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(action: Callable[[], Any]) -> int:
    """How many lines of Python it runs, each turn of a loop counted."""
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
