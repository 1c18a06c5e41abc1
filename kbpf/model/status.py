"""What the agent says of itself: one frozen value, shown by `kbpf inspect status`.

It lies beside the maps (the map `agent_status`, as JSON), so it can be read with nothing but the
pin folder, and still be read when the agent is gone. `heartbeat` tells whether it is.
"""

import msgspec


class SourceView(msgspec.Struct, frozen=True):
    """One watch. `failures`: tries that failed in a row. `silent_seconds`: since it heard anything,
    0 before it did. `drift`: objects that were not as they should have been when all were listed
    again.
    """

    name: str
    state: str
    synced: bool
    resource_version: str
    error: str
    failures: int = 0
    silent_seconds: float = 0.0
    drift: int = 0


class ThreadView(msgspec.Struct, frozen=True):
    """A thread of the agent. `idle_seconds`: since it last made progress; some wait for long.
    `restarts`: how often its work failed and began again. `problem`: why it counts as down, or "".
    """

    name: str
    alive: bool
    idle_seconds: float
    restarts: int = 0
    problem: str = ""


class DeviceFailure(msgspec.Struct, frozen=True):
    """A device that the packet path could not be brought to, and why."""

    device: str
    why: str


class PacketStatus(msgspec.Struct, frozen=True):
    """The packet path, as the agent sees it.

    `wanted`: it is switched on. `problem`: why it is not there all the same, "" if it is.
    `devices` and `excluded`: the operator's patterns, by which devices are chosen. `failed`: the
    first of `failed_count` devices that it is not on.
    """

    wanted: bool
    problem: str = ""
    devices: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    failed: tuple[DeviceFailure, ...] = ()
    failed_count: int = 0


class ModeChoice(msgspec.Struct, frozen=True):
    """Which data plane serves. `asked` is what --mode says, `mode` is "bpf" or "ipvs". Where `auto`
    could not take BPF, `reason` is why in a few words that are always the same (agent/selector.py),
    and `why` is all that is known of it; both are "" otherwise.
    """

    asked: str
    mode: str
    reason: str = ""
    why: str = ""


class AgentStatus(msgspec.Struct, frozen=True):
    """Times are seconds of CLOCK_BOOTTIME, which all processes of the machine share. `off`:
    optional features that are not switched on, a line each.

    `refused`: Service ports that could not be programmed; `refused_namespaces`: how many of each
    namespace, `refused_system`: Services of system namespaces among them.
    `config_error`: what is wrong with the configuration file; None without one.
    """

    version: str
    pid: int
    mode: str
    node: str
    started: float
    heartbeat: float
    synced: bool
    services: int
    service_ports: int
    applied: int
    last_apply_ms: float
    event_to_map_p50_ms: float
    event_to_map_p99_ms: float
    sources: tuple[SourceView, ...]
    problems: tuple[str, ...]
    problem_count: int
    refused: int = 0
    error: str = ""
    packets: PacketStatus | None = None
    without_endpoints: int = 0
    choice: ModeChoice | None = None
    threads: tuple[ThreadView, ...] = ()
    off: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    refused_namespaces: dict[str, int] = {}
    refused_system: tuple[str, ...] = ()
    config_error: str | None = None


MAX_NAMESPACES = 50
"""Namespaces in `refused_namespaces`, by Service ports that could not be programmed."""

MAX_PROBLEMS = 50
"""Lines that fit; `problem_count` has all."""

MAX_FAILED_DEVICES = 20
"""Devices that fit; `failed_count` has all."""


def encode(status: AgentStatus) -> bytes:
    """JSON, as it is kept in the map."""
    return msgspec.json.encode(status)


def decode(raw: bytes) -> AgentStatus | None:
    """From the map's value; None when nobody wrote one, or another version did."""
    text = raw.rstrip(b"\0")
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=AgentStatus)
    except msgspec.DecodeError:
        return None
