# SPDX-License-Identifier: Apache-2.0
"""The cost of mode ipvs with 10,000 Services of 10 endpoints, without that of IPVS itself.

The data plane is the real one, in a network namespace; its requests to IPVS go to a fake
(tests/support/faults/fake_ipvs.py). So this runs on any kernel with nf_tables, and measures mostly
the nftables table. A tenth of the endpoints are on this node.
"""

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.tools.common import say
from kbpf.model.address import Addr
from kbpf.model.desired import ServiceState
from tests.support.faults.fake_ipvs import Node
from tests.support.lab.lab import run as command
from tests.support.plane import desired, service

SERVICES, ENDPOINTS, CHANGES = 10_000, 10, 50


def run() -> dict[str, Any]:
    """Returns elapsed and CPU milliseconds of this process, and its peak memory in MB."""
    where = f"kbm{os.getpid()}"
    command("ip", "netns", "add", where)
    patch = pytest.MonkeyPatch()
    try:
        with tempfile.TemporaryDirectory() as folder:
            node = Node(where, Path(folder), patch)
            node.run("ip", "link", "set", "lo", "up")
            return _measure(node)
    finally:
        patch.undo()
        command("ip", "netns", "del", where)


def _measure(node: Node) -> dict[str, Any]:
    states = [_state(number) for number in range(SERVICES)]
    node.start()
    say(f"programming {SERVICES} x {ENDPOINTS}")
    found: dict[str, Any] = {"all": _took(lambda: node.apply(*states))}
    node.tick()
    changes, after = [], []
    for number in range(CHANGES):
        states[number] = _state(number, shift=1)
        wanted = desired(*states)
        keys = [states[number].key]
        changes.append(_took(lambda w=wanted, k=keys: node.do(lambda: node.plane.apply(w, k))))
        after.append(_took(node.tick))
    found["one change"], found["tick after it"] = _median(changes), _median(after)
    others = []
    for number in range(CHANGES):
        node.run("nft", "add", "table", "ip", f"other{number}")
        others.append(_took(node.tick))
    found["tick after another table has changed"] = _median(others)
    node.start()
    say("adopting")
    found["all, adopted"] = _took(lambda: node.apply(*states))
    found["megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    node.plane.close()
    return found


def _state(number: int, shift: int = 0) -> ServiceState:
    first = number * ENDPOINTS + shift
    to = " ".join(f"{_address(10, 1 << 23 | first + i)}:80" for i in range(ENDPOINTS))
    made = service(f"s{number}", f"{_address(11, number)}:80", to)
    here: tuple[Addr, ...] = made.on_node[:1]
    return msgspec.structs.replace(made, on_node=here)


def _address(first: int, number: int) -> str:
    return f"{first}.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"


def _took(action: Callable[[], object]) -> dict[str, float]:
    begun, cpu = time.monotonic(), time.process_time()
    action()
    spent = (time.monotonic() - begun, time.process_time() - cpu)
    return {"ms": round(1e3 * spent[0], 2), "cpu_ms": round(1e3 * spent[1], 2)}


def _median(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]}
