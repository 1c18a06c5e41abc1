# SPDX-License-Identifier: Apache-2.0
"""Watches events as they happen: new connections, refusals, drops, evictions and failures.

The programs write those with the wanted reasons to a ring buffer of this process (bpf/monitor.h),
up to a rate; the other filters are applied here. This needs no agent. If this process is killed,
the programs ignore it LIFETIME_S later; its ring buffer stays until another one begins.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Self

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.inspect.failures import REASONS
from kbpf.dataplane.bpf.maps.layout import (
    ENDPOINT_KEY,
    EVENT,
    MONITOR,
    MONITOR_RINGS,
    MONITORS,
    U32,
    U64,
    unpack_endpoint_name,
    unpack_service_name,
)
from kbpf.dataplane.bpf.state.contents import unpack_address, unpack_backend
from kbpf.errors import CapacityError, NotFoundError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.bpf.ring_buffer import RingBuffer
from kbpf.kernel.system.pods import ClientNames
from kbpf.model.inspection import ConnectionEvent, EventFilter, ServicePort

RENEWAL_S: Final = 1.0
LIFETIME_S: Final = 4.0
"""renew() is to be called every RENEWAL_S; without it the programs stop after LIFETIME_S."""
RING_BYTES: Final = 256 << 10
"""Room for 2,700 events."""
EVERY_MONITOR: Final = U32.pack(MONITORS)
"""The key of `monitored_until` that says until when any process watches."""
MAP_NAMES: Final = ("monitored_until", "monitors", MONITOR_RINGS.name)
UNFILTERED_RATE: Final = 10_000
"""Events a second that the programs write if a filter is applied here, whatever the rate."""
MAX_NAMES: Final = 10_000
"""From this number on, the names of Services are read again."""


class Monitor:
    """Watches until it is closed. `rate`: at most this many events a second."""

    def __init__(self, pin_dir: Path, rate: int, event_filter: EventFilter) -> None:
        """Raises NotFoundError if nothing is pinned, and CapacityError if MONITORS others watch."""
        self._pins = snapshot.find_pins(pin_dir)
        self._rate, self._filter = rate, event_filter
        self._clients, self._services = ClientNames(), dict[int, ServicePort]()
        self._pods = dict[bytes, str]()
        self._index, self._left_out = -1, 0
        self._tokens, self._limited_at = float(rate), time.monotonic()
        with ExitStack() as stack:
            self._folder = os.open(self._pins.maps, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, self._folder)
            self._maps: Mapping[str, Map] = {name: stack.enter_context(self._pins.open_map(name)) for name in MAP_NAMES}
            self.ring = stack.enter_context(RingBuffer("monitor_events", RING_BYTES))
            stack.callback(self._release)
            self.renew()
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops watching; programs do nothing any more unless another process watches."""
        self._stack.close()

    # ---- what the programs see -------------------------------------------------------------------

    def renew(self) -> None:
        """Tells the programs that this process still watches. Raises NotFoundError if another agent
        has replaced the maps.
        """
        if not os.fstat(self._folder).st_nlink:
            raise NotFoundError(
                "the maps of the agent have been replaced or removed", str(self._pins.maps), "start this command again"
            )
        with self._locked():
            if not self._is_ours():
                self._claim()
            until = U64.pack(time.monotonic_ns() + int(LIFETIME_S * 1e9))
            self._maps["monitored_until"].update(U32.pack(self._index), until)
            self._maps["monitored_until"].update(EVERY_MONITOR, until)

    def set_filter(self, event_filter: EventFilter) -> None:
        """Replaces the filter."""
        with self._locked():
            before, self._filter = self._filter, event_filter
            if self._is_ours() and event_filter != before:
                self._write_settings()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Excludes other processes that watch. The lock ends with the process."""
        fcntl.flock(self._folder, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._folder, fcntl.LOCK_UN)

    def _is_ours(self) -> bool:
        """Whether our ring buffer is in its place: another process takes the place of one that was
        stopped for longer than LIFETIME_S.
        """
        if self._index < 0:
            return False
        ring_id = self._maps[MONITOR_RINGS.name].lookup(U32.pack(self._index))
        return ring_id == U32.pack(self.ring.map.id)

    def _claim(self) -> None:
        """Takes a free place, and removes what killed processes have left in all of them."""
        now = time.monotonic_ns()
        free = [index for index in range(MONITORS) if self._until(index) <= now]
        if not free:
            raise CapacityError(
                f"{MONITORS} commands watch events on this node already",
                str(self._pins.root),
                "end one of them: `kbpf monitor`, or `kbpf top --by clients`",
            )
        for index in free:
            self._clear(index)
        self._index = free[0]
        self._maps[MONITOR_RINGS.name].update(U32.pack(self._index), U32.pack(self.ring.map.fd))
        self._write_settings()

    def _release(self) -> None:
        with self._locked():
            if not self._is_ours():
                return
            self._clear(self._index)
            latest = max(map(self._until, range(MONITORS)))
            latest = latest if latest > time.monotonic_ns() else 0
            self._maps["monitored_until"].update(EVERY_MONITOR, U64.pack(latest))

    def _until(self, index: int) -> int:
        (until,) = U64.unpack(self._maps["monitored_until"].lookup(U32.pack(index)) or bytes(8))
        return int(until)

    def _clear(self, index: int) -> None:
        self._maps["monitored_until"].update(U32.pack(index), U64.pack(0))
        self._maps[MONITOR_RINGS.name].delete(U32.pack(index))
        self._maps["monitors"].update(U32.pack(index), bytes(MONITOR.size))

    def _write_settings(self) -> None:
        self._left_out += self._read_left_out()
        rate = max(self._rate, UNFILTERED_RATE) if self._filters_here() else self._rate
        reasons = sum(1 << reason for reason in self._filter.reasons)
        settings = (0, 10**9 // rate, rate, 0, reasons)
        self._maps["monitors"].update(U32.pack(self._index), MONITOR.pack(*settings))

    def _filters_here(self) -> bool:
        return self._filter != EventFilter(self._filter.reasons)

    # ---- what this process reads -----------------------------------------------------------------

    @property
    def left_out(self) -> int:
        """How many events were not shown so far, since they were above the rate."""
        return self._left_out + self._read_left_out()

    def _read_left_out(self) -> int:
        raw = self._maps["monitors"].lookup(U32.pack(self._index))
        return int(MONITOR.unpack(raw or bytes(MONITOR.size))[3])

    def read(self) -> list[ConnectionEvent]:
        """The events since the last call."""
        values = [EVENT.unpack(record) for record in self.ring.read()]
        self._pods.clear()  # another Pod may get the address
        self._clients.learn(value[1] for value in values)
        offset = time.time() - time.monotonic()
        events = (self._build_event(value, offset) for value in values)
        admitted = [event for event in events if self._filter.admits(event)]
        return self._limit(admitted) if self._filters_here() else admitted

    def _limit(self, events: list[ConnectionEvent]) -> list[ConnectionEvent]:
        """As many of them as the rate allows; the others count as left out."""
        now = time.monotonic()
        self._tokens = min(self._rate, self._tokens + self._rate * (now - self._limited_at))
        self._limited_at = now
        shown = events[: int(self._tokens)]
        self._tokens -= len(shown)
        self._left_out += len(events) - len(shown)
        return shown

    def _build_event(
        self, value: tuple[int, int, bytes, bytes, bytes, int, int, int], offset: float
    ) -> ConnectionEvent:
        when, cgroup, client, frontend, backend, service, _, reason = value
        path, pod = self._clients.describe(cgroup)
        return ConnectionEvent(
            when / 1e9 + offset,
            REASONS[reason],
            self._find_service(service),
            unpack_address(frontend),
            unpack_backend(backend) if any(backend) else None,
            unpack_address(client) if any(client) else None,
            cgroup,
            path,
            pod,
            self._find_pod(service, backend) if any(backend) else "",
        )

    def _find_service(self, number: int) -> ServicePort:
        if number not in self._services:
            raw = self._look_up("service_names", U32.pack(number)) if number else None
            if len(self._services) >= MAX_NAMES:
                self._services.clear()
            name = unpack_service_name(raw) if raw else None
            self._services[number] = ServicePort(number, name)
        return self._services[number]

    def _find_pod(self, service: int, backend: bytes) -> str:
        """``namespace/name`` of the Pod of a backend; "" if it is not known."""
        key = ENDPOINT_KEY.pack(service, backend)
        if key not in self._pods:
            raw = self._look_up("endpoint_names", key)
            pod = unpack_endpoint_name(raw)[0] if raw else ""
            name = self._find_service(service).key
            self._pods[key] = f"{name.namespace}/{pod}" if pod and name else ""
        return self._pods[key]

    def _look_up(self, name: str, key: bytes) -> bytes | None:
        """From the map that is pinned now: the agent replaces it by a larger one when it grows."""
        with self._pins.open_map(name) as map_:
            return map_.lookup(key)
