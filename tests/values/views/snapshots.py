# SPDX-License-Identifier: Apache-2.0
"""Constructed snapshots."""

from pathlib import Path
from typing import Any

from kbpf.dataplane.bpf.hooks import HOOKS
from kbpf.dataplane.bpf.inspect.hooks import HookFacts
from kbpf.dataplane.bpf.inspect.snapshot import Snapshot
from kbpf.kernel.bpf.objects import LinkInfo
from kbpf.model.desired import ServicePortKey
from kbpf.model.objects import Protocol
from kbpf.model.status import AgentStatus

PINS = Path("/pins")
TCP, UDP = Protocol.TCP, Protocol.UDP


def key(name: str, namespace: str = "default", protocol: Protocol = TCP) -> ServicePortKey:
    return ServicePortKey(namespace, name, "http", protocol, 4)


def snapshot(**parts: Any) -> Snapshot:
    return Snapshot(PINS, **{"monotonic": 1000.0, "boottime": 5000.0, **parts})


# ---- status ------------------------------------------------------------------------------------

AGENT = AgentStatus("1", 42, "bpf", "n", 4000.0, 4999.0, True, 3, 4, 7, 1.5, 2.5, 9.5, (), (), 0)
ATTACHED = tuple(HookFacts(hook, LinkInfo(1, 2, 3, hook.attach_type)) for hook in HOOKS)
