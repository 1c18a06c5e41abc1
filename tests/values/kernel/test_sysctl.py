# SPDX-License-Identifier: Apache-2.0
"""The file that a sysctl is read from and written to."""

from kbpf.kernel.system import sysctl
from tests.support.table import each_cells


@each_cells(
    "given, file",
    """\
on a node |  | proc/net/ipv4/ip_forward
in a pod with the node's folder mounted | net/ipv4/ip_forward | host/net/ipv4/ip_forward
in a pod, a sysctl that the node lacks | net/ipv4/other | proc/net/ipv4/ip_forward
""",
)
def test_the_file_of_a_sysctl(tmp_path, given, file):
    for each in given.split():
        (tmp_path / "host" / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "host" / each).write_text("1\n")
    found = sysctl.path_of("net.ipv4.ip_forward", tmp_path / "proc", tmp_path / "host")
    assert found == tmp_path / file
