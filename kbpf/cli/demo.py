# SPDX-License-Identifier: Apache-2.0
"""`kbpf demo`: runs the agent, backends and a client on this machine, without a cluster."""

import contextlib
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer

from kbpf.cli import render, terminal
from kbpf.cli.options import DEFAULT, CacheDir, Output, OutputOption
from kbpf.views.page import Column, Kind, Page, format_table

if TYPE_CHECKING:
    from kbpf.demo.phases import Outcome

BAR_WIDTH = 30


def demo(
    requests: Annotated[int, typer.Option("--requests", min=1, help="TCP connections of a client in a phase.")] = 300,
    output: OutputOption = Output.TABLE,
    cgroup: Annotated[
        Path | None,
        typer.Option("--cgroup", help="The cgroup v2 folder in which the demo creates its own."),
    ] = None,
    cache_dir: CacheDir = DEFAULT.cache_dir,
    once: Annotated[bool, typer.Option("--once", hidden=True)] = False,
) -> None:
    """Run a Service on this machine, without a cluster. The demo creates network namespaces with
    backends and a client, and runs the agent.

    A Pod dials the ClusterIP, and a machine outside the NodePort, while the agent is killed with
    SIGKILL and started again, and while one backend refuses, which kbpf then explains. It exits
    with 1 if a connection failed that should not have. It removes everything that it created,
    except the compiled programs in --cache-dir and a bpffs that it mounted on /sys/fs/bpf.
    """
    from kbpf.demo.phases import run_phases
    from kbpf.demo.scene import DemoScene

    if once:
        print("kbpf demo: --once has no effect: the demo always ends by itself", file=sys.stderr)
    with (
        DeferredSignals() as signals,
        DemoScene(cache_dir, cgroup) as scene,
        signals.interruptible(),
    ):
        scene.wait_until_ready()
        outcome = run_phases(scene, requests)
        page = Page(result_kind(), text=lambda wide: format_page(outcome), summary=outcome)
        render.show(page, output)
        for problem in outcome.problems:
            print(f"kbpf demo: {problem}", file=sys.stderr)
    raise typer.Exit(0 if outcome.succeeded else 1)


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


def result_kind() -> Kind:
    """The kind of the result. A function, because its module takes time to import."""
    from kbpf.demo.phases import Outcome

    return Kind("DemoResult", summary=Outcome)


def format_page(outcome: "Outcome") -> str:
    """The end screen: what happened to the connections, and kbpf's explanation of the failures."""
    lines = [format_table(outcome.loads, LOAD_COLUMNS), ""]
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


def format_milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f}ms"


LOAD_COLUMNS: Final = (
    Column("PHASE", "phase"),
    Column("CLIENT", "client"),
    Column("TO", "service"),
    Column("CONNECTIONS", "requests", right=True),
    Column("FAILED", lambda load: str(load.failed - load.expected), right=True),
    Column("REFUSED", "expected", right=True),
    Column("CONNECT-P50", "connect_p50", format_milliseconds, right=True),
    Column("CONNECT-P99", "connect_p99", format_milliseconds, right=True),
)
"""Of the end screen: a row for each phase and client."""


def bar(share: float) -> str:
    """A bar of BAR_WIDTH characters, filled up to `share` (0 to 1)."""
    block = "█" if terminal.can_print("█") else "#"
    return (block * round(share * BAR_WIDTH)).ljust(BAR_WIDTH)
