# SPDX-License-Identifier: Apache-2.0
"""The privileges that a process needs, and the errors if they are missing."""

import errno
import resource

import pytest

from kbpf.errors import KernelError
from kbpf.kernel.bpf import probe, syscalls
from tests.support.table import each_line


@each_line(
    "release, limit, expected",
    f"""\
5.10.0-32-amd64 | 65536 | 65536
5.10.0-32-amd64 | 0 | 0
5.10.0-32-amd64 | {resource.RLIM_INFINITY} |
5.11.0 | 65536 |
10.0 | 65536 |
unheard of | 65536 |
""",
    limit=int,
    expected=lambda cell: int(cell) if cell else None,
)
def test_the_locked_memory_limit_of_maps(monkeypatch, release, limit, expected):
    """A kernel, the limit of the process, and what it means for maps."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert syscalls.memlock_limit(release) == expected


@pytest.mark.parametrize(
    ("limit", "code", "privileged", "said"),
    [
        (65536, errno.EPERM, True, "which is 65536 bytes here: grant CAP_SYS_RESOURCE"),
        (65536, errno.EPERM, False, "it needs root or CAP_BPF"),
        (None, errno.EPERM, True, "it needs root or CAP_BPF"),
        (65536, errno.EACCES, True, "it needs root or CAP_BPF"),
    ],
)
def test_a_refusal_is_explained_by_its_cause(monkeypatch, limit, code, privileged, said):
    monkeypatch.setattr(syscalls, "memlock_limit", lambda: limit)
    monkeypatch.setattr(syscalls, "is_privileged", lambda: privileged)
    with pytest.raises(KernelError) as refused:
        syscalls.check(-code, "cannot create the map")
    assert said in str(refused.value)
    assert refused.value.errno == code


ALL, NO_RESOURCE = 1 << 12 | 1 << 21 | 1 << 24 | 3 << 38, 1 << 12 | 1 << 21 | 3 << 38


@pytest.mark.parametrize(
    ("held", "limit", "missing"),
    [
        (ALL, 65536, ()),
        (ALL, None, ()),
        (NO_RESOURCE, None, ()),
        (NO_RESOURCE, 65536, ("CAP_SYS_RESOURCE",)),
        (1 << 12, None, ("CAP_SYS_ADMIN", "CAP_PERFMON", "CAP_BPF")),
    ],
)
def test_which_capabilities_are_missing(monkeypatch, held, limit, missing: tuple[str, ...]):
    monkeypatch.setattr(syscalls, "memlock_limit", lambda: limit)
    assert probe.missing_capabilities(f"Name:\tkbpf\nCapEff:\t{held:016x}\n") == missing
