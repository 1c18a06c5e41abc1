# SPDX-License-Identifier: Apache-2.0
"""`kbpf top`: the busiest Services, backends and clients."""

import select
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from kbpf.cli import options, render
from kbpf.cli.monitor import Lookup, Service, ended_by_signals
from kbpf.cli.options import DEFAULT, ConfigFile, Output, OutputOption, PinDir, StateDir
from kbpf.model.inspection import EventFilter, Inspection
from kbpf.views import top as view
from kbpf.views.monitor import VERDICTS
from kbpf.views.packet_path.availability import uses_conntrack
from kbpf.views.top import By, TopRow, TopSummary

if TYPE_CHECKING:
    from kbpf.dataplane.bpf.inspect.monitor import Monitor
    from kbpf.dataplane.reader import Locations

CLIENT_RATE: Final = 2_000
"""Events a second from which clients are counted."""
LEAST_INTERVAL: Final = 0.1
OTHER_LINES: Final = 7
"""Lines of the screen that are not rows: clock, titles and notes."""

ByOption = Annotated[By, typer.Option("--by", help="What a row stands for.")]
Once = Annotated[bool, typer.Option("--once", help="Show one interval, and end.")]
Interval = Annotated[str, typer.Option("--interval", metavar="DURATION", help="The time between two reads.")]
Limit = Annotated[
    int, typer.Option("--limit", min=0, metavar="N", help="Show at most N rows; 0: as many as fit, or with --once all.")
]


class Sample(NamedTuple):
    """One interval. `counted`: see Inspection. `in_conntrack`: whether new connections are."""

    rows: tuple[TopRow, ...]
    summary: TopSummary
    counted: frozenset[str]
    in_conntrack: bool = False


def top(
    by: ByOption = By.SERVICES,
    service: Service = "",
    namespace: options.Namespace = "",
    all_namespaces: options.AllNamespaces = False,
    once: Once = False,
    interval: Interval = "2s",
    limit: Limit = 0,
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
) -> None:
    """Show the busiest Services, backends, zones, nodes or clients: new and failed connections a
    second, open connections, and bytes. The agent need not run.
    """
    if not output.is_text and not once:
        raise typer.BadParameter("it requires --once", param_hint="--output")
    seconds = options.parse_duration(interval, "--interval")
    if seconds < LEAST_INTERVAL:
        raise typer.BadParameter("it must be at least 100ms", param_hint="--interval")
    from kbpf.dataplane import reader as dataplane
    from kbpf.dataplane.bpf.inspect.monitor import Monitor

    locations = dataplane.Locations.of_settings(pin_dir, state_dir)
    namespace = options.choose_namespace(service, namespace, all_namespaces)
    if by is not By.CLIENTS:
        sampler = _CounterSampler(locations, by, service, namespace)
        _run(sampler.sample, seconds, once, output, limit)
        return
    lookup = Lookup(locations, service, namespace, "")
    event_filter = lookup.apply(EventFilter(frozenset(VERDICTS)))
    with ended_by_signals(), Monitor(pin_dir, CLIENT_RATE, event_filter) as monitor:
        _run(_EventSampler(monitor).sample, seconds, once, output, limit)


class _CounterSampler:
    """Reads the counters twice for the first interval, and once for each later one."""

    def __init__(self, locations: "Locations", by: By, service: str, namespace: str) -> None:
        self._locations, self._by = locations, by
        self._service, self._namespace = service, namespace
        self._before = self._read()

    def _read(self) -> Inspection:
        from kbpf.dataplane import reader as dataplane

        return dataplane.read(self._locations, view.needs(self._by))

    def sample(self, seconds: float) -> Sample:
        before = self._before
        time.sleep(max(0.0, before.monotonic + seconds - time.monotonic()))
        after = self._before = self._read()
        rows = view.build_rows(before, after, self._by, self._service, self._namespace)
        elapsed = round(after.monotonic - before.monotonic, 3)
        summary = TopSummary(self._by, elapsed, None)
        return Sample(rows, summary, after.counted, uses_conntrack(after))


class _EventSampler:
    """Counts the events of clients."""

    def __init__(self, monitor: "Monitor") -> None:
        self._monitor, self._left_out = monitor, 0
        self._poll = select.poll()
        self._poll.register(monitor.ring, select.POLLIN)

    def sample(self, seconds: float) -> Sample:
        from kbpf.dataplane.bpf.inspect.monitor import RENEWAL_S

        began = time.monotonic()
        counts = view.ClientCounts()
        while (rest := began + seconds - time.monotonic()) > 0:
            self._monitor.renew()
            end = time.monotonic() + min(rest, RENEWAL_S)
            while (wait := end - time.monotonic()) > 0:
                self._poll.poll(wait * 1000)
                counts.add(self._monitor.read())
        elapsed = time.monotonic() - began
        left_out = self._monitor.left_out - self._left_out
        self._left_out += left_out
        summary = TopSummary(By.CLIENTS, round(elapsed, 3), left_out + counts.left_out)
        return Sample(counts.build_rows(elapsed), summary, frozenset())


def _run(sample: Callable[[float], Sample], seconds: float, once: bool, output: Output, limit: int) -> None:
    if once:
        render.show(view.build_page(*sample(seconds), limit=limit), output)
        return

    def show_next() -> str:
        fitting = max(1, shutil.get_terminal_size().lines - OTHER_LINES) if sys.stdout.isatty() else 0
        page = view.build_page(*sample(seconds), limit=limit or fitting)
        text = "".join(render.render_page(page, output)) if page.rows else f"{page.empty}\n"
        return text + "".join(f"({note})\n" for note in page.notes if note)

    render.watch(show_next, seconds, True)
