# SPDX-License-Identifier: Apache-2.0
"""The privileges that a process needs, and the errors if they are missing."""

import errno
import resource

import pytest

from kbpf.errors import KernelError
from kbpf.kernel.bpf import probe, syscalls
from tests.support.table import each_line


def number(cell: str) -> int | None:
    return int(cell) if cell else None


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
    expected=number,
)
def test_the_locked_memory_limit_of_maps(monkeypatch, release, limit, expected):
    """A kernel, the limit of the process, and what it means for maps."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert syscalls.memlock_limit(release) == expected


@each_line(
    "limit, code, privileged, said",
    """\
65536 | EPERM | yes | which is 65536 bytes here: grant CAP_SYS_RESOURCE
65536 | EPERM | no | it needs root or CAP_BPF
 | EPERM | yes | it needs root or CAP_BPF
65536 | EACCES | yes | it needs root or CAP_BPF
""",
    limit=number,
    code=lambda cell: getattr(errno, cell),
    privileged=bool,
)
def test_a_refusal_is_explained_by_its_cause(monkeypatch, limit, code, privileged, said):
    monkeypatch.setattr(syscalls, "memlock_limit", lambda: limit)
    monkeypatch.setattr(syscalls, "is_privileged", lambda: privileged)
    with pytest.raises(KernelError) as refused:
        syscalls.check(-code, "cannot create the map")
    assert said in str(refused.value)
    assert refused.value.errno == code


@each_line(
    "held, limit, missing",
    """\
NET_ADMIN SYS_ADMIN SYS_RESOURCE PERFMON BPF | 65536
NET_ADMIN SYS_ADMIN SYS_RESOURCE PERFMON BPF |
NET_ADMIN SYS_ADMIN PERFMON BPF |
NET_ADMIN SYS_ADMIN PERFMON BPF | 65536 | CAP_SYS_RESOURCE
NET_ADMIN |  | CAP_SYS_ADMIN CAP_PERFMON CAP_BPF
""",
    limit=number,
)
def test_which_capabilities_are_missing(monkeypatch, held, limit, missing):
    bits = {"NET_ADMIN": 12, "SYS_ADMIN": 21, "SYS_RESOURCE": 24, "PERFMON": 38, "BPF": 39}
    mask = sum(1 << bits[name] for name in held.split())
    monkeypatch.setattr(syscalls, "memlock_limit", lambda: limit)
    assert probe.missing_capabilities(f"Name:\tkbpf\nCapEff:\t{mask:016x}\n") == tuple(missing.split())
