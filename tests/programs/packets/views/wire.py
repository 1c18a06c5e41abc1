# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect` of the packet path, shown by the command line in this process."""

from collections.abc import Callable
from typing import Any

from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import parse_addr
from kbpf.model.desired import DesiredState
from kbpf.model.objects import Protocol
from tests.programs.packets.path.single_packets import CLIENT, NET, POD, Flow, Path_, end, masquerading
from tests.support.plane import desired, service

VIP = NET
MASKED, LOCAL, ALSO, KEPT = 1, 2, 3, 4
LOW, HIGH = 61_000, 61_999


def world() -> DesiredState:
    """One Service of each relevant kind, in both families, TCP and UDP."""
    made = []
    for v in (4, 6):
        for protocol in (Protocol.TCP, Protocol.UDP):
            pod, suffix = end(POD[v], 8080), protocol.name.lower() + str(v)

            def one(which: int, name: str, to: str = pod, **more: Any) -> Any:
                vip = f"LoadBalancer={end(f'{VIP[v]}{which}', 80)}"  # noqa: B023
                return service(f"{name}-{suffix}", vip, to, protocol, **more)  # noqa: B023

            made += [
                one(MASKED, "masked"),
                one(LOCAL, "local", local=pod, external_local=True),
                one(ALSO, "also", local=pod, external_local=True),
                one(KEPT, "kept", affinity_timeout=600),
            ]
    return masquerading(desired(*made))


class Wire:
    """The programs of one node, whose loopback is described as an uplink, and packets
    through them.
    """

    def __init__(self, path: Path_) -> None:
        self.path, self.site, self.plane = path, path.site, path.plane

    def talk(self, v: int, which: int, port: int, script: str) -> None:
        """Sends these packets of a client with this port through a VIP."""
        Flow(self.path, v, which, end(CLIENT[v], port)).send(script)


Run = Callable[..., tuple[int, str, str]]


def key_between(found: Map, one: str, other: str, port: int = 0) -> bytes:
    """The key of the only entry with these two addresses and, if given, this port."""
    both = {bytes(parse_addr(one)), bytes(parse_addr(other))}
    keys = [key for key, _ in found.items() if {key[:16], key[20:36]} == both]
    ports = port.to_bytes(2, "big")
    (key,) = [key for key in keys if not port or ports in (key[16:18], key[36:38])]
    return key


def age(wire: Wire, seconds: float) -> None:
    """Makes all flows idle for `seconds`, at most since the clock began."""
    with wire.site.pinned("flows") as found:
        for key, raw in list(found.items()):
            last = max(0, int.from_bytes(raw[:8], "little") - int(seconds * 1e9))
            found.update(key, last.to_bytes(8, "little") + raw[8:])
