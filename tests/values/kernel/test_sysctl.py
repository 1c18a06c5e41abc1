# SPDX-License-Identifier: Apache-2.0
"""The file that a sysctl is read from and written to."""

import pytest

from kbpf.kernel.system import sysctl

ROWS = [
    ("on a node", (), "proc/net/ipv4/ip_forward"),
    ("in a pod with the node's folder mounted", ("net/ipv4/ip_forward",), "host/net/ipv4/ip_forward"),
    ("in a pod, a sysctl that the node lacks", ("net/ipv4/other",), "proc/net/ipv4/ip_forward"),
]


@pytest.mark.parametrize(("name", "given", "file"), ROWS, ids=[row[0] for row in ROWS])
def test_the_file_of_a_sysctl(tmp_path, name, given: tuple[str, ...], file):
    for each in given:
        (tmp_path / "host" / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "host" / each).write_text("1\n")
    found = sysctl.path_of("net.ipv4.ip_forward", tmp_path / "proc", tmp_path / "host")
    assert found == tmp_path / file
