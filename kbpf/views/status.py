"""How the agent of a node is doing, by its own words, and by what is there without it."""

from typing import Final

import msgspec

from kbpf.dataplane.bpf.inspect.reasons import words
from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.dataplane.bpf.maps.layout import Reason
from kbpf.model.status import SourceView, ThreadView
from kbpf.views.columns import Column, number, span, yes
from kbpf.views.packet_path import availability
from kbpf.views.packet_path.availability import PacketView
from kbpf.views.programs import state

NEEDS: Final = Part.STATUS | Part.HOOKS | availability.NEEDS

HEARTBEAT_SECONDS: Final = 10.0
"""The agent writes every 2 s; without a word for this long it is taken as down."""


LAST: Final = "was "
"""Before the state of a watch whose agent is down."""


class StatusView(msgspec.Struct, frozen=True):
    """One agent. `ok`: it runs, has synced, every hook that is wanted is attached, no Service port
    is refused, the last change was written, and the packet path is on every device that asks for
    it, if it is switched on.

    `running_seconds` is since its start; `silent_seconds` since its last word. Both are None when
    no agent ever wrote a word here. `counters` are by reason, over all CPUs. `mode_reason` and
    `mode_why`: why --mode auto could not take BPF, "" if it has. Mode ipvs has no hooks, no
    counters and no packet path (`packets` None).
    """

    ok: bool
    running: bool
    synced: bool
    pin_dir: str
    version: str
    node: str
    mode: str
    mode_asked: str
    mode_reason: str
    mode_why: str
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
    off: tuple[str, ...]
    counters: dict[str, int]
    packets: PacketView | None


def view(snapshot: Snapshot) -> StatusView:
    """All of it. What the agent said last stands, with `running` false, when it is down."""
    said = snapshot.status
    silent = snapshot.boottime - said.heartbeat if said else None
    running = silent is not None and silent < HEARTBEAT_SECONDS and snapshot.agent_alive
    states = {f.hook.name: state(f, snapshot.socket_lb) for f in snapshot.hooks}
    missing = tuple(name for name, word in states.items() if word not in ("attached", "off"))
    choice = said.choice if said else None
    path = None if choice is not None and choice.mode == "ipvs" else availability.view(snapshot)
    sound = path is None or (path.state != "failed" and not path.failed_count)
    return StatusView(
        ok=bool(
            running
            and said
            and said.synced
            and not missing
            and not said.refused
            and not said.error
            and not said.faults
            and sound
        ),
        running=running,
        synced=bool(said and said.synced),
        pin_dir=str(snapshot.pin_dir),
        version=said.version if said else "",
        node=said.node if said else "",
        mode=said.mode if said else "",
        mode_asked=choice.asked if choice else "",
        mode_reason=choice.reason if choice else "",
        mode_why=choice.why if choice else "",
        pid=said.pid if said else 0,
        running_seconds=round(snapshot.boottime - said.started, 1) if said else None,
        silent_seconds=round(silent, 1) if silent is not None else None,
        services=said.services if said else 0,
        service_ports=said.service_ports if said else 0,
        refused=said.refused if said else 0,
        applied=said.applied if said else 0,
        last_apply_ms=said.last_apply_ms if said else 0.0,
        event_to_map_p50_ms=said.event_to_map_p50_ms if said else 0.0,
        event_to_map_p99_ms=said.event_to_map_p99_ms if said else 0.0,
        error=said.error if said else "",
        sources=tuple(_source(source, running) for source in (said.sources if said else ())),
        threads=tuple(_thread(thread, running) for thread in (said.threads if said else ())),
        hooks_attached=sum(word == "attached" for word in states.values()),
        hooks=sum(not (f.hook.counts and f.link is None) for f in snapshot.hooks),
        hooks_missing=missing,
        socket_lb=str(snapshot.socket_lb),
        exempt_cgroups=snapshot.exempt_cgroups,
        problem_count=said.problem_count if said else 0,
        problems=said.problems if said else (),
        off=said.off if said else (),
        counters={reason.name.lower(): snapshot.reasons.get(reason, 0) for reason in Reason}
        if path is not None
        else {},
        packets=path,
    )


def _source(source: SourceView, running: bool) -> SourceView:
    """Of an agent that is down: what the watch did when it spoke last."""
    if running:
        return source
    return msgspec.structs.replace(source, state=f"{LAST}{source.state}")


def _thread(thread: ThreadView, running: bool) -> ThreadView:
    return thread if running else msgspec.structs.replace(thread, alive=False, problem="")


SOURCE_COLUMNS: Final = (
    Column("SOURCE", lambda s: s.name),
    Column("STATE", lambda s: s.state),
    Column("SYNCED", lambda s: "-" if s.state.startswith(LAST) else yes(s.synced)),
    Column("VERSION", lambda s: s.resource_version or "-"),
    Column("ERROR", lambda s: s.error or "-"),
)

THREAD_COLUMNS: Final = (
    Column("THREAD", lambda t: t.name),
    Column("STATE", lambda t: t.problem or ("running" if t.alive else "ended")),
    Column("LAST PROGRESS", lambda t: f"{span(t.idle_seconds)} ago", right=True),
    Column("RESTARTS", lambda t: number(t.restarts), right=True),
)

COUNTER_COLUMNS: Final = (
    Column("REASON", lambda c: c[0]),
    Column("COUNT", lambda c: number(c[1]), right=True),
    Column("MEANS", lambda c: words(Reason[c[0].upper()])),
)
