# SPDX-License-Identifier: Apache-2.0
"""The status of a node: what the agent reported last, and what the kernel holds without it."""

from typing import Final

import msgspec

from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.model.reasons import Reason
from kbpf.model.status import SourceView, ThreadView
from kbpf.views.columns import Column, format_bool, format_duration, format_number
from kbpf.views.packet_path import availability
from kbpf.views.packet_path.availability import PacketView
from kbpf.views.programs import hook_state

NEEDS: Final = Part.STATUS | Part.HOOKS | availability.NEEDS

HEARTBEAT_TIMEOUT_S: Final = 10.0
"""The agent writes its status every 2 s. After this long without one it counts as down."""


DOWN_STATE_PREFIX: Final = "was "
"""Precedes the state of a watch if the agent is down."""


class StatusView(msgspec.Struct, frozen=True):
    """The status of one agent.

    `ok`: the agent runs and has synced, all needed hooks are attached, no Service port is refused,
    the last change was written, the data plane reports no fault, and the packet path, if it is on,
    is attached to all its devices.

    `running_seconds` is the time since the agent's start, `silent_seconds` since its last status.
    Both are None if there is no status. `mode_reason` and `mode_detail`: why --mode auto could not
    use BPF, or "". `counters` are sums over all CPUs, by reason. Mode ipvs has no hooks, no
    counters and no packet path (`packets` is None).
    """

    ok: bool
    running: bool
    synced: bool
    pin_dir: str
    version: str
    node: str
    mode: str
    mode_requested: str
    mode_reason: str
    mode_detail: str
    pid: int
    running_seconds: float | None
    silent_seconds: float | None
    services: int
    service_ports: int
    refused: int
    applied: int
    last_apply_ms: float
    event_to_map_p50_ms: float
    event_to_map_p99_ms: float
    error: str
    sources: tuple[SourceView, ...]
    threads: tuple[ThreadView, ...]
    hooks_attached: int
    hooks: int
    hooks_missing: tuple[str, ...]
    socket_lb: str
    exempt_cgroups: int
    problem_count: int
    problems: tuple[str, ...]
    disabled_features: tuple[str, ...]
    counters: dict[str, int]
    packets: PacketView | None


def build_view(snapshot: Snapshot) -> StatusView:
    """The whole page. If the agent is down, `running` is false and the rest is its last status."""
    agent_status = snapshot.status
    silence = snapshot.boottime - agent_status.heartbeat if agent_status else None
    running = silence is not None and silence < HEARTBEAT_TIMEOUT_S and snapshot.agent_alive
    states = {f.hook.name: hook_state(f, snapshot.socket_lb) for f in snapshot.hooks}
    missing = tuple(name for name, value in states.items() if value not in ("attached", "off"))
    choice = agent_status.choice if agent_status else None
    packet_path = (
        None if choice is not None and choice.mode == "ipvs" else availability.build_view(snapshot)
    )
    packet_path_ok = packet_path is None or (
        packet_path.state != "failed" and not packet_path.failed_count
    )
    return StatusView(
        ok=bool(
            running
            and agent_status
            and agent_status.synced
            and not missing
            and not agent_status.refused
            and not agent_status.error
            and not agent_status.faults
            and packet_path_ok
        ),
        running=running,
        synced=bool(agent_status and agent_status.synced),
        pin_dir=str(snapshot.pin_dir),
        version=agent_status.version if agent_status else "",
        node=agent_status.node if agent_status else "",
        mode=agent_status.mode if agent_status else "",
        mode_requested=choice.requested if choice else "",
        mode_reason=choice.reason if choice else "",
        mode_detail=choice.detail if choice else "",
        pid=agent_status.pid if agent_status else 0,
        running_seconds=round(snapshot.boottime - agent_status.started, 1)
        if agent_status
        else None,
        silent_seconds=round(silence, 1) if silence is not None else None,
        services=agent_status.services if agent_status else 0,
        service_ports=agent_status.service_ports if agent_status else 0,
        refused=agent_status.refused if agent_status else 0,
        applied=agent_status.applied if agent_status else 0,
        last_apply_ms=agent_status.last_apply_ms if agent_status else 0.0,
        event_to_map_p50_ms=agent_status.event_to_map_p50_ms if agent_status else 0.0,
        event_to_map_p99_ms=agent_status.event_to_map_p99_ms if agent_status else 0.0,
        error=agent_status.error if agent_status else "",
        sources=tuple(
            _source(source, running) for source in (agent_status.sources if agent_status else ())
        ),
        threads=tuple(
            _thread(thread, running) for thread in (agent_status.threads if agent_status else ())
        ),
        hooks_attached=sum(value == "attached" for value in states.values()),
        hooks=sum(not (f.hook.only_counts and f.link is None) for f in snapshot.hooks),
        hooks_missing=missing,
        socket_lb=str(snapshot.socket_lb),
        exempt_cgroups=snapshot.exempt_cgroups,
        problem_count=agent_status.problem_count if agent_status else 0,
        problems=agent_status.problems if agent_status else (),
        disabled_features=agent_status.disabled_features if agent_status else (),
        counters={reason.name.lower(): snapshot.reasons.get(reason, 0) for reason in Reason}
        if packet_path is not None
        else {},
        packets=packet_path,
    )


def _source(source: SourceView, running: bool) -> SourceView:
    """Marks the state as past if the agent is down."""
    if running:
        return source
    return msgspec.structs.replace(source, state=f"{DOWN_STATE_PREFIX}{source.state}")


def _thread(thread: ThreadView, running: bool) -> ThreadView:
    return thread if running else msgspec.structs.replace(thread, alive=False, problem="")


SOURCE_COLUMNS: Final = (
    Column("SOURCE", lambda s: s.name),
    Column("STATE", lambda s: s.state),
    Column(
        "SYNCED", lambda s: "-" if s.state.startswith(DOWN_STATE_PREFIX) else format_bool(s.synced)
    ),
    Column("RESOURCE-VERSION", lambda s: s.resource_version or "-"),
    Column("ERROR", lambda s: s.error or "-"),
)

THREAD_COLUMNS: Final = (
    Column("THREAD", lambda t: t.name),
    Column("STATE", lambda t: t.problem or ("running" if t.alive else "ended")),
    Column("LAST-PROGRESS", lambda t: f"{format_duration(t.idle_seconds)} ago", right=True),
    Column("RESTARTS", lambda t: format_number(t.restarts), right=True),
)

COUNTER_COLUMNS: Final = (
    Column("REASON", lambda c: c[0]),
    Column("COUNT", lambda c: format_number(c[1]), right=True),
    Column("MEANING", lambda c: Reason[c[0].upper()].words),
)
