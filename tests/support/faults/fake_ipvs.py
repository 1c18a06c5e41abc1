# SPDX-License-Identifier: Apache-2.0
"""A fake of the kernel's IPVS, for kernels without it: it keeps virtual services and their real
servers in memory, returns the kernel's errors (EEXIST, ESRCH, ENOENT), and forwards no packets.

The rest of the data plane is real: nftables, addresses, the state folder. On kernels without dummy
devices a bridge replaces them, which can have addresses too.
"""

import contextlib
import errno
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kbpf.dataplane.base import Report, TickResult
from kbpf.dataplane.ipvs.plane import IpvsPlane
from kbpf.kernel.net import dummy
from kbpf.kernel.net.ipvs import (
    ConnectionTimeouts,
    IpvsClient,
    IpvsCommand,
    IpvsRequest,
    RealServerStatus,
    VirtualServiceSettings,
)
from kbpf.kernel.netfilter import forward_rules
from kbpf.model.address import parse_addr
from kbpf.model.config import IPVS_DEVICE, Config
from kbpf.model.desired import DesiredState, RealServer, ServicePortKey, ServiceState, VirtualService
from kbpf.model.metrics import ConnectionStats
from tests.support.lab import namespace as namespaces
from tests.support.lab.namespace import Namespace
from tests.support.plane import desired


class FakeIpvs:
    """The IPVS of one kernel, in place of the methods of every `IpvsClient`. `calls`: how often
    each verb was used. `connections`: active and inactive ones of a real server. `refuse`: called
    before each change; returns the errno to fail with, or 0.
    """

    def __init__(self) -> None:
        self.held: dict[VirtualService, tuple[VirtualServiceSettings, dict[RealServer, int]]] = {}
        self.connections: dict[tuple[VirtualService, RealServer], tuple[int, int]] = {}
        self.times = ConnectionTimeouts(900, 120, 300)
        self.calls: Counter[str] = Counter()
        self.refuse: Callable[[IpvsRequest], int] = lambda _: 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replaces IPVS in this process until the test ends."""
        for name, do in {
            "__init__": lambda _: self.calls.update(("opened",)),
            "close": lambda _: None,
            "list_services": lambda _: self.services(),
            "read_stats": lambda _: [(one, ConnectionStats()) for one, _ in self.services()],
            "list_servers": lambda _, service: self.servers(service),
            "read_settings": lambda _, service: self.held.get(service, (None, {}))[0],
            "set_timeouts": lambda _, times: self.set_times(times),
            "try_apply": lambda _, changes: self.try_(changes),
        }.items():
            patch.setattr(IpvsClient, name, do)

    def set_times(self, times: ConnectionTimeouts) -> None:
        """Like IpvsClient.set_timeouts()."""
        pairs = zip(times, self.times, strict=True)
        self.times = ConnectionTimeouts(*(new or old for new, old in pairs))

    def services(self) -> list[tuple[VirtualService, VirtualServiceSettings]]:
        """Like IpvsClient.list_services()."""
        self.calls["services"] += 1
        return [(service, settings) for service, (settings, _) in self.held.items()]

    def servers(self, service: VirtualService) -> list[RealServerStatus]:
        """Like IpvsClient.list_servers()."""
        self.calls["servers"] += 1
        _, servers = self.held.get(service, (None, {}))
        return [
            RealServerStatus(one, weight, *self.connections.get((service, one), (0, 0)))
            for one, weight in servers.items()
        ]

    def try_(self, changes: Sequence[IpvsRequest]) -> list[int]:
        """Like IpvsClient.try_apply()."""
        self.calls["changes"] += len(changes)
        return [self.refuse(change) or self._change(*change) for change in changes]

    def _change(
        self,
        command: IpvsCommand,
        service: VirtualService,
        server: RealServer | None,
        weight: int,
        settings: VirtualServiceSettings | None,
    ) -> int:
        there = self.held.get(service)
        match command:
            case IpvsCommand.IPVS_CMD_NEW_SERVICE if there is not None:
                return errno.EEXIST
            case IpvsCommand.IPVS_CMD_NEW_SERVICE:
                self.held[service] = (settings, {})
                return 0
        if there is None:
            return errno.ESRCH
        match command:
            case IpvsCommand.IPVS_CMD_SET_SERVICE:
                self.held[service] = (settings, there[1])
            case IpvsCommand.IPVS_CMD_DEL_SERVICE:
                del self.held[service]
            case IpvsCommand.IPVS_CMD_NEW_DEST | IpvsCommand.IPVS_CMD_SET_DEST | IpvsCommand.IPVS_CMD_DEL_DEST:
                return self._change_server(command, there[1], server, weight)
        return 0

    def _change_server(
        self, command: IpvsCommand, servers: dict[RealServer, int], server: RealServer, weight: int
    ) -> int:
        if (command is IpvsCommand.IPVS_CMD_NEW_DEST) == (server in servers):
            return errno.EEXIST if server in servers else errno.ENOENT
        if command is IpvsCommand.IPVS_CMD_DEL_DEST:
            del servers[server]
        else:
            servers[server] = weight
        return 0

    def shown(self) -> dict[str, dict[str, int]]:
        """Virtual services, their real servers and weights, as text."""
        return {
            str(service): {str(one): weight for one, weight in servers.items()}
            for service, (_, servers) in self.held.items()
        }


class Node(Namespace):
    """A network namespace with a data plane, on the fake if there is a `patch` to install it."""

    def __init__(self, where: str, folder: Path, patch: pytest.MonkeyPatch | None) -> None:
        super().__init__(where)
        self.folder = folder
        self.ipvs = FakeIpvs()
        if patch is not None:
            self.ipvs.install(patch)
            patch.setattr(dummy, "KIND", "bridge")
        self.config = Config(state_dir=folder)
        self.plane = IpvsPlane(self.config)
        self.now = 0.0

    def start(self, config: Config | None = None) -> IpvsPlane:
        """Closes the plane and opens a new one, like a restarted agent."""
        self.plane.close()
        self.config = config or self.config
        self.plane = IpvsPlane(self.config)
        self.do(self.plane.open)
        return self.plane

    def apply(
        self,
        *services: ServiceState,
        nodes: str = "",
        sound: bool = True,
        touched: Sequence[ServicePortKey] | None = None,
    ) -> Report:
        """Applies exactly these Services; `touched` names those that have changed (None: all)."""
        wanted: DesiredState = desired(*services, nodes=nodes)
        return self.do(lambda: self.plane.apply(wanted, touched, sound))

    def tick(self) -> TickResult:
        """Runs everything that is due in the next 100 s, in all threads of an agent."""
        self.now += 100.0
        result = self.do(lambda: self.plane.tick(self.now))
        self.do(lambda: self.plane.maintain_host(self.now))
        return result

    def addresses(self, device: str = IPVS_DEVICE) -> set[str]:
        """The addresses of a device; empty if it does not exist."""
        shown = json.loads(self.run("ip -j addr"))
        return {one["local"] for link in shown if link.get("ifname") == device for one in link["addr_info"]}

    def links(self) -> set[str]:
        """The names of all devices except loopback."""
        return {row["ifname"] for row in json.loads(self.run("ip -j link"))} - {"lo"}

    def tables(self) -> set[str]:
        """The names of all nftables tables."""
        listed = self.do(lambda: forward_rules.run_transaction({"list": {"tables": None}}))
        found: list[dict[str, Any]] = [one["table"] for one in listed if "table" in one]
        return {f"{one['family']} {one['name']}" for one in found}


@pytest.fixture
def fake_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node whose plane is not opened yet."""
    with _node(tmp_path, monkeypatch) as node:
        yield node


@pytest.fixture
def real_node(tmp_path: Path) -> Iterator[Node]:
    """The same on the kernel's own IPVS."""
    with _node(tmp_path, None) as node:
        yield node


@contextlib.contextmanager
def _node(tmp_path: Path, patch: pytest.MonkeyPatch | None) -> Iterator[Node]:
    with namespaces.made() as made:
        made.ip("link set lo up")
        node = Node(made.name, tmp_path / "state", patch)
        try:
            yield node
        finally:
            node.plane.close()


def tcp(address: str, port: int) -> VirtualService:
    """The key of a TCP virtual service."""
    return VirtualService(socket.IPPROTO_TCP, parse_addr(address), port)
