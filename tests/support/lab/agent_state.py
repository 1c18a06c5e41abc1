# SPDX-License-Identifier: Apache-2.0
"""The state of an agent in the kernel and in its folder, read from outside its process."""

import contextlib
import json
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kbpf.dataplane.bpf.maps import status_entries
from kbpf.dataplane.bpf.maps.layout import CONFIG, ConfigFlag, Reason, schema_hash
from kbpf.dataplane.ipvs import ipvs_inspect as ipvs
from kbpf.dataplane.ipvs import ruleset
from kbpf.errors import KbpfError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.net.ipvs import IpvsClient
from kbpf.kernel.netfilter import forward_rules
from kbpf.kernel.system import netns
from kbpf.model.inspection import BackendSet

T = TypeVar("T")


def read_reasons(path: Path) -> Counter[Reason]:
    """The counts of the pinned map `reasons`, over all CPUs."""
    counts: Counter[Reason] = Counter()
    with Map.open(path) as reasons:
        for reason in Reason:
            raw = reasons.lookup(struct.pack("=I", reason)) or b""
            counts[reason] = sum(struct.unpack(f"={len(raw) // 8}Q", raw))
    return counts


class AgentState:
    """What an agent of this network namespace, pin folder and state folder has stored."""

    def __init__(self, netns: str, pin_dir: Path, state_dir: Path, mode: str) -> None:
        self._netns = netns
        self.pin_dir = pin_dir
        self.state_dir = state_dir
        self.mode = mode

    def _run_inside(self, function: Callable[[], T]) -> T:
        return netns.run_in(Path("/run/netns") / self._netns, function)

    def map_path(self, name: str) -> Path:
        return self.pin_dir / f"maps-{schema_hash()}" / name

    def status(self) -> dict[str, Any] | None:
        """The agent's status from its pinned map, or in mode ipvs from its state folder."""
        try:
            if self.mode == "ipvs":
                return json.loads((self.state_dir / "kbpf-ipvs0" / "status").read_bytes())
            with Map.open(self.map_path("agent_status")) as status:
                raw = status_entries.read(status)
        except (OSError, KbpfError):
            return None
        return json.loads(raw) if raw else None

    def entries(self, name: str) -> dict[bytes, bytes]:
        from tests.support.features import require_listing  # which imports this package

        with Map.open(self.map_path(name)) as opened:
            require_listing(opened)
            return dict(opened.items())

    def reasons(self) -> Counter[Reason]:
        """How often its programs have counted each reason, over all CPUs."""
        return read_reasons(self.map_path("reasons"))

    def config_flags(self) -> ConfigFlag:
        """The flags that the programs read."""
        (raw,) = self.entries("config").values()
        return ConfigFlag(CONFIG.unpack(raw)[1])

    def elements(self) -> dict[str, list[tuple[Any, ...]]]:
        """The elements of mode ipvs' nftables table, by set."""
        elements: dict[str, list[tuple[Any, ...]]] = {}
        request = ruleset.LIST_TABLE
        replies = self._run_inside(lambda: forward_rules.run_transaction(request))
        for name, parts in ruleset.parse_elements(replies):
            elements.setdefault(name, []).append(parts)
        return elements

    def virtual_services(self) -> dict[str, dict[str, int]]:
        """The kernel's virtual services: ``10.96.0.1:80/6`` → real server → weight."""

        def read() -> dict[str, dict[str, int]]:
            with contextlib.closing(IpvsClient()) as client:
                return {
                    str(s): {str(load.server): load.weight for load in client.list_servers(s)}
                    for s, _ in client.list_services()
                }

        return self._run_inside(read)

    def behind(self) -> dict[str, dict[str, Any]]:
        """Mode ipvs: frontend → its Service and backends, in the form of cluster.served()."""
        inspection = self._run_inside(lambda: ipvs.read(self.state_dir / "kbpf-ipvs0"))

        def members(backend_set: BackendSet) -> list[str]:
            backends = {entry.backend for entry in backend_set.slots.values()}
            return sorted(f"{backend}/{backend.protocol.name}" for backend in backends if backend)

        return {
            str(frontend.at): {
                "service": str(port.key.service if port.key else ""),
                "cluster": members(frontend.cluster),
                "local": members(frontend.local),
            }
            for port in inspection.services
            for frontend in port.frontends
        }
