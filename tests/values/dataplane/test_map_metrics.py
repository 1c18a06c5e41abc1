# SPDX-License-Identifier: Apache-2.0
"""Which Service ports are counted in one entry when the map of counters is full."""

import re

from kbpf.dataplane.bpf.map_metrics import select_over_share
from tests.support.table import each_cells


@each_cells(
    "entries, chosen",
    """
three quarters full: no port      | a/1=75
one namespace: its largest port   | a/1=60 a/2=30                      | 1
other namespaces keep theirs      | a/1=50 a/2=30 b/3=10 c/4=10        | 1
as many ports as needed           | a/1=20 a/2=20 a/3=20 a/4=20 a/5=16 | 3 4
two namespaces fill the map       | a/1=50 b/2=50                      | 1
""",
)
def test_service_ports_over_their_share_are_summed_up(entries, chosen):
    """Entries of Service ports, ``namespace/id=entries``, out of 100; which of the ports are summed up."""
    found = re.findall(r"(\w)/(\d+)=(\d+)", entries)
    ports = {int(number): (namespace, int(size)) for namespace, number, size in found}
    total = sum(size for _, size in ports.values())
    assert sorted(select_over_share(ports, total, 100)) == sorted(map(int, chosen.split()))


def test_ports_of_one_entry_are_not_summed_up():
    assert select_over_share(dict.fromkeys(range(100), ("a", 1)), 100, 100) == []
