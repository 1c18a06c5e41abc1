# SPDX-License-Identifier: Apache-2.0
"""`kbpf verify`: compares the API, the desired state that follows from it, and the kernel.

It reads objects as the agent does, by the same sources, and decides by the same policy, but shares
nothing with a running agent. While one runs, changes are under way: between an event and the map,
and between two maps that are read one after the other. So all is read again each second, and a
difference counts only if it stays the same for SETTLE_S although nothing that it depends on has
changed, and the agent's heartbeat shows that it had time to work. What keeps changing is named as
such.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kbpf.agent.host_thread import select_listening
from kbpf.agent.inbox import Inbox, Item, Wake
from kbpf.checks import connect, neighbours
from kbpf.checks.row import Check, CheckRow
from kbpf.dataplane.bpf.inspect import differences, node_differences, snapshot
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.state import contents
from kbpf.dataplane.node import read_node_addresses
from kbpf.errors import NotFoundError
from kbpf.kernel.net import sock_diag
from kbpf.kernel.system import netns, pods
from kbpf.model.address import Addr
from kbpf.model.config import Config
from kbpf.model.desired import FrontendAddress, ServicePortKey
from kbpf.model.events import Event, ObjectKey, Rejected
from kbpf.model.fairness import take_turns
from kbpf.model.inspection import Difference, DifferenceKind, Finding, HookEntry, Inspection, Part, Verification
from kbpf.policy.admission import InUse
from kbpf.policy.compute import DesiredStateBuilder
from kbpf.policy.store import ObjectStore
from kbpf.source.base import Source, wait_until_listed

READ_INTERVAL_S: Final = 1.0
SETTLE_S: Final = 2.5
"""While an agent runs, a difference counts after this time without a change; longer than the grace
period of sets (state/commit.py)."""
UNOWNED_SETTLE_S: Final = 5.0
"""The same for what belongs to no single Service port: entries that are deleted in slices, tables
that are written before their sets, programs on new devices."""
MAX_SILENCE_S: Final = 3.0
"""The agent writes a heartbeat every two seconds. After a longer silence it may not have caught up
yet, so differences have to settle again."""
MAX_SECONDS: Final = 20.0
"""Then what still changes is reported as changing, and an agent without a heartbeat is no longer
waited for."""
MAX_CHANGING: Final = 20
"""Changing Service ports that are named."""


@dataclass(slots=True)
class _Reading:
    """One reading of the kernel; `complete`: whether all maps could be read."""

    findings: list[Finding] = field(default_factory=list)
    entries: int = 0
    complete: bool = False


class Verifier:
    """Verifies one node, once. `make_sources` as for Agent. Call run()."""

    def __init__(self, config: Config, make_sources: Callable[[Callable[[Item], None]], Sequence[Source]]) -> None:
        self._config, self._pins = config, Pins(config.pin_dir)
        self._inbox = Inbox()
        self._sources = make_sources(self._inbox.put)
        self._store = ObjectStore(config.node_name, config.bind_address)
        self._builder = DesiredStateBuilder()
        self._api_servers: tuple[tuple[Addr, int], ...] = ()
        self._inputs: tuple[object, ...] = ()
        self._changed_at: dict[ServicePortKey | None, float] = {}
        self._heartbeat = self._resumed = 0.0
        self._rejected: dict[ObjectKey, str] = {}

    def on_api_connect(self, _: int, address: Addr, port: int) -> None:
        """Called before a connection to an API server is opened, in any thread: no Service can
        take its address and port.
        """
        if (address, port) not in self._api_servers:
            self._api_servers = (*self._api_servers, (address, port))

    def run(self) -> tuple[list[Difference], Verification]:
        """The differences, and what was compared. Raises SourceError if the objects cannot be
        listed, NotFoundError if nothing is pinned, and KernelError if the kernel cannot be read.
        """
        inspection = snapshot.read(self._config.pin_dir, Part.STATUS)
        is_alive = inspection.agent_alive
        self._refuse_other_netns()
        try:
            for source in self._sources:
                source.start()
            wait_until_listed(self._sources)
            self._take(0.0)
            confirmed, changing, readings, last = self._read_until_settled(is_alive)
            failures, proven, notes = self._prove(last)
        finally:
            for source in self._sources:
                source.stop()
        differences = confirmed + failures
        return differences, Verification(
            not differences,
            len(differences),
            len(self._builder.state.services),
            last.entries,
            proven,
            readings,
            tuple(take_turns(sorted(changing), lambda s: s.partition("/")[0])[:MAX_CHANGING]),
            (*_describe_agent(inspection), *self._describe_rejected(), *notes),
        )

    # ---- the API -------------------------------------------------------------------------------

    def _take(self, timeout: float) -> None:
        """Takes events that have arrived, and computes what they change."""
        events: list[Event] = []
        while items := self._inbox.get_batch(0.0 if events else timeout):
            events += [item for item in items if not isinstance(item, Wake)]
        touched = self._store.apply(events)
        for event in events:
            if isinstance(event, Rejected):
                self._rejected[event.key] = event.error
            elif hasattr(event, "key"):
                self._rejected.pop(event.key, None)
        listeners = sock_diag.list_listeners()
        inputs = (read_node_addresses(), self._api_servers, listeners)
        touched.all_services = touched.all_services or inputs[0] != (self._inputs or inputs)[0]
        for _ in range(2):  # the frontends that devices have are known only after the first
            ports = self._select_device_ports(listeners)
            in_use = InUse(self._api_servers, listeners, ports)
            changed = self._builder.update(self._store, touched, inputs[0], self._config, in_use)
            now = time.monotonic()
            self._changed_at |= dict.fromkeys(changed, now)
            if self._select_device_ports(listeners) == ports:
                break
        if inputs[:2] != self._inputs[:2]:
            self._changed_at[None] = time.monotonic()
        self._inputs = inputs

    def _select_device_ports(self, listeners: frozenset[FrontendAddress]) -> frozenset[FrontendAddress]:
        return select_listening(self._builder.device_frontends, listeners)

    def _describe_rejected(self) -> Iterator[str]:
        for key in take_turns(self._rejected, lambda key: key.namespace)[:MAX_CHANGING]:
            error = self._rejected[key]
            yield f"{key} cannot be read, and the agent may serve an earlier version: {error}"

    # ---- the kernel ----------------------------------------------------------------------------

    def _refuse_other_netns(self) -> None:
        cookie = netns.read_cookie()
        agents = snapshot.read(self._config.pin_dir, Part.HOOKS).host_netns
        if cookie is not None and agents not in (0, cookie):
            raise NotFoundError(
                "the agent's node is in another network namespace",
                str(self._config.pin_dir),
                "run it there: nsenter --net=/proc/PID/ns/net kbpf verify",
            )

    def _read(self) -> _Reading:
        """Compares the kernel with the desired state, once."""
        reading, desired = _Reading(), self._builder.state
        with contextlib.ExitStack() as stack:
            maps, damaged = node_differences.open_maps(self._pins, stack)
            reading.findings = [Finding(None, difference) for difference in damaged]
            if maps.keys() >= {*contents.MAPS_READ}:
                found = contents.read(maps)
                reading.findings += differences.compare(found, desired, self._config)
                reading.entries = sum(found.counts.values())
            if maps.keys() >= {*node_differences.MAPS_COMPARED}:
                node = node_differences.read_contents(self._pins, maps)
                reading.complete = not damaged
                reading.findings += (
                    Finding(None, difference)
                    for difference in (
                        *node_differences.compare(node, desired, self._config),
                        *node_differences.compare_maps_in_use(self._pins, maps),
                    )
                )
        return reading

    def _read_until_settled(self, is_alive: bool) -> tuple[list[Difference], set[str], int, _Reading]:
        """The differences that all readings agree on, the Service ports that differed in each
        reading, but never for long in the same way, the number of readings, and the last one.
        """
        start, count = time.monotonic(), 0
        candidates: set[Finding] = set()
        differing: set[str] = set()
        while True:
            self._take(0.0)
            began, heartbeat = time.monotonic(), self._read_heartbeat()
            reading, count = self._read(), count + 1
            self._take(0.0)
            findings = dict.fromkeys(reading.findings)
            names = set(map(_name, findings))
            # Those that appear later are changes that began later.
            candidates = candidates & findings.keys() if count > 1 else set(findings)
            differing = differing & names if count > 1 else names
            now = time.monotonic()
            is_over = now - start >= MAX_SECONDS
            settled_until = now if is_over or not is_alive else heartbeat
            begin = max(start, self._resumed)
            pending = {
                finding
                for finding in candidates
                if settled_until - max(begin, self._changed_at.get(finding.owner, 0.0))
                < self._settle_seconds(finding, is_alive)
            }
            if not pending or is_over:
                break
            self._take(READ_INTERVAL_S)
            time.sleep(max(0.0, began + READ_INTERVAL_S - time.monotonic()))
        confirmed = [finding for finding in findings if finding in candidates - pending]
        changing = differing - set(map(_name, confirmed)) if is_alive else set()
        return [finding.difference for finding in confirmed], changing, count, reading

    def _read_heartbeat(self) -> float:
        """When the agent's last heartbeat was written, as time.monotonic(). Sets `_resumed` if it
        followed a silence.
        """
        inspection = snapshot.read(self._config.pin_dir, Part.STATUS)
        heartbeat = time.monotonic() - inspection.silence
        if heartbeat - self._heartbeat > MAX_SILENCE_S:
            self._resumed = heartbeat
        self._heartbeat = heartbeat
        return heartbeat

    def _settle_seconds(self, finding: Finding, is_alive: bool) -> float:
        if not is_alive:
            return 0.0  # nothing is under way
        settle = SETTLE_S if finding.owner is not None else UNOWNED_SETTLE_S
        return settle + self._config.min_sync_period

    # ---- connections and packets ---------------------------------------------------------------

    def _prove(self, last: _Reading) -> tuple[list[Difference], int, list[str]]:
        """Tries connections from the host's cgroup and from one of Pods, and packets on devices.
        What fails is tried again, since its backends may just have changed.
        """
        if not last.complete:
            return [], 0, ["no connection was tried: not all maps can be read"]
        rows = self._try_all()
        if any(row.result == "no" for _, row in rows):
            failed = {(where, row.name) for where, row in rows if row.result == "no"}
            again = {(where, row.name): row for where, row in self._try_all()}
            rows = [
                (where, again.get((where, row.name), row) if (where, row.name) in failed else row)
                for where, row in rows
            ]
        failures = [
            Difference(DifferenceKind.UNREACHED, where, row.name, "", row.detail, row.advice)
            for where, row in rows
            if row.result == "no"
        ]
        notes = [f"{row.name} {where} was not tried: {row.detail}" for where, row in rows if row.result == "unknown"]
        return failures, sum(row.result == "yes" for _, row in rows), notes

    def _try_all(self) -> list[tuple[str, CheckRow]]:
        inspection = snapshot.read(self._config.pin_dir, connect.NEEDS)
        rows = [
            (f"from the cgroup {place}", row)
            for place, parent in self._list_places(inspection.hooks)
            for row in connect.check_attached(inspection, parent)
            if row.name != Check.ATTACHED
        ]
        rows += (("on a device", row) for row in neighbours.packet_rows(inspection))
        return rows

    def _list_places(self, hooks: Sequence[HookEntry]) -> Iterator[tuple[str, Path | None]]:
        """The cgroups that clients run in: the hooked one, and the parent of those of Pods."""
        hooked = next((Path(hook.cgroup) for hook in hooks if hook.cgroup), None)
        yield "of the host", None
        if hooked is not None and os.access(hooked, os.W_OK):
            parent = pods.find_parent_of_pods(hooked)
            if parent is not None:
                yield "of Pods", parent


def _describe_agent(inspection: Inspection) -> Iterator[str]:
    """What a running agent itself says of differences that are to be expected."""
    status = inspection.status
    if status is None or not inspection.agent_alive:
        return
    if not status.synced:
        yield "the agent has not programmed everything yet: see `kbpf inspect status`"
    if status.refused:
        yield (
            f"{status.refused} Service ports are not programmed as desired, since a limit is "
            "reached: see the problems of `kbpf inspect status`"
        )


def _name(finding: Finding) -> str:
    """What a finding is about, without what is different there."""
    return str(finding.owner or f"the map {finding.difference.where}")
