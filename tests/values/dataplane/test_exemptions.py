# SPDX-License-Identifier: Apache-2.0
"""Which cgroups the patterns of --socket-lb-exempt match; over time: tests/programs/sockets/test_exemptions.py."""

import pytest

from kbpf.dataplane.bpf import exemptions
from kbpf.dataplane.bpf.exemptions import find_matching
from tests.support.table import pairs

CGROUPS = "system.slice system.slice/istio-a.service system.slice/istio-b.service system.slice/sshd.service \
system.slice/sshd.service/istio mesh"


PATTERNS = pairs("""\
system.slice/istio* → system.slice/istio-a.service system.slice/istio-b.service
system.slice/istio-a.service → system.slice/istio-a.service
*istio* → system.slice/istio-a.service system.slice/istio-b.service system.slice/sshd.service/istio
system.slice/istio-?.service mesh → system.slice/istio-a.service system.slice/istio-b.service mesh
system.slice/istio-[b-z]* → system.slice/istio-b.service
mesh → mesh
mes →
SYSTEM.slice →""")


@pytest.mark.parametrize(("patterns", "matches"), PATTERNS)
def test_patterns_match_cgroup_paths(tmp_path, patterns: str, matches: str, monkeypatch):
    for path in CGROUPS.split():
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
    ids = {path: (tmp_path / path).stat().st_ino for path in CGROUPS.split()}
    looked: list[str] = []
    inside = exemptions._list_children
    monkeypatch.setattr(exemptions, "_list_children", lambda root, at: looked.append(at) or inside(root, at))
    found = {folder[:2] for folder in find_matching(tmp_path, tuple(patterns.split()))}
    assert found == {(path, ids[path]) for path in matches.split()}
    if patterns == "mesh":
        assert looked == [""], "folders below which nothing can match are not read"
