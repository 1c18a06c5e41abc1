"""The same page again and again, for people who wait for something to change."""

import sys
import time
from collections.abc import Callable
from typing import Final

SECONDS: Final = 2.0


def watch(page: Callable[[], str], seconds: float = SECONDS) -> None:
    """Shows the page until Ctrl-C: in place on a terminal, else one after the other."""
    if not sys.stdout.isatty():
        while True:
            print(page(), end="\n\n", flush=True)
            time.sleep(seconds)
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as live:
        while True:
            text = f"{time.strftime('%H:%M:%S')}  every {seconds:g} s, Ctrl-C ends\n\n{page()}"
            live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)
            time.sleep(seconds)
