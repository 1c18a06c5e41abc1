# SPDX-License-Identifier: Apache-2.0
"""Pods of this node are found by real cgroups with kubelet's names."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kbpf.kernel.system import mounts, pods
from kbpf.kernel.system.mounts import Cgroup
from tests.support.lab.lab import cgroup2, remove_cgroup
from tests.support.table import each_line

UID = "0a1b2c3d-0000-4000-8000-000000000001"


@each_line(
    "path, own, belongs",
    """
/kubepods/pod{uid}                                                                   | yes | yes
/kubepods/besteffort/pod{uid}                                                        | yes | yes
/kubepods/besteffort/pod{uid}/0123                                                   | no  | yes
/kubepods/pod{uid_}
/kubepods.slice/kubepods-pod{uid_}.slice                                             | yes | yes
/kubepods.slice/kubepods-burstable-pod{uid_}.slice/cri-1.scope                       | no  | yes
/docker.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{uid_}.slice  | yes | yes
/kubepods.slice/kubepods-pod{uid}.slice
/kubepods.slice/kubepods-pod{uid_}.scope
/kubepods/burstable
/system.slice/pod{uid}
/system.slice/foo-pod{uid_}.slice
/
""",
    own=lambda cell: cell == "yes",
    belongs=lambda cell: cell == "yes",
)
def test_uid_of_a_cgroup(path, own, belongs):
    """A cgroup ({uid}; {uid_}: with underscores), whether it is a Pod's own, and whether it belongs to the Pod."""
    path = path.format(uid=UID, uid_=UID.replace("-", "_"))
    assert [pods.pod_uid_of_folder(path) == UID, pods.pod_uid(path) == UID] == [own, belongs]


def test_uid_of_a_static_pod():
    assert pods.pod_uid(f"/kubepods/pod{32 * 'f'}/x/y") == 32 * "f"


@pytest.fixture
def container() -> Iterator[Path]:
    """A container's cgroup."""
    top = cgroup2() / f"kbpod{os.getpid()}"
    folders = [top, top / "kubepods", top / "kubepods" / f"pod{UID}"]
    folders.append(folders[-1] / "c1")
    for folder in folders:
        folder.mkdir()
    yield folders[-1]
    for folder in reversed(folders):
        remove_cgroup(folder)


@pytest.mark.parametrize("mask", [~0, 0xFFFF_FFFF])
def test_cgroups_and_their_pods_are_found_by_ids(container: Path, monkeypatch, mask: int):
    numbers = [folder.stat().st_ino & mask for folder in (container, container.parents[2])]
    found = mounts.find_cgroups([*numbers, (1 << 31) - 1], mask)
    assert found == {
        number: Cgroup(folder, f"/{folder.relative_to(cgroup2())}")
        for number, folder in zip(numbers, (container, container.parents[2]), strict=True)
    }
    assert pods.name_pods(found) == {numbers[0]: f"uid {UID}"}
    monkeypatch.setattr(pods, "list_pod_names", lambda: {UID: "shop/cart-0"})
    assert pods.name_pods(found) == {numbers[0]: "shop/cart-0"}
