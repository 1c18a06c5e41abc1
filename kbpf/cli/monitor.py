# SPDX-License-Identifier: Apache-2.0
"""`kbpf monitor`: connections, refusals, drops, evictions and failures as they happen."""

import json
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kbpf.cli import options, render
from kbpf.cli.options import DEFAULT, ConfigFile, Output, OutputOption, PinDir, StateDir
from kbpf.config import durations
from kbpf.errors import ConfigError, NotFoundError
from kbpf.kernel.system import pods
from kbpf.model.inspection import EventFilter, Part, parse_place, select_ports
from kbpf.model.reasons import EventVerdict
from kbpf.views import monitor as view

if TYPE_CHECKING:
    from kbpf.dataplane.bpf.inspect.monitor import Monitor
    from kbpf.dataplane.reader import Locations

DEFAULT_RATE: Final = 100
MAX_RATE: Final = 10_000
REFRESH_S: Final = 5.0
"""How often a Service's ports and a Pod's containers are looked up again."""
REFRESH_PAUSE: Final = 20
"""With many Services that takes long: it has at most this fraction (1/n) of the time."""

EventReason = StrEnum(  # type: ignore[misc]
    "EventReason", {reason.name: reason.name.lower() for reason in view.VERDICTS}
)
"""The reasons of view.VERDICTS, because typer needs an enum of texts."""

Service = Annotated[
    str,
    typer.Option(
        "--service",
        metavar="NAMESPACE/NAME",
        help="Only to this Service: also IP, IP:PORT or :PORT, as in `inspect service`.",
    ),
]
Pod = Annotated[
    str, typer.Option("--pod", metavar="NAMESPACE/NAME", help="Only from sockets of this Pod of this node.")
]
Address = Annotated[
    str, typer.Option("--address", metavar="IP[:PORT]", help="Only with this address as client, frontend or backend.")
]
VerdictOption = Annotated[list[EventVerdict] | None, typer.Option("--verdict", help="Only these; may be repeated.")]
ReasonOption = Annotated[list[EventReason] | None, typer.Option("--reason", help="Only these; may be repeated.")]
Rate = Annotated[
    int,
    typer.Option(
        "--rate", min=1, max=MAX_RATE, metavar="N", help="At most N events a second; says how many more there were."
    ),
]
For = Annotated[str, typer.Option("--for", metavar="DURATION", help="End after DURATION: 30s, 5m, 2h.")]
Count = Annotated[int, typer.Option("--count", min=0, metavar="N", help="End after N events; 0: never.")]


def monitor(
    service: Service = "",
    pod: Pod = "",
    address: Address = "",
    verdict: VerdictOption = None,
    reason: ReasonOption = None,
    namespace: options.Namespace = "",
    all_namespaces: options.AllNamespaces = False,
    rate: Rate = DEFAULT_RATE,
    for_: For = "",
    count: Count = 0,
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
) -> None:
    """Show connections, refusals, drops, evictions and failures as they happen, one line each,
    until Ctrl-C. Filters apply in the kernel, before the rate. The agent need not run.
    """
    from kbpf.dataplane import reader as dataplane
    from kbpf.dataplane.bpf.inspect.monitor import Monitor

    if output not in (Output.TABLE, Output.WIDE, Output.JSON):
        raise typer.BadParameter("it requires -o table, wide or json", param_hint="--output")
    seconds = _parse_duration(for_)
    locations = dataplane.Locations.of_settings(pin_dir, state_dir)
    fixed_filter = _fixed_filter(address, verdict or [], reason or [])
    namespace = options.choose_namespace(service, namespace, all_namespaces)
    lookup = Lookup(locations, service, namespace, pod)
    with ended_by_signals(), Monitor(pin_dir, rate, lookup.apply(fixed_filter)) as watched:
        printer = _Printer(output, rate, count)
        for _ in _poll(watched, lookup, fixed_filter, seconds):
            printer.print(watched)
            if printer.is_done:
                return
        printer.print(watched)  # what has come since, if the machine was busy
        printer.print_left_out(watched)


def _parse_duration(text: str) -> float:
    try:
        seconds = durations.parse(text, "--for") if text else 0.0
    except ConfigError as error:
        raise typer.BadParameter(f"{error.what}; {error.hint}", param_hint="--for") from None
    if text and seconds <= 0:
        raise typer.BadParameter("it must be longer than 0", param_hint="--for")
    return seconds


def _fixed_filter(address: str, verdicts: list[EventVerdict], reasons: list[EventReason]) -> EventFilter:
    admitted = frozenset(
        reason
        for reason, verdict in view.VERDICTS.items()
        if (not verdicts or verdict in verdicts) and (not reasons or reason.name.lower() in reasons)
    )
    if not admitted:
        raise typer.BadParameter("no event has both", param_hint="--verdict and --reason")
    result = EventFilter(admitted)
    if not address:
        return result
    place = parse_place(address)
    if place is None or place[0] is None:
        raise typer.BadParameter(f"{address} is no IP or IP:PORT", param_hint="--address")
    return replace(result, address=place[0], port=place[1])


class Lookup:
    """What the names of a Service, a namespace of Services and a Pod mean now; "" means all. Raises
    NotFoundError at first; a Service or Pod that is deleted later keeps what it had.
    """

    def __init__(self, locations: "Locations", service: str, namespace: str, pod: str) -> None:
        self._locations, self._service, self._namespace = locations, service, namespace
        self._pod = pod

    @property
    def may_change(self) -> bool:
        return bool(self._service or self._namespace or self._pod)

    def apply(self, event_filter: EventFilter) -> EventFilter:
        """The filter, for this Service and this Pod."""
        from kbpf.dataplane import reader as dataplane

        # Also without a Service: reports that the node is in mode ipvs, or that no agent has run.
        has_services = bool(self._service or self._namespace)
        parts = Part.SERVICES if has_services else Part.NAMES
        inspection = dataplane.read(self._locations, parts, bpf_only=True)
        if has_services:
            ports = select_ports(inspection.services, self._service, self._namespace, inspection.location)
            event_filter = replace(
                event_filter,
                services=frozenset(port.id for port in ports if port.id is not None),
                frontends=frozenset(f.at.address for port in ports for f in port.frontends),
            )
        if self._pod:
            uids = pods.find_uids(self._pod)
            ids = frozenset(i for uid in uids for i in pods.find_cgroup_ids(uid, above=False))
            if not ids:
                raise NotFoundError(
                    f"no cgroup of the Pod {self._pod} is visible",
                    "cgroup v2",
                    "run this where the node's cgroups are mounted, as in kbpf's own Pod",
                )
            event_filter = replace(event_filter, cgroups=ids)
        return event_filter


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block in order, so that nothing stays in the kernel."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, end) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _poll(watched: "Monitor", lookup: Lookup, fixed_filter: EventFilter, seconds: float) -> Iterator[None]:
    """Yields whenever there are events, and at least every RENEWAL_S. Ends after `seconds` (0:
    never), and with BrokenPipeError when the reader of the output has exited.
    """
    from kbpf.dataplane.bpf.inspect.monitor import RENEWAL_S

    poll, began = select.poll(), time.monotonic()
    poll.register(watched.ring, select.POLLIN)
    poll.register(sys.stdout, 0)  # POLLERR is always reported
    renew_at, refresh_at = began + RENEWAL_S, began + REFRESH_S
    while not seconds or time.monotonic() < began + seconds:
        end = min(renew_at, began + seconds) if seconds else renew_at
        ready = poll.poll(max(0.0, end - time.monotonic()) * 1000)
        if any(flags & (select.POLLERR | select.POLLNVAL) for _, flags in ready):
            raise BrokenPipeError
        now = time.monotonic()
        if now >= renew_at:
            watched.renew()
            renew_at = now + RENEWAL_S
        if lookup.may_change and now >= refresh_at:
            _refresh(watched, lookup, fixed_filter)
            taken = time.monotonic() - now
            refresh_at = now + max(REFRESH_S, REFRESH_PAUSE * taken)
        yield


def _refresh(watched: "Monitor", lookup: Lookup, fixed_filter: EventFilter) -> None:
    try:
        watched.set_filter(lookup.apply(fixed_filter))
    except NotFoundError:
        return


class _Printer:
    """Prints events, and how many were left out."""

    def __init__(self, output: Output, rate: int, count: int) -> None:
        self._output, self._rate, self._count = output, rate, count
        self._lines = view.LineFormatter(output == Output.WIDE)
        self._printed = self._left_out = 0
        self._next_note = 0.0
        if output != Output.JSON:
            print(self._lines.titles(), flush=True)

    @property
    def is_done(self) -> bool:
        return 0 < self._count <= self._printed

    def print(self, watched: "Monitor") -> None:
        """Prints the events since the last call."""
        for event in watched.read():
            if not self.is_done:
                print(self._format(view.build_row(event)))
                self._printed += 1
        if time.monotonic() >= self._next_note:
            self.print_left_out(watched)
            self._next_note = time.monotonic() + 1
        sys.stdout.flush()

    def _format(self, row: view.EventRow) -> str:
        if self._output == Output.JSON:
            return self._format_json(row)
        return self._lines.line(row)

    @staticmethod
    def _format_json(row: view.EventRow | view.LeftOutRow) -> str:
        return render.escape_json(json.dumps(view.build_document(row), ensure_ascii=False))

    def print_left_out(self, watched: "Monitor") -> None:
        """Prints how many events were left out since the last note, if any."""
        count = watched.left_out - self._left_out
        if count <= 0:
            return
        self._left_out += count
        if self._output == Output.JSON:
            row = view.LeftOutRow(view.format_time(time.time()), count)
            print(self._format_json(row), flush=True)
        else:
            print(view.format_left_out(count, self._rate), flush=True)
