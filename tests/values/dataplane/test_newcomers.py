# SPDX-License-Identifier: Apache-2.0
"""Which new devices wait for the CNI plugin bandwidth. tests/lab/cni/test_bandwidth.py has it."""

import pytest

from kbpf.dataplane.bpf.packet_path import newcomers
from kbpf.dataplane.bpf.packet_path.device_roles import DeviceRole, RoleChoice
from kbpf.dataplane.bpf.packet_path.newcomers import GRACE_S, Newcomers
from kbpf.kernel.bpf.tc import AttachMethod
from kbpf.kernel.net.devices import Device

OLD, UPLINK = Device(1, "cali1", "veth"), Device(2, "eth0")
NEW, PORT, VXLAN = Device(3, "cali3", "veth"), Device(4, "veth4", "veth"), Device(5, "vx0", "vxlan")
LIMITER, OTHER_IFB = Device(8, "bwp47c1d8db460b", "ifb"), Device(9, "ifb0", "ifb")
ROLES = {
    1: DeviceRole.POD,
    2: DeviceRole.HOST,
    3: DeviceRole.POD,
    4: DeviceRole.PORT,
    5: DeviceRole.HOST,
    8: DeviceRole.SKIPPED,
    9: DeviceRole.SKIPPED,
}
CHOICES = {index: RoleChoice(role, "") for index, role in ROLES.items()}
CLSACT, TCX = AttachMethod.CLSACT, AttachMethod.TCX

Listing = tuple[float, tuple[Device, ...], set[int]]
"""Seconds since the first listing, the devices, and those that wait."""

ROWS: dict[str, tuple[AttachMethod, tuple[Listing, ...]]] = {
    "devices of the first listing do not wait": (CLSACT, ((0, (OLD, LIMITER), set()),)),
    "new devices of pods and ports wait for a while": (
        CLSACT,
        (
            (0, (OLD, UPLINK, LIMITER), set()),
            (10, (OLD, UPLINK, LIMITER, NEW, PORT, VXLAN), {3, 4}),
            (10 + GRACE_S / 2, (OLD, UPLINK, LIMITER, NEW, PORT, VXLAN), {3, 4}),
            (10 + GRACE_S, (OLD, UPLINK, LIMITER, NEW, PORT, VXLAN), set()),
        ),
    ),
    "no pod was limited": (CLSACT, ((0, (OLD, OTHER_IFB), set()), (10, (OLD, OTHER_IFB, NEW), set()))),
    "a limit is remembered": (
        CLSACT,
        ((0, (OLD,), set()), (1, (OLD, LIMITER), set()), (2, (OLD,), set()), (9, (OLD, NEW), {3})),
    ),
    "a device that ends and comes back is new": (
        CLSACT,
        ((0, (OLD, NEW, LIMITER), set()), (5, (OLD, LIMITER), set()), (9, (NEW, LIMITER), {3})),
    ),
    "with TCX nothing waits": (TCX, ((0, (OLD, LIMITER), set()), (9, (OLD, LIMITER, NEW), set()))),
}


@pytest.mark.parametrize("name", ROWS)
def test_who_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, listings = ROWS[name]
    known = Newcomers()
    for seconds, devices, waiting in listings:
        monkeypatch.setattr(newcomers.time, "monotonic", lambda at=seconds: 100 + at)
        assert known.find_waiting(devices, CHOICES, method) == waiting, seconds
