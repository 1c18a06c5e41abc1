# SPDX-License-Identifier: Apache-2.0
"""Tests in a process of their own, whose mounts, network devices and patches end with it; and an agent on a device."""

import ctypes
import functools
import os
import sys
import traceback
from collections.abc import Callable

from kbpf.dataplane.bpf.packet_path import device_thread
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.kernel.bpf import tc
from kbpf.kernel.bpf.tc import AttachMethod
from kbpf.kernel.probe_result import Probe
from tests.support.lab.lab import ip, until
from tests.support.plane import Site, desired, service

WEB = desired(service("web", "10.96.0.1:80", "10.244.0.1:8080"))


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """A test that runs in a process with new mount and network namespaces."""

    @functools.wraps(test)
    def run(**fixtures: object) -> None:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                assert libc.unshare(0x20000 | 0x40000000) == 0  # CLONE_NEWNS, CLONE_NEWNET
                assert libc.mount(None, b"/", None, 1 << 18 | 1 << 14, None) == 0  # MS_PRIVATE, MS_REC
                test(**fixtures)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    return run


def switch_off_tcx() -> None:
    """As before Linux 6.6, until this process ends."""
    tc.probe_tcx = lambda: Probe(False, "switched off")


def make_uplink(how: AttachMethod = AttachMethod.TCX) -> None:
    """Makes up0, to which this process attaches programs by this method, and which it looks at often."""
    device_thread.RESYNC_INTERVAL_S = 0.1
    if how is AttachMethod.CLSACT:
        switch_off_tcx()
    ip("link add up0 type veth peer name up1", "link set up0 up", "link set up1 up")


def serve(site: Site, **settings: object) -> BpfPlane:
    """Starts an agent with the packet path on up0, and waits until it is attached."""
    plane = site.start(WEB, **{"packet_path": True, "devices": ("up0",), **settings})
    plane.tick(0.0)
    until("all devices were processed", lambda: plane.status().ready)
    return plane
