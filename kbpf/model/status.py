# SPDX-License-Identifier: Apache-2.0
"""The agent's status: one frozen value, shown by `kbpf inspect status`.

It is stored as JSON in the map `agent_status`, so it can be read with nothing but the pin folder,
even when the agent is not running; `heartbeat` shows whether it is.
"""

from typing import Final

import msgspec
from msgspec.structs import replace


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
    """A thread of the agent. `idle_seconds`: since its last heartbeat; some threads wait long.
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
    to which it could not be attached. `forwarding`: the value of --forwarding that is in force, and
    `fallback`: why `auto` is not netfilter, or "".
    """

    enabled: bool
    problem: str = ""
    devices: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    failed: tuple[DeviceFailure, ...] = ()
    failed_count: int = 0
    forwarding: str = ""
    fallback: str = ""


class VerifiedPart(msgspec.Struct, frozen=True):
    """A part that the agent verifies by itself, and how many differences it found the last time, at
    `timestamp` (seconds since the epoch): ``maps``, entries that another process had changed;
    ``connections``, those that were not translated as programmed.
    """

    name: str
    differences: int
    timestamp: float


class ModeChoice(msgspec.Struct, frozen=True):
    """The selected data plane. `requested` is the value of --mode, `mode` is "bpf" or "ipvs".

    If `auto` could not use BPF, `reason` is a short reason from a fixed list (checks/fallback.py)
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
    without a file. `address_refusals`: number of Service ports of which an address is not served.
    without a file. `verified`: without the parts that have not been verified yet.
    `failing_backends`: backends of this node's Services that keep failing; None if unknown.
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
    address_refusals: int = 0
    verified: tuple[VerifiedPart, ...] = ()
    failing_backends: int | None = None


MAX_NAMESPACES = 50
"""Limit for `refused_namespaces`; those with the most refused Service ports are kept."""

MAX_PROBLEMS = 50
"""Limit for `problems`; `problem_count` is not limited."""

MAX_FAILED_DEVICES = 20
"""Limit for `failed`; `failed_count` is not limited."""


MAX_STATUS_BYTES: Final = 32_704
"""Limit for the encoded status."""

_LISTS: Final = ("problems", "left_to_node", "refused_system", "disabled_features", "faults")
"""Lists of texts, which long names make long."""


def encode(status: AgentStatus) -> bytes:
    """Encodes the status as JSON. While that is too long, the longest list loses its second half;
    `problem_count` keeps the number.
    """
    while len(text := msgspec.json.encode(status)) > MAX_STATUS_BYTES:
        name = max(_LISTS, key=lambda name: len(msgspec.json.encode(getattr(status, name))))
        lines = getattr(status, name)
        if not lines:
            break
        status = replace(status, **{name: lines[: len(lines) // 2]})
    return text


def decode(raw: bytes) -> AgentStatus | None:
    """Decodes the map's value; None if it is empty or of another version."""
    text = raw.rstrip(b"\0")
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=AgentStatus)
    except msgspec.DecodeError:
        return None
