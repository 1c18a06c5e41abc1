# SPDX-License-Identifier: Apache-2.0
"""Devices of pods whose sending is limited, on kernels without TCX: an "ingress" qdisc whose u32
filter takes every packet, as the CNI plugin bandwidth creates them. They cost the node nothing.
"""

import time

import pytest

from kbpf.dataplane.bpf.maps.layout import DEVICE, DeviceFlag
from kbpf.dataplane.bpf.packet_path import device_thread
from kbpf.dataplane.bpf.packet_path.attach import DeviceAttachments
from kbpf.dataplane.bpf.programs import hook_probe
from kbpf.kernel.system import sysctl
from tests.support.alone import alone, serve, switch_off_tcx
from tests.support.lab.lab import ip, run, until
from tests.support.lab.namespace import Namespace
from tests.support.plane import Site

PODS = tuple(f"cali{number}" for number in range(8))


def limit(pod: str) -> None:
    run("tc", "qdisc", "add", "dev", pod, "ingress")
    take = "protocol all prio 1 u32 match u32 0 0 action mirred egress redirect dev sink0"
    run("tc", "filter", "add", "dev", pod, "parent", "ffff:", *take.split())


@pytest.fixture
def far(namespace: Namespace) -> str:
    """Where the far ends of the pods' devices are."""
    return namespace.name


def make_pods(far: str) -> None:
    """The pods' devices, and an uplink."""
    device_thread.RESYNC_INTERVAL_S = 0.5
    switch_off_tcx()
    # The kernel would report addresses of each link a second or two later.
    sysctl.write("net.ipv6.conf.default.addr_gen_mode", "1")
    ip("link add up0 type veth peer name sink0", "link set up0 up", "link set sink0 up")
    for pod in PODS:
        ip(f"link add {pod} type veth peer name {pod}x netns {far}", f"link set {pod} up")


def without_egress(site: Site) -> int:
    """How many devices the programs take for having none at egress."""
    flags = (DEVICE.unpack(raw)[2] for raw in site.entries("devices").values())
    return sum(DeviceFlag.NO_EGRESS in DeviceFlag(each) for each in flags)


@alone
def test_limited_pods_are_named_and_take_no_time(site: Site, far: str, caplog):
    passes: list[float] = []
    sync, probe, probed = DeviceAttachments.sync, hook_probe.probe, []

    def timed(*arguments: object) -> object:
        passes.append(time.monotonic())
        return sync(*arguments)

    def counted(*arguments: object) -> object:
        probed.append(arguments)
        return probe(*arguments)

    DeviceAttachments.sync = timed
    hook_probe.probe = counted
    make_pods(far)
    for pod in PODS[1:]:
        limit(pod)
    plane = serve(site, devices=())
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


@alone
def test_old_programs_are_removed_although_a_device_fails(site: Site, far: str):
    """The uplink has no place at egress, so it fails for good; what it has is swapped."""

    make_pods(far)
    run("tc", "qdisc", "add", "dev", "up0", "ingress")
    plane = serve(site, devices=())
    packets = plane.status().packets
    assert [failure.device for failure in packets.failed] == ["up0"]
    site.close_planes()
    (folder,) = site.pins.glob("programs-tc-*")
    folder.rename(site.pins / "programs-tc-0123456789abcdef")  # of another version
    plane = serve(site, devices=())
    until(
        "those of the other version are removed",
        lambda: [*site.pins.glob("*programs-tc-*")] == [folder],
    )
    plane.close()
