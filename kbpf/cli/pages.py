# SPDX-License-Identifier: Apache-2.0
"""The pages of `kbpf inspect` that are more than one table: service, status, nat and sources."""

from collections.abc import Iterable, Iterator, Sequence

from kbpf.cli import render
from kbpf.views import sources as sources_view
from kbpf.views import status as status_view
from kbpf.views.columns import format_duration
from kbpf.views.packet_path import availability as packets_view
from kbpf.views.packet_path import nat as nat_view
from kbpf.views.packet_path.availability import PacketView
from kbpf.views.packet_path.nat import NatView
from kbpf.views.service import (
    BACKEND_COLUMNS,
    FRONTEND_COLUMNS,
    TRAFFIC_COLUMNS,
    TRAFFIC_COUNTERS,
    ServiceDetail,
    SetRow,
)
from kbpf.views.sources import SourcesView
from kbpf.views.status import StatusView


def format_service(details: Iterable[ServiceDetail]) -> str:
    """Each Service port: policies, frontends, backend sets with their members, traffic."""
    return "\n\n".join("\n".join(_service_lines(detail)) for detail in details)


def _service_lines(detail: ServiceDetail) -> Iterator[str]:
    row = detail.service
    port = f", port {row.port}" if row.port else ""
    yield f"{row.full_name}{port}, {row.protocol}, IPv{row.family}"
    affinity = f"ClientIP, {row.affinity_seconds} s" if row.affinity_seconds else "none"
    yield render.indent(
        render.format_facts(
            (
                ("service id", str(row.id)),
                ("internal policy", row.internal_policy),
                ("external policy", row.external_policy),
                ("algorithm", row.algorithm),
                ("affinity", affinity),
            )
        )
    )
    yield render.indent(render.format_table(row.frontends, FRONTEND_COLUMNS))
    yield from _set_lines("cluster", detail.cluster)
    if row.backends_local is not None:
        yield from _set_lines("local", detail.local)
    if detail.traffic:
        yield "  connections since counting began"
        yield render.indent(render.format_table(detail.traffic, TRAFFIC_COLUMNS), "    ")
        if detail.not_counted:
            titles = ", ".join(TRAFFIC_COUNTERS[name].title for name in detail.not_counted)
            yield f"    not counted: {titles}; --accounting full"


def _set_lines(name: str, sets: Sequence[SetRow]) -> Iterator[str]:
    if not sets:
        yield f"  {name} set: empty"
    for set_row in sets:
        missing = f", {set_row.missing} MISSING" if set_row.missing else ""
        slots = f" in {set_row.size} slots" if set_row.size > len(set_row.backends) else ""
        yield f"  {name} set {set_row.id}: {len(set_row.backends)} backends{slots}{missing}"
        yield render.indent(render.format_table(set_row.backends, BACKEND_COLUMNS), "    ")


def format_status(view: StatusView) -> str:
    """The agent, its watches and threads, problems, the packet path, and the programs' counters."""
    parts = [render.format_facts(_agent_facts(view))]
    if view.sources:
        parts.append(render.format_table(view.sources, status_view.SOURCE_COLUMNS))
    if view.threads:
        parts.append(render.format_table(view.threads, status_view.THREAD_COLUMNS))
    if view.problems:
        more = view.problem_count - len(view.problems)
        lines = [*view.problems, *([f"and {more} more"] if more > 0 else [])]
        parts.append("problems\n" + render.indent("\n".join(lines)))
    if view.packets is not None:
        parts += _packet_path_parts(view.packets)
        parts.append(render.format_table(view.counters.items(), status_view.COUNTER_COLUMNS))
    return "\n\n".join(parts)


def _packet_path_parts(view: PacketView) -> Iterator[str]:
    yield "packet path\n" + render.indent(render.format_facts(_packet_path_facts(view)))
    if view.failed:
        more = view.failed_count - len(view.failed)
        yield render.format_table(view.failed, packets_view.FAILURE_COLUMNS) + (
            f"\nand {more} more devices" if more > 0 else ""
        )


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
            "yes"
            if view.synced
            else "no: a source has not delivered a complete list, or a device has no programs yet",
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
    if view.disabled_features:
        yield "disabled", "; ".join(view.disabled_features)
    if view.error:
        yield "error", view.error
    if view.problem_count:
        yield "problems", str(view.problem_count)


def _packet_path_facts(view: PacketView) -> Iterator[tuple[str, str]]:
    yield "state", f"{view.state}: {view.reason}" if view.reason else view.state
    if view.state == "off":
        return
    failed_note = f", NOT on {view.failed_count}" if view.failed_count else ""
    yield "devices", f"{view.host_devices} host, {view.pod_devices} pod{failed_note}"
    alarm = " ! raise --max-connections" if view.alarm else ""
    yield "connections", f"{view.connections} of at most {view.max_connections}{alarm}"
    yield "entries", f"{view.entries}, including closed and expired connections"
    lost_note = f"; {view.entries_lost} no longer have an entry" if view.entries_lost else ""
    yield "created", f"{view.created} since the counters started{lost_note}"
    evicted = "connections in use, normally UDP, for new ones"
    yield "evicted", f"{view.evicted} {evicted}" if view.evicted else "0"


def format_nat(view: NatView) -> str:
    """The node's addresses and ports for SNAT, and how many ports are in use for each backend."""
    ports = f"{view.first_port} to {view.last_port} ({view.ports})" if view.ports else "none"
    facts_text = render.format_facts(
        (
            ("node addresses", ", ".join(view.addresses) or "none"),
            ("ports", ports),
            ("no free port", f"{view.failures} packets dropped"),
        )
    )
    return f"{facts_text}\n\n{render.format_table(view.usage, nat_view.USAGE_COLUMNS)}"


def format_sources(view: SourcesView, wide: bool = False) -> str:
    """The allowed client networks of Services, and which clients count as pods of this node."""
    facts_text = render.format_facts(
        (
            ("dropped", f"{view.not_allowed} packets from clients outside the source ranges"),
            ("local sockets", f"{view.left_alone} connections left to the packet path"),
            ("local pods", _format_pods(view)),
        )
    )
    return f"{facts_text}\n\n{render.format_table(view.services, sources_view.COLUMNS, wide)}"


def _format_pods(view: SourcesView) -> str:
    devices = f"clients behind {view.local_devices} devices"
    if not view.pods:
        return f"{devices}; ClusterIPs do not masquerade other clients"
    if view.pods == "networks":
        return ", ".join(view.local_networks) or "no networks"
    return devices


def _format_latency(view: StatusView) -> str:
    median, p99 = view.event_to_map_p50_ms, view.event_to_map_p99_ms
    return f"median {median:g} ms, 99th percentile {p99:g} ms" if p99 else "none yet"


def _format_running(view: StatusView) -> str:
    if view.running_seconds is None or view.silent_seconds is None:
        return "no status here that this version can read"
    if view.running:
        return f"running for {format_duration(view.running_seconds)} (pid {view.pid})"
    return f"down: last status {format_duration(view.silent_seconds)} ago (pid {view.pid})"
