# SPDX-License-Identifier: Apache-2.0
"""The cost of a scrape of /metrics, with 10,000 Services of 10 endpoints.

Measures the CPU time of the thread that answers the scrape, and the share of a CPU that the agent's
other threads use meanwhile, mainly the one that counts connections in the background. Connections
are written into the pinned maps:

  idle        no connections
  busy        five sockets for each of the 10,000 Services, and connection counts for all their
              100,000 backends
  full        in addition 131,072 tracked connections of the packet path, the maximum
  all_series  like full, with series for every Service instead of the 1,000 with the most
              connections, and for 1,000 backends
"""

import json
import resource
import socket
import time
from pathlib import Path
from typing import Any

from benchmarks.scale import slice_of
from benchmarks.tools.common import goal, median, say
from kbpf.dataplane.bpf.maps.layout import COUNTS, FLOW, PEER, U32, U32_PAIR, FlowDirection, TcpState, schema_hash
from kbpf.kernel.bpf.objects import Map
from tests.support.cluster.kube_objects import node, port, service
from tests.support.lab.lab import Agent, Lab
from tests.support.lab.web import get

SERVICES, ENDPOINTS, SOCKETS, FLOWS = 10_000, 10, 5, 131_072
SCRAPES, PAUSE = 20, 1.1
COUNTED = 20.0
"""Seconds after which the background thread has counted all connections."""
GOAL_MS = 50.0


def run() -> dict[str, Any]:
    """Returns the milliseconds per scrape and the size of the page, by case."""
    with Lab(1, "scr") as lab:
        folder = lab.folder / "objects"
        folder.mkdir()
        write(folder, lab.nodes[0].ip)
        agent = Agent(lab.nodes[0], "--source", str(folder), "--accounting", "full")
        found: dict[str, Any] = {}
        agent.start()
        found["idle"] = measure(agent)
        sockets = fill_sockets(agent)
        fill_counts(agent)
        found["busy"] = measure(agent)
        fill_flows(agent)
        found["full"] = measure(agent)
        for one in sockets:
            one.close()
        agent.stop()
        agent.start(extra=("--metrics-services", str(SERVICES), "--metrics-backends", "1000"))
        found["all_series"] = measure(agent)
        return found


def write(folder: Path, address: str) -> None:
    """Writes the objects as one file."""
    items = [node("node-1", address)]
    for number in range(SERVICES):
        made = service(
            f"s{number}",
            port(80, "http", target=8080),
            cluster_ip=f"10.{100 + number // 65_536}.{number // 256 % 256}.{number % 256}",
        )
        items += [made, slice_of(number, ENDPOINTS)]
    (folder / "all.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))


def pinned(agent: Agent, name: str) -> Map:
    """Opens one of the agent's pinned maps."""
    return Map.open(agent.pin_dir / f"maps-{schema_hash()}" / name)


def ids(agent: Agent) -> list[int]:
    """The ids of all Services."""
    with pinned(agent, "service_names") as names:
        return [U32.unpack(key)[0] for key, _ in names.items()]


def fill_sockets(agent: Agent) -> list[socket.socket]:
    """Creates SOCKETS sockets for each Service, with entries as if they were connected to it. The
    caller closes them.
    """
    wanted = [one for one in ids(agent) for _ in range(SOCKETS)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(wanted) + 1024, len(wanted) + 1024))
    sockets = []
    with pinned(agent, "sock_peers") as peers:
        for number, one in enumerate(wanted):
            sockets.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            key = sockets[-1].fileno().to_bytes(4, "little")
            peers.update(key, PEER.pack(1 + number, b"", b"", one, 0))
    return sockets


def fill_counts(agent: Agent) -> None:
    """Fills the counters of each Service's connections to each of its backends."""
    known = ids(agent)
    with pinned(agent, "backends") as backends:
        found = [U32.unpack(key)[0] for key, _ in backends.items()]
    owners = (known[i // ENDPOINTS % len(known)] for i in range(len(found)))
    pairs = list(zip(owners, found, strict=True))
    with pinned(agent, "counts") as counts:
        keys = b"".join(U32_PAIR.pack(*pair) for pair in pairs)
        counts.update_batch(keys, COUNTS.pack(*range(1_000_000, 1_000_010)) * len(pairs))


def fill_flows(agent: Agent) -> None:
    """Writes the maximum number of tracked connections, each with its two entries."""
    known = ids(agent)
    now = time.monotonic_ns()
    keys, values = bytearray(), bytearray()
    for number in range(FLOWS):
        client = number.to_bytes(16) + b"\x01\x02\x06\x00"
        for part in (FlowDirection.ORIGINAL, FlowDirection.REPLY):
            keys += bytes([part]) * 20 + client
            values += FLOW.pack(
                now,
                client,
                client,
                client,
                b"",
                b"",
                b"",
                known[number % len(known)],
                0,
                TcpState.ESTABLISHED,
                0,
                0,
                part,
                0,
                b"",
            )
    with pinned(agent, "flows") as flows:
        flows.update_batch(bytes(keys), bytes(values))


def measure(agent: Agent) -> dict[str, Any]:
    """Measures one case: median and maximum of the answering thread, total of all others."""
    size = scrape(agent)
    time.sleep(COUNTED)
    costs: dict[str, list[float]] = {}
    took: list[float] = []
    began, others = time.monotonic(), sum(spent(agent.pid).values())
    for _ in range(SCRAPES):
        time.sleep(PAUSE)
        before, start = spent(agent.pid), time.perf_counter()
        size = scrape(agent)
        took.append((time.perf_counter() - start) * 1000)
        for task, seconds in spent(agent.pid).items():
            costs.setdefault(task, []).append((seconds - before.get(task, 0)) * 1000)
    # The answering thread is the one that used CPU in every scrape; others may have in some.
    answers = max(costs.values(), key=lambda found: sum(cost > 0 for cost in found))
    others = sum(spent(agent.pid).values()) - others - sum(answers) / 1000
    made = {
        "cpu_ms": goal(round(median(answers), 1), at_most=GOAL_MS),
        "dearest_cpu_ms": round(max(answers), 1),
        "took_ms": round(median(took), 1),
        "others_percent": round(100 * others / (time.monotonic() - began), 2),
        "page_kb": size // 1024,
    }
    say(f"{made}")
    return made


def spent(pid: int) -> dict[str, float]:
    """The CPU seconds of each thread."""
    return {
        task.name: int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in Path(f"/proc/{pid}/task").iterdir()
    }


def scrape(agent: Agent) -> int:
    """Scrapes once; returns the size of the page in bytes."""
    found = get(agent.node.netns, "127.0.0.1", 10249, "/metrics")
    assert found.status == 200
    return len(found.body)
