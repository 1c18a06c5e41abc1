"""Whether the packet path is there, and if not, why."""

from typing import Final

import msgspec

from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.dataplane.bpf.maps.layout import DeviceFlag, Reason, Role
from kbpf.model.status import DeviceFailure
from kbpf.views.columns import Column

NEEDS: Final = Part.STATUS | Part.PACKETS | Part.FILL

ALARM_SHARE: Final = 0.8
SWITCHED_OFF: Final = "switched off by --packet-path false"


class PacketView(msgspec.Struct, frozen=True):
    """The packet path of one node.

    `state`: ``on``; ``off``, as it was asked for; or ``failed``, which `why` explains.
    `connections`: open ones; `entries`: with closed ones and those whose time is over, which stay
    until their room is needed. `room`: most that there may be. `alarm`: 80 % of it have connections
    that would not make room by themselves (half open or closed ones do), so some are broken off
    soon.
    `created`: connections since the counters began; `forgotten` of them have no entry any more:
    it went to make room, or to a new connection from the same port. None while that cannot be
    told. `evicted`: streams of UDP in use that had to make room for new connections.
    """

    state: str
    why: str
    host_devices: int
    pod_devices: int
    failed: tuple[DeviceFailure, ...]
    failed_count: int
    connections: int
    entries: int
    room: int
    alarm: bool
    created: int
    forgotten: int | None
    evicted: int


def build_view(snapshot: Snapshot) -> PacketView:
    """All of it."""
    state, reason = packet_path_state(snapshot)
    packet_status = snapshot.status.packets if snapshot.status else None
    fill, devices = snapshot.fill, snapshot.devices.values()
    entries = fill.entries if fill else 0
    created = snapshot.reasons.get(Reason.NEW_FLOW, 0)
    return PacketView(
        state=state,
        why=reason,
        host_devices=sum(device.role == Role.HOST for device in devices),
        pod_devices=sum(device.role == Role.POD for device in devices),
        failed=packet_status.failed if packet_status else (),
        failed_count=packet_status.failed_count if packet_status else 0,
        connections=fill.open if fill else 0,
        entries=entries,
        room=fill.room if fill else 0,
        alarm=fill is not None and state == "on" and fill.needed >= ALARM_SHARE * fill.room,
        created=created,
        # Fewer than there are: the counters are younger than the map.
        forgotten=created - entries if created >= entries else None,
        evicted=snapshot.reasons.get(Reason.EVICTED, 0),
    )


def packet_path_state(snapshot: Snapshot) -> tuple[str, str]:
    """``on``, ``off`` or ``failed``, and why it is not on. Needs Part.STATUS and Part.PACKETS.

    What is pinned serves, also after the agent has gone.
    """
    packet_status = snapshot.status.packets if snapshot.status else None
    if packet_status is not None and packet_status.wanted and packet_status.problem:
        return "failed", packet_status.problem
    if (
        packet_status is not None
        and not packet_status.wanted
        and snapshot.status
        and not snapshot.packet_programs
    ):
        return "off", SWITCHED_OFF
    if not snapshot.packet_programs:
        return (
            "off",
            "no packet programs are pinned" if packet_status is None else "not attached yet",
        )
    return "on", ""


def unavailable_notice(snapshot: Snapshot) -> str:
    """One line for whoever looks at what is empty then; "" when the packet path is on."""
    state, reason = packet_path_state(snapshot)
    return "" if state == "on" else f"the packet path is {state}: {reason}"


FLAG_NAMES: Final = {DeviceFlag.LOCAL: "pods", DeviceFlag.PEER: "peer"}

FAILURE_COLUMNS: Final = (
    Column("NOT ON DEVICE", lambda f: f.device),
    Column("WHY", lambda f: f.why),
)
