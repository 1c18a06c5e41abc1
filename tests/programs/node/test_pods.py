# SPDX-License-Identifier: Apache-2.0
"""Pods of this node are found by real cgroups with kubelet's names."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kbpf.kernel.system import mounts, pods
from kbpf.kernel.system.mounts import Cgroup
from tests.support.lab.lab import cgroup2, remove_cgroup

UID = "0a1b2c3d-0000-4000-8000-000000000001"


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
