# SPDX-License-Identifier: Apache-2.0
"""Device offloads: checksums, segmentation (TSO, GSO), and aggregation (GRO). A veth pair forwards
unfinished checksums and GSO packets as they are, unless an offload is switched off at either end.
"""

import ctypes
import fcntl
import socket
import struct
from pathlib import Path

from kbpf.kernel.system import netns

_SIOCETHTOOL = 0x8946
_SET = {"rx": 0x15, "tx": 0x17, "sg": 0x19, "tso": 0x1F, "gso": 0x24, "gro": 0x2C}
"""The commands of linux/ethtool.h (ETHTOOL_SRXCSUM and so on) by the names that ethtool uses."""


def offload(where: str | None, device: str, feature: str, on: bool) -> None:
    """Switches an offload of a device in the namespace `where` (None: our own). Without `tx` the
    sender's kernel computes each checksum and makes each segment, and the receiver's verifies them.
    """

    def change() -> None:
        value = ctypes.create_string_buffer(struct.pack("=II", _SET[feature], on))
        request = struct.pack("=16sQ16x", device.encode(), ctypes.addressof(value))
        with socket.socket() as s:
            fcntl.ioctl(s, _SIOCETHTOOL, request)

    if where is None:
        change()
    else:
        netns.run_in(Path("/run/netns") / where, change)
