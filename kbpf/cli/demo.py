# SPDX-License-Identifier: Apache-2.0
"""`kbpf demo`: runs the agent, backends and a client on this machine, without a cluster."""

import contextlib
import signal
import sys
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from kbpf.cli import render, terminal
from kbpf.cli.options import DEFAULT, CacheDir, Output, OutputOption
from kbpf.views.columns import Column
from kbpf.views.page import Kind, Page
from kbpf.views.text import format_table

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
        int,
        typer.Option(
            "--requests", min=1, help="With --once: TCP connections of a client in a phase."
        ),
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

    A Pod dials the ClusterIP, and a machine outside the NodePort, while backends change, the agent
    is killed with SIGKILL and started again, and one backend refuses, which kbpf then explains.
    Without --once it runs until Ctrl-C. It exits with 1 if a connection failed that should not
    have. It removes everything that it created, except the compiled programs in --cache-dir and a
    bpffs that it mounted on /sys/fs/bpf.
    """
    if not once and not output.is_text:
        raise typer.BadParameter(f"{output} requires --once", param_hint="-o")
    from kbpf.demo.scene import DemoScene

    backends = 3 if once else 4
    with DeferredSignals() as signals, DemoScene(backends, cache_dir, cgroup) as scene:
        try:
            with signals.interruptible():
                scene.wait_until_ready()
                code = _run_once(scene, requests, output) if once else _run_live(scene)
        except KeyboardInterrupt:
            if once:
                raise
            code = 0  # it was interrupted before its first picture
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
    page = Page(result_kind(), text=lambda wide: format_page(outcome), summary=outcome)
    render.show(page, output)
    for problem in outcome.problems:
        print(f"kbpf demo: {problem}", file=sys.stderr)
    return 0 if outcome.succeeded else 1


def result_kind() -> Kind:
    """The kind of what --once prints. A function, because its module takes time to import."""
    from kbpf.demo.once import Outcome

    return Kind("DemoResult", summary=Outcome)


def format_page(outcome: "Outcome") -> str:
    """The end screen: what happened to the connections, and kbpf's explanation of the failures."""
    lines = [format_table(outcome.loads, load_columns()), ""]
    for load in outcome.loads:
        if load.without_agent:
            lines.append(f"{load.client} made {load.without_agent} connections while no agent ran")
    lines.append("")
    answers = sum((Counter(load.backends) for load in outcome.loads), Counter[str]())
    for name in {name: None for load in outcome.loads for name in load.backends}:
        share = answers[name] / (answers.total() or 1)
        by_udp = outcome.udp.backends.get(name, 0)
        lines.append(f"{name}  {answers[name]:6}  {share:4.0%}  {bar(share)}  {by_udp:4} by UDP")
    for explanation in outcome.explanations:
        lines += ["", f"$ {explanation.command}", explanation.output.rstrip()]
    lines += [
        "",
        f"{outcome.requests} connections and {outcome.udp.requests} datagrams in "
        f"{outcome.seconds:.1f} s: {outcome.failed + outcome.udp.failed} unexpected failures, "
        f"{outcome.expected} expected (refused by a backend)",
    ]
    return "\n".join(lines)


def load_columns() -> tuple[Column, ...]:
    """The columns of the end screen: a row for each phase and client."""
    return (
        Column("PHASE", lambda load: load.phase),
        Column("CLIENT", lambda load: load.client),
        Column("TO", lambda load: load.service),
        Column("CONNECTIONS", lambda load: str(load.requests), right=True),
        Column("FAILED", lambda load: str(load.failed - load.expected), right=True),
        Column("REFUSED", lambda load: str(load.expected), right=True),
        Column("CONNECT-P50", lambda load: format_milliseconds(load.connect_p50), right=True),
        Column("CONNECT-P99", lambda load: format_milliseconds(load.connect_p99), right=True),
    )


def format_milliseconds(seconds: float | None) -> str:
    """``0.21ms``, or ``-`` for None."""
    return "-" if seconds is None else f"{seconds * 1000:.2f}ms"


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A bar of this width, filled up to `share` (0 to 1)."""
    block = "█" if terminal.can_print("█") else "#"
    return (block * round(share * width)).ljust(width)


# ---- live ----------------------------------------------------------------------------------


def _run_live(scene: "DemoScene") -> int:
    """Shows the demo until Ctrl-C: as a picture on a terminal, otherwise line by line; then the
    counts.
    """
    from kbpf.demo.live import stream_pictures

    pictures: deque[Picture] = deque(maxlen=1)

    def stream() -> "Iterator[Picture]":
        for picture in stream_pictures(scene):
            pictures.append(picture)
            yield picture

    try:
        (_draw if sys.stdout.isatty() else _print_events)(stream())
    except KeyboardInterrupt:  # the normal end
        if not pictures:
            return 0
    (last,) = pictures
    print(
        f"{last.answered + last.refused + last.failed} requests in {last.seconds:.0f} s: "
        f"{last.failed} unexpected failures, {last.refused} expected (refused)"
    )
    return 1 if last.failed else 0


def _print_events(pictures: "Iterator[Picture]") -> None:
    """Prints a line for each event, and then one for its effect."""
    last: Picture | None = None
    for picture in pictures:
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
        f"{picture.refused} refused, {picture.failed} failed; {format_connect(picture)}"
    )


def format_connect(picture: "Picture") -> str:
    """How long connect() takes now."""
    p50, p99 = map(format_milliseconds, (picture.connect_p50, picture.connect_p99))
    return f"connect() p50 {p50}, p99 {p99}"


def _draw(pictures: "Iterator[Picture]") -> None:
    from rich.console import Group
    from rich.live import Live

    with Live(auto_refresh=False, redirect_stdout=False) as display:  # for bar()
        for picture in pictures:
            display.update(Group(*render_picture(picture)), refresh=True)


def render_picture(picture: "Picture") -> "Iterator[Table | Text]":
    """Yields the picture as objects that rich can draw."""
    from rich.table import Table
    from rich.text import Text

    yield Text(
        f"{picture.service}   {picture.rate:.0f} requests/s   {picture.answered} answered   "
        f"{picture.refused} refused   {picture.failed} failed   {format_connect(picture)}\n",
        style="bold",
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("backend")
    table.add_column("share", min_width=BAR_WIDTH)
    table.add_column("", justify="right")
    table.add_column("answers", justify="right")
    table.add_column("state", min_width=18)
    colours = {"serving": "green", "terminating": "yellow", "refusing": "red"}
    for share in picture.shares:
        colour = colours.get(share.state, "dim")
        table.add_row(
            share.name, f"[{colour}]{bar(share.share)}[/]", f"{share.share:.0%}", str(share.total),
            f"[{colour}]{share.state}[/]",
        )  # fmt: skip
    yield table
    events = "\n".join(f"{seconds:7.1f} s  {event}" for seconds, event in picture.events)
    if picture.explanation:
        events += f"\n\n$ {picture.explanation.command}\n{picture.explanation.output.rstrip()}"
    yield Text(f"\n{events}\n\nCtrl-C stops the demo and removes everything", style="dim")
