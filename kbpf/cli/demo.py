# SPDX-License-Identifier: Apache-2.0
"""`kbpf demo`: runs the agent, backends and a client on this machine, without a cluster."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from kbpf.cli import render
from kbpf.cli.options import DEFAULT, CacheDir, Output, OutputOption

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from kbpf.demo.live import Picture
    from kbpf.demo.once import Outcome
    from kbpf.demo.scene import DemoScene

BAR_WIDTH = 30


def demo(
    once: Annotated[
        bool, typer.Option("--once", help="Send requests, show how they were balanced, and exit.")
    ] = False,
    requests: Annotated[
        int, typer.Option("--requests", min=1, help="With --once: number of TCP connections.")
    ] = 300,
    output: OutputOption = Output.TABLE,
    cgroup: Annotated[
        Path | None,
        typer.Option("--cgroup", help="The cgroup v2 folder in which the demo creates its own."),
    ] = None,
    cache_dir: CacheDir = DEFAULT.cache_dir,
) -> None:
    """Run a Service on this machine, without a cluster. The demo creates network namespaces with
    backends and a client, and runs the agent.

    Without --once it runs until Ctrl-C, and the backends change. With --once it exits with 0 only
    if all requests succeeded and every backend was reached. It removes everything that it created,
    except the compiled programs in --cache-dir and a bpffs that it mounted on /sys/fs/bpf.
    """
    if not once and output in (Output.JSON, Output.YAML):
        raise typer.BadParameter("JSON and YAML require --once", param_hint="-o")
    from kbpf.demo.scene import DemoScene

    pods = 3 if once else 4
    with DeferredSignals() as signals, DemoScene(pods, cache_dir, cgroup) as scene:
        try:
            with signals.interruptible():
                scene.wait_until_ready()
                code = _run_once(scene, requests, output) if once else _run_live(scene)
        except KeyboardInterrupt:
            if once:
                raise
            code = 0  # Ctrl-C is the normal way to end the live demo
    raise typer.Exit(code)


class DeferredSignals:
    """Turns SIGINT and SIGTERM into a KeyboardInterrupt, but only inside interruptible().

    While the scene is being created or removed, signals wait. So nothing is left half created, and
    a second Ctrl-C does not stop the removal. It also works if a shell started this process in the
    background, with SIGINT ignored.
    """

    def __init__(self) -> None:
        self._old_handlers: dict[signal.Signals, Any] = {}
        self._is_pending = self._is_interruptible = False

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._is_pending = True
        if self._is_interruptible:
            self._is_interruptible = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside this block signals interrupt. One that is pending interrupts at once."""
        self._is_interruptible = True
        if self._is_pending:
            raise KeyboardInterrupt
        try:
            yield
        finally:
            self._is_interruptible = False


# ---- once ----------------------------------------------------------------------------------


def _run_once(scene: "DemoScene", requests: int, output: Output) -> int:
    from kbpf.demo.once import run_once

    outcome = run_once(scene, requests)
    if output in (Output.JSON, Output.YAML):
        print(render.format_document(outcome, output))
    else:
        print(format_page(outcome))
    for problem in outcome.problems:
        print(f"kbpf demo: {problem}", file=sys.stderr)
    return 0 if outcome.succeeded else 1


def format_page(outcome: "Outcome") -> str:
    """The distribution of the requests as text."""
    answers = sum(outcome.backends.values()) or 1
    lines = [
        f"{outcome.requests} requests to {outcome.service} in {outcome.seconds:.1f} s, "
        f"{outcome.failed} failed; {outcome.udp.requests} datagrams to {outcome.udp.service}, "
        f"{outcome.udp.failed} failed",
        "",
    ]
    for name, count in outcome.backends.items():
        share = count / answers
        lines.append(
            f"{name}  {count:6}  {share:4.0%}  {bar(share)}  {outcome.udp.backends[name]:4} by UDP"
        )
    return "\n".join(lines)


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A bar of this width, filled up to `share` (0 to 1)."""
    return ("█" * round(share * width)).ljust(width)


# ---- live ----------------------------------------------------------------------------------


def _run_live(scene: "DemoScene") -> int:
    """Shows the demo until Ctrl-C: as a picture on a terminal, otherwise line by line."""
    if sys.stdout.isatty():
        _draw(scene)
    else:
        _print_events(scene)
    return 0


def _print_events(scene: "DemoScene") -> None:
    """Prints a line for each event, and then one for its effect."""
    from kbpf.demo.live import stream_pictures

    last: Picture | None = None
    for picture in stream_pictures(scene):
        if last is None or picture.events[-1] != last.events[-1]:
            if last is not None:
                print(summary(last), flush=True)
            print(f"{picture.seconds:7.1f} s  {picture.events[-1][1]}", flush=True)
        last = picture


def summary(picture: "Picture") -> str:
    """One line: the present share of each backend, and the totals."""
    shares = "  ".join(f"{share.name} {share.share:.0%}" for share in picture.shares if share.share)
    return (
        f"{picture.seconds:7.1f} s  {shares or 'no answers'}; {picture.answered} answered, "
        f"{picture.refused} refused, {picture.failed} failed"
    )


def _draw(scene: "DemoScene") -> None:
    from rich.console import Group
    from rich.live import Live

    from kbpf.demo.live import stream_pictures

    with Live(auto_refresh=False) as display:
        for picture in stream_pictures(scene):
            display.update(Group(*render_picture(picture)), refresh=True)


def render_picture(picture: "Picture") -> "Iterator[Table | Text]":
    """Yields the picture as objects that rich can draw."""
    from rich.table import Table
    from rich.text import Text

    yield Text(
        f"{picture.service}   {picture.rate:.0f} requests/s   {picture.answered} answered   "
        f"{picture.refused} refused   {picture.failed} failed\n",
        style="bold",
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("backend")
    table.add_column("share", min_width=BAR_WIDTH)
    table.add_column("", justify="right")
    table.add_column("answers", justify="right")
    table.add_column("state", min_width=18)
    colours = {"serving": "green", "terminating": "yellow"}
    for share in picture.shares:
        colour = colours.get(share.state, "dim")
        table.add_row(
            share.name, f"[{colour}]{bar(share.share)}[/]", f"{share.share:.0%}", str(share.total),
            f"[{colour}]{share.state}[/]",
        )  # fmt: skip
    yield table
    events = "\n".join(f"{seconds:7.1f} s  {event}" for seconds, event in picture.events)
    yield Text(f"\n{events}\n\nCtrl-C stops the demo and removes everything", style="dim")
