# SPDX-License-Identifier: Apache-2.0
"""Events of a data plane, as `kbpf monitor` shows them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

from kbpf.dataplane.bpf.inspect.monitor import MAP_NAMES, Monitor
from kbpf.dataplane.bpf.maps.layout import MONITORS, U32, U64
from kbpf.model.inspection import EventFilter
from kbpf.views.monitor import EventRow, build_row
from tests.support.plane import Site

RATE = 1000
ALL = EventFilter()


def patient() -> AbstractContextManager[object]:
    """Monitors of this process are served for an hour after their last renewal: tests do not renew
    them, and a busy machine may stop a test for longer than LIFETIME_S.
    """
    return patch("kbpf.dataplane.bpf.inspect.monitor.LIFETIME_S", 3600.0)


@contextmanager
def watched(site: Site, rate: int = RATE, admitted: EventFilter = ALL) -> Iterator[Monitor]:
    """Watches events."""
    with patient(), Monitor(site.pins, rate, admitted) as monitor:
        yield monitor


def read(monitor: Monitor) -> list[EventRow]:
    """The events since the last call. The programs write an event before their system call or
    packet ends.
    """
    return [build_row(event) for event in monitor.read()]


def read_reasons_and_ends(monitor: Monitor) -> list[tuple[str, str, str]]:
    """Verdict, reason and the client's address of the same."""
    return [(event.verdict, event.reason, event.address) for event in read(monitor)]


def left_behind(site: Site) -> list[str]:
    """What a command that watched has left in the kernel."""
    found = []
    until, _, rings = MAP_NAMES
    with site.pinned(until) as map_:
        times = [map_.lookup(U32.pack(index)) for index in range(MONITORS + 1)]
        found += [f"{until} {index}" for index, time in enumerate(times) if time != U64.pack(0)]
    with site.pinned(rings) as map_:
        return found + [f"{rings} {i}" for i in range(MONITORS) if map_.lookup(U32.pack(i))]
