# SPDX-License-Identifier: Apache-2.0
"""Which new devices wait for the CNI plugin bandwidth. tests/lab/cni/test_bandwidth.py has it."""

import pytest

from kbpf.dataplane.bpf.packet_path import device_roles
from kbpf.dataplane.bpf.packet_path.device_roles import GRACE_S, DeviceRole, Newcomers, RoleChoice
from kbpf.kernel.bpf.tc import AttachMethod
from kbpf.kernel.net.devices import Device

DEVICES = {
    "old": Device(1, "cali1", "veth"),
    "uplink": Device(2, "eth0"),
    "new": Device(3, "cali3", "veth"),
    "port": Device(4, "veth4", "veth"),
    "vxlan": Device(5, "vx0", "vxlan"),
    "limiter": Device(8, "bwp47c1d8db460b", "ifb"),
    "other-ifb": Device(9, "ifb0", "ifb"),
}
ROLES = {
    DeviceRole.POD: "old new",
    DeviceRole.HOST: "uplink vxlan",
    DeviceRole.PORT: "port",
    DeviceRole.SKIPPED: "limiter other-ifb",
}
CHOICES = {DEVICES[name].ifindex: RoleChoice(role, "") for role, names in ROLES.items() for name in names.split()}
ALL = "old uplink limiter new port vxlan"
ROWS = f"""\
devices of the first listing do not wait: CLSACT; 0 old limiter
new devices of pods and ports wait: CLSACT; 0 old uplink limiter; 10 {ALL} = new port; 11 {ALL} = new port
and not for ever: CLSACT; 0 old uplink limiter; 10 {ALL} = new port; {10 + GRACE_S} {ALL}
no pod was limited: CLSACT; 0 old other-ifb; 10 old other-ifb new
a limit is remembered: CLSACT; 0 old; 1 old limiter; 2 old; 9 old new = new
a device that ends and comes back is new: CLSACT; 0 old new limiter; 5 old limiter; 9 new limiter = new
with TCX nothing waits: TCX; 0 old limiter; 9 old limiter new
""".splitlines()
"""How programs are attached, and listings: seconds since the first one, the devices = those that wait."""


@pytest.mark.parametrize("row", ROWS)
def test_who_waits(row, monkeypatch):
    method, *listings = row.partition(": ")[2].split("; ")
    known = Newcomers()
    for listing in listings:
        there, _, waiting = listing.partition(" = ")
        seconds, *names = there.split()
        monkeypatch.setattr(device_roles.time, "monotonic", lambda at=float(seconds): 100 + at)
        found = known.find_waiting(tuple(DEVICES[name] for name in names), CHOICES, AttachMethod[method])
        assert found == {DEVICES[name].ifindex for name in waiting.split()}, seconds
