# SPDX-License-Identifier: Apache-2.0
"""Which process may be the agent of this node."""

import subprocess
import sys
import time

from kbpf.kernel.system import process

COMMAND = (sys.executable, "-c", "print(flush=True); input()", "kbpf", "run")


def test_a_process_of_another_network_is_not_the_agent():
    """A Pod that gets the id of an agent that has ended may have any arguments."""
    for prefix, is_agent in ((), True), (("unshare", "--net"), False):
        child = subprocess.Popen((*prefix, *COMMAND), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with child:
            assert child.stdout.readline() == b"\n", "it has called execve()"
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            command = process.read_command(child.pid, now)
            assert (command is not None) is is_agent
            child.kill()
