# SPDX-License-Identifier: Apache-2.0
"""The agent's status: one frozen value, shown by `kbpf inspect status`.

It is stored as JSON in the map `agent_status`, so it can be read with nothing but the pin folder,
even when the agent is not running; `heartbeat` shows whether it is.
"""

import msgspec


class SourceView(msgspec.Struct, frozen=True):
    """One watch. `failures`: consecutive failed attempts. `silent_seconds`: since the last event,
    0 before the first. `drift`: objects that a relist found to differ from what was stored.
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
    """A thread of the agent. `idle_seconds`: since its last progress; some threads wait long.
    `restarts`: how often its work failed and was started again. `problem`: why it counts as down,
    or "".
    """

    name: str
    alive: bool
    idle_seconds: float
    restarts: int = 0
    problem: str = ""


class DeviceFailure(msgspec.Struct, frozen=True):
    """A device to which the packet path could not be attached, and why."""

    device: str
    detail: str


class PacketStatus(msgspec.Struct, frozen=True):
    """The packet path, as the agent sees it.

    `enabled`: it is switched on. `problem`: why it does not work nevertheless, or "". `devices` and
    `excluded`: the operator's device patterns. `failed`: the first of the `failed_count` devices
    to which it could not be attached.
    """

    enabled: bool
    problem: str = ""
    devices: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    failed: tuple[DeviceFailure, ...] = ()
    failed_count: int = 0


class ModeChoice(msgspec.Struct, frozen=True):
    """The selected data plane. `requested` is the value of --mode, `mode` is "bpf" or "ipvs".

    If `auto` could not use BPF, `reason` is a short reason from a fixed list (agent/selector.py)
    and `detail` is the full explanation; otherwise both are "".
    """

    requested: str
    mode: str
    reason: str = ""
    detail: str = ""


class AgentStatus(msgspec.Struct, frozen=True):
    """What the agent reports. Times are seconds of CLOCK_BOOTTIME, which all processes of the
    machine share.

    `disabled_features`: a line for each optional feature that is switched off. `left_to_node`: a
    line for each ClusterIP and port that a process of this node serves. `faults`: see
    PlaneStatus.faults. `refused`: number of Service ports that could not be programmed;
    `refused_namespaces`: the same by namespace; `refused_system`: the Services of system namespaces
    among them. `config_error`: what is wrong with the configuration file, "" if nothing; None
    without a file.
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
    disabled_features: tuple[str, ...] = ()
    left_to_node: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    refused_namespaces: dict[str, int] = {}
    refused_system: tuple[str, ...] = ()
    config_error: str | None = None


MAX_NAMESPACES = 50
"""Limit for `refused_namespaces`; those with the most refused Service ports are kept."""

MAX_PROBLEMS = 50
"""Limit for `problems`; `problem_count` is not limited."""

MAX_FAILED_DEVICES = 20
"""Limit for `failed`; `failed_count` is not limited."""


def encode(status: AgentStatus) -> bytes:
    """Encodes the status as JSON for the map."""
    return msgspec.json.encode(status)


def decode(raw: bytes) -> AgentStatus | None:
    """Decodes the map's value; None if it is empty or of another version."""
    text = raw.rstrip(b"\0")
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=AgentStatus)
    except msgspec.DecodeError:
        return None
