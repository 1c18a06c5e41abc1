"""What one scrape of /metrics costs the agent, with 10,000 Services x 10 endpoints.

Processor time of the whole agent, its HTTP thread included, while a scrape is answered.
Connections are written into the pinned maps: `idle` has none, `busy` has five sockets of each of
10,000 Services, `full` has 131,072 tracked connections of the packet path besides, which is all
that there may be. `all_series` is `full` with a series for each Service instead of the 1,000 with
the most connections.
"""

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.common import goal, median, say
from benchmarks.scale import slice_of
from kbpf.dataplane.bpf.layout import NAT, PEER, U32, U64, FlowPart, TcpState, schema_hash
from kbpf.kernel.libbpf import Map
from tests.support.kube_objects import node, port, service
from tests.support.lab import Agent, Lab
from tests.support.web import get

SERVICES, ENDPOINTS, SOCKETS, FLOWS = 10_000, 10, 5, 131_072
SCRAPES, PAUSE = 20, 1.1
GOAL_MS = 50.0


def run() -> dict[str, Any]:
    """Milliseconds a scrape, and the size of the page, by case."""
    with Lab(1, "scr") as lab:
        folder = lab.folder / "objects"
        folder.mkdir()
        write(folder, lab.nodes[0].ip)
        agent = Agent(lab.nodes[0], "--source", str(folder), "--max-sockets", "65536")
        found: dict[str, Any] = {}
        agent.start()
        found["idle"] = measure(agent)
        fill_sockets(agent)
        found["busy"] = measure(agent)
        fill_flows(agent)
        found["full"] = measure(agent)
        agent.stop()
        agent.start(extra=("--metrics-services", str(SERVICES)))
        found["all_series"] = measure(agent)
        return found


def write(folder: Path, address: str) -> None:
    """The objects, as one file."""
    items = [node("node-1", address)]
    for number in range(SERVICES):
        made = service(
            f"s{number}", port(80, "http", target=8080),
            cluster_ip=f"10.{100 + number // 65_536}.{number // 256 % 256}.{number % 256}",
        )  # fmt: skip
        items += [made, slice_of(number, ENDPOINTS)]
    (folder / "all.json").write_text(
        json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    )


def pinned(agent: Agent, name: str) -> Map:
    """One of the agent's maps."""
    return Map.open(agent.pin_dir / f"maps-{schema_hash()}" / name)


def ids(agent: Agent) -> list[int]:
    """Those of all Services."""
    with pinned(agent, "service_names") as names:
        return [U32.unpack(key)[0] for key, _ in names.items()]


def fill_sockets(agent: Agent) -> None:
    """So many connected sockets for each Service."""
    known = ids(agent)
    pairs = [(n * SOCKETS + i, one) for n, one in enumerate(known) for i in range(SOCKETS)]
    with pinned(agent, "sock_peers") as peers:
        keys = b"".join(U64.pack(1 << 40 | cookie) for cookie, _ in pairs)
        peers.update_batch(keys, b"".join(PEER.pack(b"", b"", one, 0) for _, one in pairs))


def fill_flows(agent: Agent) -> None:
    """As many tracked connections as there may be, each with both its entries."""
    known = ids(agent)
    now = time.monotonic_ns()
    keys, values = bytearray(), bytearray()
    for number in range(FLOWS):
        client = number.to_bytes(16) + b"\x01\x02\x06\x00"
        for part in (FlowPart.QUESTION, FlowPart.ANSWER):
            keys += bytes([part]) * 20 + client
            values += NAT.pack(
                now, client, client, client, b"", b"", b"", known[number % len(known)], 0,
                TcpState.ESTABLISHED, 0, 0, part, 0, b"",
            )  # fmt: skip
    with pinned(agent, "flows") as flows:
        flows.update_batch(bytes(keys), bytes(values))


def measure(agent: Agent) -> dict[str, Any]:
    """One case: a usual scrape, and the dearest one, which counts connections."""
    size = scrape(agent)
    costs, took = [], []
    for _ in range(SCRAPES):
        time.sleep(PAUSE)
        before, start = spent(agent.pid), time.perf_counter()
        size = scrape(agent)
        took.append((time.perf_counter() - start) * 1000)
        costs.append((spent(agent.pid) - before) * 1000)
    made = {
        "cpu_ms": goal(round(median(costs), 1), at_most=GOAL_MS),
        "dearest_cpu_ms": round(max(costs), 1),
        "took_ms": round(median(took), 1),
        "page_kb": size // 1024,
    }
    say(f"{made}")
    return made


def spent(pid: int) -> float:
    """Seconds of processor time, all threads."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def scrape(agent: Agent) -> int:
    """The size of the page."""
    found = get(agent.node.netns, "127.0.0.1", 10249, "/metrics")
    assert found.status == 200
    return len(found.body)
