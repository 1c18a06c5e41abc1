"""The image for arm64, on a machine of another architecture: built as it stands, and what an
emulator can run of it. It has no bpf(2), so nothing is compiled or loaded here.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.build.image import Built, image
from tests.support.runtime import emulator

AARCH64 = 0xB7


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    with emulator.aarch64(), image("kbpf", tmp_path_factory.mktemp("arm64"), "arm64") as made:
        yield made


def run(built: Built, *command: str) -> str:
    """What a command prints in the image."""
    done = subprocess.run(
        ["chroot", str(built.root), *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def machine(path: Path) -> int:
    """Of an ELF file."""
    return int.from_bytes(path.read_bytes()[18:20], "little")


def test_all_that_is_native_is_for_it(built: Built):
    """The interpreter, BCC, LLVM, libbpf, and the libraries that came as wheels."""
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


def test_the_agent_starts(built: Built):
    """As far as its settings, and with all that it loads; the emulator has no BPF and no netlink of
    nftables.
    """
    assert run(built, "kbpf", "--version").strip()
    assert "--kubeconfig" in run(built, "kbpf", "run", "--help")
    assert "KbpfConfiguration" in run(
        built, "sh", "-c", "kbpf run --write-config-to /tmp/c && cat /tmp/c && rm /tmp/c"
    )
    code = "import bcc, ctypes, nftables; ctypes.CDLL('libbpf.so.1'); print(bcc.__version__)"
    assert run(built, "python3", "-c", code).strip()
