# SPDX-License-Identifier: Apache-2.0
"""iptables-legacy: the tables from before nf_tables, which only its own programs can change.

All functions act on the network namespace of the calling process.
"""

import re
import subprocess
from pathlib import Path
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.system import children

FAMILIES: Final = {
    "ip": (Path("/proc/thread-self/net/ip_tables_names"), "iptables-legacy"),
    "ip6": (Path("/proc/thread-self/net/ip6_tables_names"), "ip6tables-legacy"),
}
COMMENT: Final = re.compile(r'--comment ("(?:[^"\\]|\\.)*"|\S+)')
HINT: Final = "install the package iptables, or run this where it is installed"
_TIMEOUT_S: Final = 300.0


def list_tables(family: str) -> tuple[str, ...]:
    """The tables that exist; none is created by listing them."""
    try:
        return tuple(sorted(FAMILIES[family][0].read_text().split()))
    except OSError:
        return ()  # not loaded


def save(family: str, table: str) -> str:
    """The table's chains and rules in the format of iptables-save. Bytes of comments that are not
    UTF-8 are surrogates, which restore() writes as they were.
    """
    return _run(f"{FAMILIES[family][1]}-save", "-t", table)


def restore(family: str, text: str) -> None:
    """Applies text in the format of iptables-restore; other chains stay unchanged."""
    _run(f"{FAMILIES[family][1]}-restore", "--noflush", "--wait", "10", stdin=text)


def _run(*command: str, stdin: str = "") -> str:
    what = f"{command[0]} fails"
    try:
        result = subprocess.run(
            command,
            input=stdin,
            encoding="utf-8",
            errors="surrogateescape",
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            cwd=children.WORKING_DIRECTORY,
            env=children.child_environment(),
        )
    except OSError as error:
        raise KernelError(f"{what}: {error}", command[0], HINT, error.errno or 0) from error
    except subprocess.TimeoutExpired as error:
        raise KernelError(
            f"{command[0]} did not finish in {_TIMEOUT_S:.0f} s", " ".join(command), "try again"
        ) from error
    if result.returncode:
        raise KernelError(f"{what}: {result.stderr.strip()}", " ".join(command), "run as root")
    return result.stdout
