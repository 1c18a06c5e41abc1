"""`kbpf demo`: a Service on this machine, without a cluster."""

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
    from kbpf.demo.scene import World

BAR = 30


def demo(
    once: Annotated[
        bool, typer.Option("--once", help="Send requests, show who answered, and end.")
    ] = False,
    requests: Annotated[
        int, typer.Option("--requests", min=1, help="How many, with --once. Each is a connection.")
    ] = 300,
    output: OutputOption = Output.TABLE,
    cgroup: Annotated[
        Path | None,
        typer.Option("--cgroup", help="A cgroup v2 folder to make the demo's own in."),
    ] = None,
    cache_dir: CacheDir = DEFAULT.cache_dir,
) -> None:
    """Start network namespaces with backends and a client, run the agent, and balance.

    Without --once it goes on until Ctrl-C, with changing backends. With --once it ends with 0 only
    if all requests succeeded and every backend was reached. It removes what it has made, but for
    the compiled programs in --cache-dir and a bpffs that it had to mount on /sys/fs/bpf.
    """
    if not once and output in (Output.JSON, Output.YAML):
        raise typer.BadParameter("it goes with --once only", param_hint="-o")
    from kbpf.demo.scene import World

    pods = 3 if once else 4
    with Signals() as signals, World(pods, cache_dir, cgroup) as world:
        try:
            with signals.heard():
                world.ready()
                code = _once(world, requests, output) if once else _live(world)
        except KeyboardInterrupt:
            if once:
                raise
            code = 0  # it is how the live demo is meant to end
    raise typer.Exit(code)


class Signals:
    """SIGINT and SIGTERM become a KeyboardInterrupt, but only inside heard(): before, while things
    are made, and after, while they are removed, they wait. So nothing is left half made, and a
    second Ctrl-C does not stop the removal. That holds too where a shell that started us in the
    background has SIGINT ignored.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._came = self._listening = False

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._come)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _come(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if self._listening:
            self._listening = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Here they interrupt; one that came before does so at once."""
        self._listening = True
        if self._came:
            raise KeyboardInterrupt
        try:
            yield
        finally:
            self._listening = False


# ---- once ----------------------------------------------------------------------------------


def _once(world: "World", requests: int, output: Output) -> int:
    from kbpf.demo.once import once

    outcome = once(world, requests)
    if output in (Output.JSON, Output.YAML):
        print(render.document(outcome, output))
    else:
        print(page(outcome))
    for problem in outcome.problems:
        print(f"kbpf demo: {problem}", file=sys.stderr)
    return 0 if outcome.succeeded else 1


def page(outcome: "Outcome") -> str:
    """The distribution, for people."""
    answers = sum(outcome.backends.values()) or 1
    lines = [
        f"{outcome.requests} requests to {outcome.service} in {outcome.seconds:.1f} s, "
        f"{outcome.failed} failed; {outcome.udp.requests} datagrams to {outcome.udp.service}, "
        f"{outcome.udp.failed} failed",
        "",
    ]
    for name, count in outcome.backends.items():
        part = count / answers
        lines.append(
            f"{name}  {count:6}  {part:4.0%}  {bar(part)}  {outcome.udp.backends[name]:4} by UDP"
        )
    return "\n".join(lines)


def bar(part: float, width: int = BAR) -> str:
    """A part of a whole as a bar."""
    return ("█" * round(part * width)).ljust(width)


# ---- live ----------------------------------------------------------------------------------


def _live(world: "World") -> int:
    """Until Ctrl-C."""
    if sys.stdout.isatty():
        _draw(world)
    else:
        _tell(world)
    return 0


def _tell(world: "World") -> None:
    """A line when something happens, and one for what came of it."""
    from kbpf.demo.live import live

    last: Picture | None = None
    for picture in live(world):
        if last is None or picture.events[-1] != last.events[-1]:
            if last is not None:
                print(summary(last), flush=True)
            print(f"{picture.seconds:7.1f} s  {picture.events[-1][1]}", flush=True)
        last = picture


def summary(picture: "Picture") -> str:
    """One line: who answers just now."""
    shares = "  ".join(f"{one.name} {one.share:.0%}" for one in picture.shares if one.share)
    return (
        f"{picture.seconds:7.1f} s  {shares or 'nobody answers'}; {picture.answered} answered, "
        f"{picture.refused} refused, {picture.failed} failed"
    )


def _draw(world: "World") -> None:
    from rich.console import Group
    from rich.live import Live

    from kbpf.demo.live import live

    with Live(auto_refresh=False) as drawing:
        for picture in live(world):
            drawing.update(Group(*drawn(picture)), refresh=True)


def drawn(picture: "Picture") -> "Iterator[Table | Text]":
    """The picture as rich draws it."""
    from rich.table import Table
    from rich.text import Text

    yield Text(
        f"{picture.service}   {picture.rate:.0f} requests/s   {picture.answered} answered   "
        f"{picture.refused} refused   {picture.failed} failed\n",
        style="bold",
    )
    shown = Table(box=None, pad_edge=False)
    shown.add_column("backend")
    shown.add_column("share", min_width=BAR)
    shown.add_column("", justify="right")
    shown.add_column("answers", justify="right")
    shown.add_column("is", min_width=18)
    colours = {"serving": "green", "terminating": "yellow"}
    for one in picture.shares:
        colour = colours.get(one.state, "dim")
        shown.add_row(
            one.name, f"[{colour}]{bar(one.share)}[/]", f"{one.share:.0%}", str(one.total),
            f"[{colour}]{one.state}[/]",
        )  # fmt: skip
    yield shown
    events = "\n".join(f"{at:7.1f} s  {event}" for at, event in picture.events)
    yield Text(f"\n{events}\n\nCtrl-C ends and removes everything", style="dim")
