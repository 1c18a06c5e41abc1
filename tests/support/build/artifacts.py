# SPDX-License-Identifier: Apache-2.0
"""The compiled BPF programs, which the processes of a test run share: BCC takes ten seconds, and
under emulation forty.
"""

import fcntl
import functools
import os
import tempfile
from pathlib import Path

from kbpf.dataplane.bpf.hooks import UNITS
from kbpf.dataplane.bpf.programs import artifact, compile

ARTIFACTS = "KBPF_TEST_ARTIFACTS"
"""The environment variable names a folder of artifacts made by `kbpf compile` elsewhere."""


def shared_cache() -> Path:
    """The cache folder of the tests' agents."""
    return Path(os.environ.get(ARTIFACTS) or Path(tempfile.gettempdir()) / "kbpf-test-cache")


@functools.cache
def compiled() -> Path:
    """shared_cache(), with the artifacts of the working tree's programs."""
    folder = shared_cache()
    if ARTIFACTS in os.environ:
        return folder
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for unit in UNITS:
            compile.find_or_compile(unit, folder)
    return folder


def copy_to(folder: Path) -> None:
    """Stores the artifacts of the working tree's programs in this folder."""
    source = compiled()
    for unit in UNITS:
        artifact.store(compile.find_or_compile(unit, source)[0], folder)
