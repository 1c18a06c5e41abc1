"""What is more than one table: a Service in full, and how the agent is doing."""

from collections.abc import Iterable, Iterator, Sequence

from kbpf.cli import render
from kbpf.views import status as status_view
from kbpf.views.columns import span
from kbpf.views.service import BACKEND_COLUMNS, FRONTEND_COLUMNS, ServiceDetail, SetRow
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
                ("affinity", affinity),
            )
        )
    )
    yield render.indent(render.table(row.frontends, FRONTEND_COLUMNS))
    yield from _sets("cluster", detail.cluster)
    if row.backends_local is not None:
        yield from _sets("local", detail.local)


def _sets(name: str, sets: Sequence[SetRow]) -> Iterator[str]:
    if not sets:
        yield f"  {name} set: empty"
    for one in sets:
        missing = f", {one.missing} MISSING" if one.missing else ""
        yield f"  {name} set {one.id}: {one.size} backends{missing}"
        yield render.indent(render.table(one.backends, BACKEND_COLUMNS), "    ")


def status(view: StatusView) -> str:
    """The agent, its sources, its hooks, what is wrong, and what the programs counted."""
    parts = [render.facts(_agent(view))]
    if view.sources:
        parts.append(render.table(view.sources, status_view.SOURCE_COLUMNS))
    if view.problems:
        more = view.problem_count - len(view.problems)
        lines = [*view.problems, *([f"and {more} more"] if more > 0 else [])]
        parts.append("problems\n" + render.indent("\n".join(lines)))
    parts.append(render.table(view.counters.items(), status_view.COUNTER_COLUMNS))
    return "\n\n".join(parts)


def _agent(view: StatusView) -> Iterator[tuple[str, str]]:
    yield "agent", _running(view)
    if view.version:
        yield "node", view.node
        yield "mode", f"{view.mode} (kbpf {view.version})"
        yield "synced", "yes" if view.synced else "no: not all sources have answered yet"
        refused = f"; {view.refused} of them NOT PROGRAMMED" if view.refused else ""
        yield "services", f"{view.services} ({view.service_ports} Service ports{refused})"
        yield "applied", f"{view.applied} times, the last in {view.last_apply_ms:g} ms"
        yield "event to map", _delay(view)
    missing = f"; missing: {', '.join(view.hooks_missing)}" if view.hooks_missing else ""
    yield "hooks", f"{view.hooks_attached} of {view.hooks} attached{missing}"
    yield "pins", view.pin_dir
    if view.error:
        yield "error", view.error
    if view.problem_count:
        yield "problems", str(view.problem_count)


def _delay(view: StatusView) -> str:
    half, most = view.event_to_map_p50_ms, view.event_to_map_p99_ms
    return f"{half:g} ms in the median, {most:g} ms for 99 of 100" if most else "none yet"


def _running(view: StatusView) -> str:
    if view.running_seconds is None or view.silent_seconds is None:
        return "no word from it here that this version understands"
    if view.running:
        return f"running for {span(view.running_seconds)} (pid {view.pid})"
    return f"down: its last word was {span(view.silent_seconds)} ago (pid {view.pid})"
