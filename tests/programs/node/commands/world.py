# SPDX-License-Identifier: Apache-2.0
"""Maps that BpfPlane wrote, hooks that it attached and sockets that connected, for commands that
run in this process.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from kbpf.dataplane.bpf.hooks import HOOKS as ALL_HOOKS
from kbpf.model.objects import Protocol
from kbpf.model.status import AgentStatus, SourceView
from tests.support.plane import desired, services

UDP = Protocol.UDP
HOOK_NAMES = [hook.name for hook in ALL_HOOKS]


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


STARTED = boottime()
"""When the agent of agent_status() started: not before this process, which it is."""


def agent_status(**more: Any) -> AgentStatus:
    """The status that a healthy agent with this process' id writes, with the fields
    `more` changed. It stays recent, however long a test takes.
    """
    healthy = AgentStatus(
        version="9.9",
        pid=os.getpid(),
        mode="bpf",
        node="n1",
        started=STARTED,
        heartbeat=boottime() + 600,
        synced=True,
        services=3,
        service_ports=4,
        applied=5,
        last_apply_ms=1.5,
        event_to_map_p50_ms=2.0,
        event_to_map_p99_ms=3.0,
        sources=(SourceView("Service", "watching", True, "7", ""),),
        problems=("Service a/b: no good",),
        problem_count=1,
    )
    return replace(healthy, **more)


WORLD = desired(
    *services(
        """
web     10.96.0.1:80 NodePort=0.0.0.0:30080 ExternalIP=192.0.2.1:80 -> A:8080 B:8080 10.244.0.3:8080
dns:UDP 10.96.0.1:53 -> A:5353 B:5353
web6    [fd00:96::1]:80 -> [fd00:10::1]:8080
kept    10.96.0.2:80 -> 127.0.0.1:1 affinity=600
near    10.96.0.3:80 -> A:8080 10.244.0.9:8080 local=A:8080 internal=Local
empty   10.96.0.4:80
guarded 10.96.0.5:80 LoadBalancer=192.0.2.5:80 -> A:8080 restricted=yes
""".replace("A:", "10.244.0.1:").replace("B:", "10.244.0.2:"),
        {},
    ),
    nodes="192.0.2.100",
)


Run = Callable[..., tuple[int, str, str]]
