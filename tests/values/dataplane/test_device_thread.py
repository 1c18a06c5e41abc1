# SPDX-License-Identifier: Apache-2.0
"""When devices that failed are tried again, and which hooks are probed."""

import pytest

from kbpf.dataplane.bpf.packet_path.device_thread import DeviceRetries
from kbpf.dataplane.bpf.programs import hook_probe
from kbpf.dataplane.bpf.programs.hook_probe import HookProber, Point, ProbeOutcome, select_representative
from kbpf.kernel.bpf.clsact import Direction, Filter
from kbpf.kernel.bpf.tc import Runner
from kbpf.kernel.net.devices import Device
from tests.support.table import each_cells


def test_device_that_fails_for_good_is_tried_ever_more_rarely():
    retries, now, times = DeviceRetries(), 100.0, []
    assert retries.due == float("inf")
    retries.update(["bad"], now)
    while len(times) < 8:
        now = retries.due
        times.append(now - 100)
        retries.update(["bad"], now)
    assert times == [1, 3, 7, 15, 31, 61, 91, 121]


def test_each_device_has_a_pace_of_its_own():
    retries = DeviceRetries()
    for now in (100, 101, 103):
        retries.update(["bad"], now)
    assert retries.due == 107
    retries.update(["bad", "worse"], 104)
    assert retries.due == 105, "of the new one"
    retries.update(["bad"], 105)
    assert retries.due == 107
    retries.update([], 107)
    assert retries.due == float("inf")
    retries.update(["bad"], 200)
    assert retries.due == 201, "it worked meanwhile"


RUNNERS = {
    "ours": Runner(7, "bpf filter, pref 2", True),
    "policy": Runner(5, "bpf filter, pref 1", False),
    "u32": Runner(0, "u32 filter, pref 1", False),
}


@each_cells(
    "names, up, count",
    """\
a filter that is no program | u32 ours | yes | 0
and a program | policy u32 ours | yes | 0
nothing before ours | ours policy | yes | 0
a device that is down | policy ours | no | 0
a program | policy ours | yes | 1
""",
    up=bool,
    count=int,
)
def test_hook_is_probed_once_unless_a_filter_takes_packets(names, up, count, monkeypatch):
    """RUNNERS of a hook, whether the device is up, and how often it is probed."""
    runners = tuple(RUNNERS[name] for name in names.split())
    point, probed = Point(Device(3, "cali3", up=up), Direction.INGRESS, runners), []

    def lose(_: object, point: Point, *__: object) -> ProbeOutcome:
        probed.append(point)
        return ProbeOutcome(point, False)

    monkeypatch.setattr(hook_probe, "probe", lose)
    prober, now = HookProber(None), 100.0  # type: ignore[arg-type]
    monkeypatch.setattr(hook_probe.time, "monotonic", lambda: now)
    for _ in range(3):
        prober.begin_pass([3])
        prober.read(point)
    assert len(probed) == count
    now += hook_probe.UNREACHED_RETRY_S
    prober.begin_pass([3])
    prober.read(point)
    assert len(probed) == 2 * count


@pytest.mark.parametrize(
    ("kind", "handle", "is_table"),
    [("u32", 0x80000000, True), ("u32", 0x80000800, False), ("bpf", 0x1000, False)],
)
def test_hash_tables_of_u32_are_no_filters(kind, handle, is_table):
    assert Filter(kind, 1, 3, handle, "", 0).is_hash_table is is_table


def test_only_one_of_many_alike_pod_devices_is_probed():
    ours, policy, other = Runner(1, "tcx", True), Runner(2, "tcx", False), Runner(3, "tcx", False)
    names = {1: "tc_ingress", 2: "policy", 3: "policy", 4: "other"}

    def point(number: int, *programs: Runner, up: bool = True) -> Point:
        return Point(Device(number, f"dev{number}", up=up), Direction.INGRESS, programs)

    points = [
        point(1, ours),
        point(2, ours),
        point(11, ours),
        point(12, policy, ours),
        point(13, other, ours),
        point(14, ours, policy),
        point(15, policy, ours, up=False),
    ]
    selected = select_representative(points, names, host=(1, 2))
    assert [chosen.device.ifindex for chosen in selected] == [1, 2, 12, 14]
    many = [point(number, ours) for number in range(1, 200)]
    assert len(select_representative(many, names, range(1, 200))) == 2 * hook_probe.MAX_PROBED
