"""What is more than one table: a Service in full, and how the agent is doing."""

from collections.abc import Iterable, Iterator, Sequence

from kbpf.cli import render
from kbpf.views import sources as sources_view
from kbpf.views import status as status_view
from kbpf.views.columns import span
from kbpf.views.packet_path import availability as packets_view
from kbpf.views.packet_path import nat as nat_view
from kbpf.views.packet_path.availability import PacketView
from kbpf.views.packet_path.nat import NatView
from kbpf.views.service import (
    BACKEND_COLUMNS,
    COUNTED,
    FRONTEND_COLUMNS,
    TRAFFIC_COLUMNS,
    ServiceDetail,
    SetRow,
)
from kbpf.views.sources import SourcesView
from kbpf.views.status import StatusView


def service(details: Iterable[ServiceDetail]) -> str:
    """Each Service port: its policies, its frontends, its sets and who is in them."""
    return "\n\n".join("\n".join(_service(detail)) for detail in details)


def _service(detail: ServiceDetail) -> Iterator[str]:
    row = detail.service
    port = f", port {row.port}" if row.port else ""
    yield f"{row.full_name}{port}, {row.protocol}, IPv{row.family}"
    affinity = f"ClientIP, {row.affinity_seconds} s" if row.affinity_seconds else "none"
    yield render.indent(
        render.facts(
            (
                ("service id", str(row.id)),
                ("internal policy", row.internal_policy),
                ("external policy", row.external_policy),
                ("algorithm", row.algorithm),
                ("affinity", affinity),
            )
        )
    )
    yield render.indent(render.table(row.frontends, FRONTEND_COLUMNS))
    yield from _sets("cluster", detail.cluster)
    if row.backends_local is not None:
        yield from _sets("local", detail.local)
    if detail.traffic:
        yield "  connections since counting began"
        yield render.indent(render.table(detail.traffic, TRAFFIC_COLUMNS), "    ")
        if detail.not_counted:
            titles = ", ".join(COUNTED[name].title for name in detail.not_counted)
            yield f"    not counted: {titles}; --accounting full"


def _sets(name: str, sets: Sequence[SetRow]) -> Iterator[str]:
    if not sets:
        yield f"  {name} set: empty"
    for one in sets:
        missing = f", {one.missing} MISSING" if one.missing else ""
        slots = f" in {one.size} slots" if one.size > len(one.backends) else ""
        yield f"  {name} set {one.id}: {len(one.backends)} backends{slots}{missing}"
        yield render.indent(render.table(one.backends, BACKEND_COLUMNS), "    ")


def status(view: StatusView) -> str:
    """The agent, its sources, its hooks, what is wrong, and what the programs counted."""
    parts = [render.facts(_agent(view))]
    if view.sources:
        parts.append(render.table(view.sources, status_view.SOURCE_COLUMNS))
    if view.threads:
        parts.append(render.table(view.threads, status_view.THREAD_COLUMNS))
    if view.problems:
        more = view.problem_count - len(view.problems)
        lines = [*view.problems, *([f"and {more} more"] if more > 0 else [])]
        parts.append("problems\n" + render.indent("\n".join(lines)))
    if view.packets is not None:
        parts += _packet_path(view.packets)
        parts.append(render.table(view.counters.items(), status_view.COUNTER_COLUMNS))
    return "\n\n".join(parts)


def _packet_path(path: PacketView) -> Iterator[str]:
    yield "packet path\n" + render.indent(render.facts(_packets(path)))
    if path.failed:
        more = path.failed_count - len(path.failed)
        yield render.table(path.failed, packets_view.FAILURE_COLUMNS) + (
            f"\nand {more} more devices" if more > 0 else ""
        )


def _agent(view: StatusView) -> Iterator[tuple[str, str]]:
    yield "agent", _running(view)
    if view.version:
        yield "node", view.node
        asked = f", asked for: {view.mode_asked}" if view.mode_asked else ""
        yield "mode", f"{view.mode}{asked} (kbpf {view.version})"
        if view.mode_reason:
            yield "not bpf", f"{view.mode_reason}: {view.mode_why}"
        yield (
            "synced",
            "yes"
            if view.synced
            else "no: not all sources have answered, or not all devices have the programs yet",
        )
        refused = f"; {view.refused} of them NOT PROGRAMMED" if view.refused else ""
        yield "services", f"{view.services} ({view.service_ports} Service ports{refused})"
        yield "applied", f"{view.applied} times, the last in {view.last_apply_ms:g} ms"
        yield "event to map", _delay(view)
    if view.packets is not None:
        missing = f"; missing: {', '.join(view.hooks_missing)}" if view.hooks_missing else ""
        yield "hooks", f"{view.hooks_attached} of {view.hooks} attached{missing}"
        exempt = f", but for {view.exempt_cgroups} exempt cgroups" if view.exempt_cgroups else ""
        yield "socket-lb", f"{view.socket_lb}{exempt}"
    yield "pins" if view.packets is not None else "state", view.pin_dir
    if view.off:
        yield "off", "; ".join(view.off)
    if view.error:
        yield "error", view.error
    if view.problem_count:
        yield "problems", str(view.problem_count)


def _packets(view: PacketView) -> Iterator[tuple[str, str]]:
    yield "state", f"{view.state}: {view.why}" if view.why else view.state
    if view.state == "off":
        return
    failed = f", NOT on {view.failed_count}" if view.failed_count else ""
    yield "devices", f"{view.host_devices} host, {view.pod_devices} pod{failed}"
    alarm = " ! raise --max-connections" if view.alarm else ""
    yield "connections", f"{view.connections}, room for {view.room}{alarm}"
    yield "entries", f"{view.entries}, with closed ones and those whose time is over"
    gone = ""
    if view.forgotten:
        gone = f"; {view.forgotten} have made room, or were begun anew"
    yield "created", f"{view.created} since the counters began{gone}"
    evicted = "streams of UDP that were in use, and had to make room for new connections"
    yield "evicted", f"{view.evicted} {evicted}" if view.evicted else "0"


def nat(view: NatView) -> str:
    """Which addresses and ports sources are translated to, and how many are in use where."""
    ports = f"{view.first_port} to {view.last_port} ({view.ports})" if view.ports else "none"
    known = render.facts(
        (
            ("node", ", ".join(view.addresses) or "no address"),
            ("ports", ports),
            ("no port found", f"{view.failures} times"),
        )
    )
    return f"{known}\n\n{render.table(view.usage, nat_view.USAGE_COLUMNS)}"


def sources(view: SourcesView, wide: bool = False) -> str:
    """Who may dial what, and who is a pod."""
    known = render.facts(
        (
            ("not let in", f"{view.not_allowed} times"),
            ("sockets", f"{view.left_alone} times left to the packet path"),
            ("pods here", _pods(view)),
        )
    )
    return f"{known}\n\n{render.table(view.services, sources_view.COLUMNS, wide)}"


def _pods(view: SourcesView) -> str:
    devices = f"what comes in by {view.local_devices} devices"
    if not view.pods:
        return f"{devices}; nobody is masqueraded before a ClusterIP for not being one"
    if view.pods == "networks":
        return ", ".join(view.local_networks) or "no network"
    return devices


def _delay(view: StatusView) -> str:
    half, most = view.event_to_map_p50_ms, view.event_to_map_p99_ms
    return f"{half:g} ms in the median, {most:g} ms for 99 of 100" if most else "none yet"


def _running(view: StatusView) -> str:
    if view.running_seconds is None or view.silent_seconds is None:
        return "no word from it here that this version understands"
    if view.running:
        return f"running for {span(view.running_seconds)} (pid {view.pid})"
    return f"down: its last word was {span(view.silent_seconds)} ago (pid {view.pid})"
