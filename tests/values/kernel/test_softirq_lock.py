"""Which kernels let two programs at TC take turns on one CPU."""

from typing import NamedTuple

import pytest

from kbpf.kernel.bpf import probe


class Row(NamedTuple):
    """A kernel: whether it is PREEMPT_RT, its configuration, and what follows."""

    name: str
    realtime: bool
    configuration: str | None
    works: bool | None


ROWS = [
    Row("any that is not PREEMPT_RT", False, None, True),
    Row("PREEMPT_RT before 6.18", True, "CONFIG_PREEMPT_RT=y\n", True),
    Row("since, with the lock", True, f"CONFIG_PREEMPT_RT=y\n{probe.BH_LOCK_CONFIG}=y\n", True),
    Row(
        "since, without", True, f"CONFIG_PREEMPT_RT=y\n# {probe.BH_LOCK_CONFIG} is not set\n", False
    ),
    Row("nothing to read", True, None, None),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_lock(row: Row):
    found = probe.evaluate_softirq_lock(row.realtime, row.configuration)
    assert found.works is row.works
    assert bool(found.reason) is (row.works is not True)


def test_this_machine():
    assert probe.probe_softirq_lock().works is not False
