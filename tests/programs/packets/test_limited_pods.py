# SPDX-License-Identifier: Apache-2.0
"""Devices of pods whose sending is limited, on kernels without TCX: an "ingress" qdisc whose u32
filter takes every packet, as the CNI plugin bandwidth creates them. They cost the node nothing.
"""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kbpf.dataplane.bpf.maps.layout import DEVICE, DeviceFlag
from kbpf.dataplane.bpf.packet_path import device_thread
from kbpf.dataplane.bpf.packet_path.attach import DeviceAttachments
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.dataplane.bpf.programs import hook_probe
from kbpf.kernel.bpf import tc
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import sysctl
from kbpf.model.config import MapSizes
from tests.programs.node.test_hooks_verified import WEB, run_in_new_namespaces
from tests.support.lab.lab import ip, run, until
from tests.support.plane import SIZES, Site

PODS = tuple(f"cali{number}" for number in range(8))


def limit(pod: str) -> None:
    run("tc", "qdisc", "add", "dev", pod, "ingress")
    take = "protocol all prio 1 u32 match u32 0 0 action mirred egress redirect dev sink0"
    run("tc", "filter", "add", "dev", pod, "parent", "ffff:", *take.split())


@contextmanager
def pods() -> Iterator[None]:
    """The pods' devices, and an uplink."""
    device_thread.RESYNC_INTERVAL_S = 0.5
    tc.probe_tcx = lambda: Probe(False, "as before Linux 6.6")
    # The kernel would report addresses of each link a second or two later.
    sysctl.write("net.ipv6.conf.default.addr_gen_mode", "1")
    ip("link add up0 type veth peer name sink0", "link set up0 up", "link set sink0 up")
    with subprocess.Popen(["unshare", "-n", "sleep", "600"]) as other:
        try:
            own = run("readlink", "/proc/self/ns/net")
            until("it is there", lambda: run("readlink", f"/proc/{other.pid}/ns/net") != own)
            for pod in PODS:
                ip(
                    f"link add {pod} type veth peer name {pod}x netns {other.pid}",
                    f"link set {pod} up",
                )
            yield
        finally:
            other.kill()


def serve(site: Site, sizes: MapSizes = SIZES) -> BpfPlane:
    plane = site.open(sizes, packet_path=True)
    plane.apply(WEB, None)
    until("all devices were processed", lambda: plane.status().ready)
    return plane


def without_egress(site: Site) -> int:
    """How many devices the programs take for having none at egress."""
    flags = (DEVICE.unpack(raw)[2] for raw in site.entries("devices").values())
    return sum(DeviceFlag.NO_EGRESS in DeviceFlag(each) for each in flags)


def test_limited_pods_are_named_and_take_no_time(site: Site, caplog):
    passes: list[float] = []
    sync, probe, probed = DeviceAttachments.sync, hook_probe.probe, []

    def timed(*arguments: object) -> object:
        passes.append(time.monotonic())
        return sync(*arguments)

    def counted(*arguments: object) -> object:
        probed.append(arguments)
        return probe(*arguments)

    def story() -> None:
        DeviceAttachments.sync = timed
        hook_probe.probe = counted
        with pods():
            for pod in PODS[1:]:
                limit(pod)
            plane = serve(site)
            passes.clear()
            until("there were 12 passes", lambda: len(passes) > 12)
            # Full passes as often as RESYNC_INTERVAL_S demands, 8 in 4 s, and a few after messages
            # of the kernel. A retry each second would make it 12, and a packet to each device 1.
            assert passes[12] - passes[0] > 4, passes
            assert not probed
            status = plane.status()
            assert status.packets.failed_count == 0
            assert plane.shared.read_metrics().foreign_programs == 0
            (problem,) = status.problems
            assert without_egress(site) == 7
            assert problem.startswith("pod device cali1 and 6 more: an 'ingress' qdisc")
            # what they send passes the plugin's filter first
            for pod in PODS[1:]:
                assert "kbpf" in run("tc", "filter", "show", "dev", pod, "ingress")
            assert "kbpf" in run("tc", "filter", "show", "dev", PODS[0], "egress")
            ip(f"link del {PODS[1]}")
            until("the next one is named", lambda: "cali2 and 5 more" in plane.status().problems[0])
            limits = [record for record in caplog.messages if "'ingress' qdisc" in record]
            assert len(limits) == 1, "it is logged once, and the next one is no news"
            for pod in PODS[2:]:
                run("tc", "qdisc", "del", "dev", pod, "ingress")
            until("no pod is limited", lambda: not plane.status().problems)
            until("the programs know it", lambda: without_egress(site) == 0)
            assert "kbpf" in run("tc", "filter", "show", "dev", PODS[2], "egress")
        plane.close()

    run_in_new_namespaces(story)


def test_old_programs_are_removed_although_a_device_fails(site: Site):
    """The uplink has no place at egress, so it fails for good; what it has is swapped."""

    def story() -> None:
        with pods():
            run("tc", "qdisc", "add", "dev", "up0", "ingress")
            plane = serve(site)
            packets = plane.status().packets
            assert [failure.device for failure in packets.failed] == ["up0"]
            site.close_planes()
            (folder,) = site.pins.glob("programs-tc-*")
            folder.rename(site.pins / "programs-tc-0123456789abcdef")  # of another version
            plane = serve(site)
            until(
                "those of the other version are removed",
                lambda: [*site.pins.glob("*programs-tc-*")] == [folder],
            )
        plane.close()

    run_in_new_namespaces(story)
