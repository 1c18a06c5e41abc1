# SPDX-License-Identifier: Apache-2.0
"""Which kernels keep the addresses of their own sockets."""

import pytest

from kbpf.kernel.bpf.kernel_members import keeps_addresses
from tests.support.table import pairs

RELEASES = pairs("""\
5.10.0-32-amd64 → no
5.15.0-113-generic → no
6.1.0-50-amd64 → no
6.5.13 → no
6.6.0 → yes
6.12.117+deb13-amd64 → yes
7.2.13+deb14-amd64 → yes
10.0-rc1 → yes
unknown → no""")


@pytest.mark.parametrize(("release", "keeps"), RELEASES)
def test_release_with_the_corrections(release: str, keeps: str):
    assert keeps_addresses(release) is (keeps == "yes")
