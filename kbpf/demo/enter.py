# SPDX-License-Identifier: Apache-2.0
"""Runs a command in a network namespace and a cgroup:
`python -m kbpf.demo.enter PARENT NETNS CGROUP COMMAND...`

`ip netns exec` would remount /sys and so hide the bpffs from the agent. The command is killed when
the process PARENT ends, so that a demo that is killed leaves no processes behind.
"""

import os
import sys
from pathlib import Path

from kbpf.kernel.system import cgroups, children, netns, process


def enter_command(namespace: Path, cgroup: Path, *arguments: str) -> list[str]:
    """The command line that runs `arguments` in this network namespace and cgroup."""
    return children.python_command(__spec__.name, str(os.getpid()), str(namespace), str(cgroup), *arguments)


def _enter(parent: str, namespace: str, cgroup: str, *arguments: str) -> None:
    process.set_parent_death_signal(int(parent))
    cgroups.join(Path(cgroup))
    netns.enter(Path(namespace))
    os.execv(arguments[0], arguments)


if __name__ == "__main__":
    _enter(*sys.argv[1:])
