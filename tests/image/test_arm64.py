# SPDX-License-Identifier: Apache-2.0
"""The image for arm64 on a machine of another architecture: built as it is, and run in an emulator
as far as possible. The emulator has no bpf(2), so nothing is compiled or loaded here.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.build.image import Built, image
from tests.support.lab.lab import run
from tests.support.runtime import emulator

AARCH64 = 0xB7


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    with emulator.aarch64(), image("kbpf", tmp_path_factory.mktemp("arm64"), "arm64") as made:
        yield made


def run_in(built: Built, *command: str) -> str:
    return run("chroot", str(built.root), *command)


def machine(path: Path) -> int:
    """The machine type of an ELF file."""
    return int.from_bytes(path.read_bytes()[18:20], "little")


def test_all_native_files_are_for_arm64(built: Built):
    """The interpreter, BCC, LLVM, libbpf, and the libraries installed as wheels."""
    print(f"size: {built.size / 1e6:.0f} MB")
    found = [
        path
        for pattern in ("usr/bin/python3.*", "usr/lib/aarch64-linux-gnu/lib*.so.*", "opt/**/*.so")
        for path in built.root.glob(pattern)
        if path.is_file() and not path.is_symlink()
    ]
    names = " ".join(path.name for path in found)
    for name in ("python3.11", "libbcc.so", "libLLVM", "libbpf.so", "_core"):
        assert name in names
    assert {machine(path) for path in found if path.read_bytes()[:4] == b"\x7fELF"} == {AARCH64}


def test_agent_starts_with_its_libraries(built: Built):
    """Up to its settings, with all of its libraries. The emulator has no BPF and no netlink of
    nftables.
    """
    assert run_in(built, "kbpf", "--version").strip()
    assert "--kubeconfig" in run_in(built, "kbpf", "run", "--help")
    written = "kbpf run --write-config-to /tmp/c && cat /tmp/c && rm /tmp/c"
    assert "KbpfConfiguration" in run_in(built, "sh", "-c", written)
    code = "import bcc, ctypes, nftables; ctypes.CDLL('libbpf.so.1'); print(bcc.__version__)"
    assert run_in(built, "python3", "-c", code).strip()
