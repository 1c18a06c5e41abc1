# SPDX-License-Identifier: Apache-2.0
"""What an error says when the kernel refuses a program, or has no room in a map."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.bpf.uapi import BPF_MAP_TYPE_HASH

ADVICE = (
    "from kbpf.errors import KernelError\nfrom kbpf.kernel.bpf.objects import Program\n"
    "try: Program.load('cow', 3, 0, bytes.fromhex('9500000000000000'))\n"  # exit without r0
    "except KernelError as error: print(error.errno, error)\n"
)


@pytest.mark.parametrize(
    ("lacking", "says", "not_says"),
    [
        ("", "report it, with the output of `kbpf check`", "CAP_BPF"),
        ("-bpf,-perfmon", "report it", "CAP_BPF"),
        ("-bpf,-perfmon,-sys_admin,-net_admin", "CAP_BPF", "report it"),
    ],
)
def test_load_error_advice_depends_on_the_privileges(lacking: str, says: str, not_says: str):
    """The verifier fails with EACCES, too, which is then no lack of privileges."""
    drop = ["setpriv", f"--bounding-set={lacking}", f"--inh-caps={lacking}"] if lacking else []
    done = subprocess.run(
        [*drop, sys.executable, "-c", ADVICE], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    assert done.stdout.startswith(f"{errno.EACCES if not_says == 'CAP_BPF' else errno.EPERM} ")
    assert says in done.stdout
    assert not_says not in done.stdout
    assert done.stdout.count("\n") == 1


def test_full_map_error_names_the_map_only():
    with Map.create(BPF_MAP_TYPE_HASH, "cows", 4, 4, 1) as cows:
        cows.update(bytes(4), bytes(4))
        with pytest.raises(KernelError, match="the map is full") as full:
            cows.update(b"1234", bytes(4))
    assert str(full.value) == "the map is full (map cows, 1 entries): E2BIG"
