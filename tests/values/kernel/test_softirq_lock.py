# SPDX-License-Identifier: Apache-2.0
"""On which kernels one TC program can interrupt another on the same CPU."""

from typing import NamedTuple

import pytest

from kbpf.kernel.bpf import probe


class Row(NamedTuple):
    """A kernel: whether it is PREEMPT_RT, its configuration, and whether softirqs are
    serialized.
    """

    name: str
    realtime: bool
    configuration: str | None
    works: bool | None


ROWS = [
    Row("not PREEMPT_RT", False, None, True),
    Row("PREEMPT_RT before 6.18", True, "CONFIG_PREEMPT_RT=y\n", True),
    Row("PREEMPT_RT since 6.18, with the lock", True,
        f"CONFIG_PREEMPT_RT=y\n{probe.BH_LOCK_CONFIG}=y\n", True),
    Row("PREEMPT_RT since 6.18, without the lock", True,
        f"CONFIG_PREEMPT_RT=y\n# {probe.BH_LOCK_CONFIG} is not set\n", False),
    Row("PREEMPT_RT, configuration unreadable", True, None, None),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_which_kernels_serialize_softirqs(row: Row):
    found = probe.evaluate_softirq_lock(row.realtime, row.configuration)
    assert found.works is row.works
    assert bool(found.reason) is (row.works is not True)


def test_this_machine_serializes_softirqs_or_is_unknown():
    assert probe.probe_softirq_lock().works is not False
