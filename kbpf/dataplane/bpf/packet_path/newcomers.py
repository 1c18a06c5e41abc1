# SPDX-License-Identifier: Apache-2.0
"""New devices of pods wait for the CNI plugin bandwidth, on kernels without TCX.

To limit what a pod sends, the plugin adds an "ingress" qdisc to the pod's device, which fails if a
clsact is there; then the pod cannot be created. It runs some milliseconds after the device was. So
once one of its ifb devices was seen on the node, new devices get our filters after GRACE_S. The
first such pod may fail; kubelet tries again, and by then the ifb device was seen.

Our programs have no place on the device of such a pod (describe_limited()).
"""

import time
from collections.abc import Collection, Mapping
from typing import Final

from kbpf.dataplane.bpf.packet_path.device_roles import DeviceRole, RoleChoice
from kbpf.kernel.bpf.tc import AttachMethod
from kbpf.kernel.net.devices import Device

LIMITER_PREFIX: Final = "bwp"
"""How the plugin names its ifb devices (containernetworking/plugins v1.9.1, bandwidth/main.go)."""
GRACE_S: Final = 2.0


def describe_limited(names: Collection[str]) -> str:
    """The problem of pod devices with an "ingress" qdisc. `names`: not empty, in order."""
    suffix = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"pod device {next(iter(names))}{suffix}: an 'ingress' qdisc, as of the CNI plugin "
        "bandwidth (kubernetes.io/egress-bandwidth), has the place of kbpf's programs, so the "
        "Pod's own packets to Services are translated by socket hooks only, and with --forwarding "
        "stack it sees its clients' own addresses; Linux 6.6 has no such limit"
    )


class Newcomers:
    """Remembers since when each device exists."""

    def __init__(self) -> None:
        self._seen_at: dict[int, float] | None = None
        self._pods_are_limited = False

    def find_waiting(
        self, listing: Collection[Device], choices: Mapping[int, RoleChoice], method: AttachMethod
    ) -> frozenset[int]:
        """The ifindexes of devices that get no filters yet. Those of the first listing are not
        new: their plugins have run, or have failed by now.
        """
        now, seen_at = time.monotonic(), self._seen_at
        self._seen_at = {
            index: -GRACE_S if seen_at is None else seen_at.get(index, now)
            for index in (device.ifindex for device in listing)
        }
        self._pods_are_limited |= any(
            device.kind == "ifb" and device.name.startswith(LIMITER_PREFIX) for device in listing
        )
        if method is AttachMethod.TCX or not self._pods_are_limited:
            return frozenset()
        return frozenset(
            index
            for index, at in self._seen_at.items()
            if now < at + GRACE_S and choices[index].role in (DeviceRole.POD, DeviceRole.PORT)
        )
