# SPDX-License-Identifier: Apache-2.0
"""A link without link headers: two tun devices and a thread that copies packets between them, like
a VPN in user space.
"""

import contextlib
import fcntl
import os
import select
import struct
import threading
from functools import partial
from pathlib import Path
from typing import Self

from kbpf.kernel.system import netns

_TUNSETIFF, _TUN, _NO_PI = 0x400454CA, 1, 0x1000


class Tunnel:
    """A device of this name in each of two namespaces, for the time of a `with` block."""

    def __init__(self, device: str, *where: str | None) -> None:
        self.device = device
        self.where = where
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            ends = []
            for name in self.where:
                end = netns.run_in(Path("/run/netns") / str(name), partial(_opened, self.device))
                stack.callback(os.close, end)
                ends.append(end)
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            thread = threading.Thread(target=_carry, args=(*ends, reading), name=self.device)
            thread.start()
            stack.callback(thread.join)
            stack.callback(os.close, writing)  # ends the thread
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _opened(device: str) -> int:
    made = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(made, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TUN | _NO_PI))
    return made


def _carry(one: int, other: int, stop: int) -> None:
    ears = select.poll()
    for each in (one, other):
        ears.register(each, select.POLLIN)
    ears.register(stop, select.POLLHUP)
    while True:
        ready = dict(ears.poll())
        if stop in ready:
            return
        for each, to in ((one, other), (other, one)):
            if ready.get(each, 0) & select.POLLIN:
                with contextlib.suppress(OSError):  # a device may be down
                    os.write(to, os.read(each, 1 << 16))
            elif each in ready:
                select.select([stop], [], [], 0.01)  # a device that is down is always ready
