# SPDX-License-Identifier: Apache-2.0
"""On which kernels one TC program can interrupt another on the same CPU."""

from kbpf.kernel.bpf import probe
from tests.support.table import each_case

ROWS = {
    "not PREEMPT_RT": (False, None, True),
    "PREEMPT_RT before 6.18": (True, "CONFIG_PREEMPT_RT=y\n", True),
    "PREEMPT_RT since 6.18, with the lock": (True, f"CONFIG_PREEMPT_RT=y\n{probe.BH_LOCK_CONFIG}=y\n", True),
    "PREEMPT_RT since 6.18, without the lock": (
        True,
        f"CONFIG_PREEMPT_RT=y\n# {probe.BH_LOCK_CONFIG} is not set\n",
        False,
    ),
    "PREEMPT_RT, configuration unreadable": (True, None, None),
}
"""A kernel: whether it is PREEMPT_RT, its configuration, and whether softirqs are serialized."""


@each_case("realtime, configuration, works", ROWS)
def test_which_kernels_serialize_softirqs(realtime, configuration, works):
    found = probe.evaluate_softirq_lock(realtime, configuration)
    assert found.works is works
    assert bool(found.reason) is (works is not True)


def test_this_machine_serializes_softirqs_or_is_unknown():
    assert probe.probe_softirq_lock().works is not False
