# SPDX-License-Identifier: Apache-2.0
"""The status of a node: what the agent reported last, and what the kernel holds without it."""

from collections.abc import Iterator
from typing import Final

import msgspec

from kbpf.model.inspection import Inspection, Part
from kbpf.model.reasons import Reason
from kbpf.model.status import AgentStatus, ModeChoice, SourceView, ThreadView
from kbpf.views.packet_path import availability
from kbpf.views.packet_path.availability import PacketView
from kbpf.views.page import (
    Column,
    Kind,
    Page,
    format_duration,
    format_facts,
    format_table,
    format_value,
    indent,
    same_fields,
)
from kbpf.views.programs import hook_state

NEEDS: Final = Part.STATUS | Part.HOOKS | Part.KUBE_PROXY | availability.NEEDS

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
    left_to_node: tuple[str, ...]
    kube_proxy: str
    counters: dict[str, int]
    packets: PacketView | None


NO_STATUS: Final = AgentStatus(
    version="",
    pid=0,
    mode="",
    node="",
    started=0.0,
    heartbeat=0.0,
    synced=False,
    services=0,
    service_ports=0,
    applied=0,
    last_apply_ms=0.0,
    event_to_map_p50_ms=0.0,
    event_to_map_p99_ms=0.0,
    sources=(),
    problems=(),
    problem_count=0,
)


def is_running(inspection: Inspection) -> bool:
    """Whether the agent runs. Needs Part.STATUS."""
    has_status = inspection.status is not None and inspection.agent_alive
    return has_status and inspection.silence < HEARTBEAT_TIMEOUT_S


def describe_age(inspection: Inspection) -> str:
    """How old what is programmed is, if the agent is down; otherwise "". Needs Part.STATUS."""
    if inspection.status is None or is_running(inspection):
        return ""
    age = format_duration(max(0.0, inspection.silence))
    return f"the agent is down: this is what it had programmed {age} ago"


def build_view(inspection: Inspection) -> StatusView:
    """The whole page. If the agent is down, `running` is false and the rest is its last status."""
    has_status, status = inspection.status is not None, inspection.status or NO_STATUS
    running = is_running(inspection)
    if not running:
        replace = msgspec.structs.replace
        sources = tuple(replace(source, state=f"{DOWN_STATE_PREFIX}{source.state}") for source in status.sources)
        threads = tuple(replace(thread, alive=False, problem="") for thread in status.threads)
        status = replace(status, sources=sources, threads=threads)
    choice = status.choice or ModeChoice("", "")
    states = {hook.name: hook_state(hook, inspection.socket_lb) for hook in inspection.hooks}
    missing = tuple(name for name, state in states.items() if state not in ("attached", "off"))
    packets = None if choice.mode == "ipvs" else availability.build_view(inspection)
    return StatusView(
        ok=running
        and status.synced
        and not (missing or status.refused or status.error or status.faults)
        and (packets is None or (packets.state != "failed" and not packets.failed_count)),
        running=running,
        pin_dir=inspection.location,
        mode_requested=choice.requested,
        mode_reason=choice.reason,
        mode_detail=choice.detail,
        running_seconds=round(inspection.boottime - status.started, 1) if has_status else None,
        silent_seconds=round(inspection.silence, 1) if has_status else None,
        hooks_attached=sum(state == "attached" for state in states.values()),
        hooks=sum(not (hook.only_counts and hook.link is None) for hook in inspection.hooks),
        hooks_missing=missing,
        socket_lb=str(inspection.socket_lb),
        exempt_cgroups=len(inspection.exempt_ids),
        kube_proxy=inspection.kube_proxy,
        counters={reason.name.lower(): inspection.reasons.get(reason, 0) for reason in Reason}
        if packets is not None
        else {},
        **{**same_fields(StatusView, status), "packets": packets},
    )


SOURCE_COLUMNS: Final = (
    Column("SOURCE", "name"),
    Column("STATE", "state"),
    Column("SYNCED", lambda s: "-" if s.state.startswith(DOWN_STATE_PREFIX) else format_value(s.synced)),
    Column("RESOURCE-VERSION", "resource_version"),
    Column("ERROR", "error"),
)

THREAD_COLUMNS: Final = (
    Column("THREAD", "name"),
    Column("STATE", lambda t: t.problem or ("running" if t.alive else "ended")),
    Column("LAST-PROGRESS", lambda t: f"{format_duration(t.idle_seconds)} ago", right=True),
    Column("RESTARTS", "restarts", right=True),
)

COUNTER_COLUMNS: Final = (
    Column("REASON", lambda c: c[0]),
    Column("COUNT", lambda c: format_value(c[1]), right=True),
    Column("MEANING", lambda c: Reason[c[0].upper()].words),
)


# ---- the page ------------------------------------------------------------------------------------


KIND: Final = Kind("Status", summary=StatusView)


def build_page(inspection: Inspection) -> Page:
    view = build_view(inspection)
    return Page(KIND, text=lambda wide: format_page(view), summary=view, ok=view.ok)


def format_page(view: StatusView) -> str:
    """The agent, its watches and threads, problems, the packet path, and the programs' counters."""
    parts = [format_facts(_agent_facts(view))]
    if view.sources:
        parts.append(format_table(view.sources, SOURCE_COLUMNS))
    if view.threads:
        parts.append(format_table(view.threads, THREAD_COLUMNS))
    if view.problems:
        more = view.problem_count - len(view.problems)
        lines = [*view.problems, *([f"and {more} more"] if more > 0 else [])]
        parts.append("problems\n" + indent("\n".join(lines)))
    if view.packets is not None:
        parts += availability.format_parts(view.packets)
        parts.append(format_table(view.counters.items(), COUNTER_COLUMNS))
    return "\n\n".join(parts)


def _agent_facts(view: StatusView) -> Iterator[tuple[str, str]]:
    yield "agent", _format_running(view)
    if view.version:
        yield "node", view.node
        requested = f", requested: {view.mode_requested}" if view.mode_requested else ""
        yield "mode", f"{view.mode}{requested} (kbpf {view.version})"
        if view.mode_reason:
            yield "not bpf", f"{view.mode_reason}: {view.mode_detail}"
        yield (
            "synced",
            "yes" if view.synced else "no: a source has not delivered a complete list, or a device has no programs yet",
        )
        refused = f"; {view.refused} of them NOT PROGRAMMED" if view.refused else ""
        yield "services", f"{view.services} ({view.service_ports} Service ports{refused})"
        yield "applied", f"{view.applied} passes, the last one took {view.last_apply_ms:g} ms"
        yield "event to map", _format_latency(view)
    if view.packets is not None:
        missing = f"; missing: {', '.join(view.hooks_missing)}" if view.hooks_missing else ""
        yield "hooks", f"{view.hooks_attached} of {view.hooks} attached{missing}"
        exempt = f", except {view.exempt_cgroups} exempt cgroups" if view.exempt_cgroups else ""
        yield "socket-lb", f"{view.socket_lb}{exempt}"
    yield "pins" if view.packets is not None else "state", view.pin_dir
    if view.left_to_node:
        yield "left to node", "; ".join(view.left_to_node)
    if view.kube_proxy:
        yield "kube-proxy", view.kube_proxy
    if view.disabled_features:
        yield "disabled", "; ".join(view.disabled_features)
    if view.error:
        yield "error", view.error
    if view.problem_count:
        yield "problems", str(view.problem_count)


def _format_latency(view: StatusView) -> str:
    median, p99 = view.event_to_map_p50_ms, view.event_to_map_p99_ms
    return f"median {median:g} ms, 99th percentile {p99:g} ms" if p99 else "none yet"


def _format_running(view: StatusView) -> str:
    if view.running_seconds is None or view.silent_seconds is None:
        return "no status here that this version can read"
    if view.running:
        return f"running for {format_duration(view.running_seconds)} (pid {view.pid})"
    return f"down: last status {format_duration(view.silent_seconds)} ago (pid {view.pid})"
