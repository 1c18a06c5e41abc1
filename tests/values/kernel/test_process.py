# SPDX-License-Identifier: Apache-2.0
"""Which process is still the one that had an id."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kbpf.kernel.system import process
from tests.support.lab.lab import until

NAMES_ITSELF = r"open('/proc/self/comm', 'wb').write(b') R \xff'); print(flush=True); input()"
ARGUMENTS = ("kbpf", "-c", NAMES_ITSELF, "run", "--kubeconfig", "/forged")
"""Any process can call itself like this."""


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@pytest.fixture
def stranger() -> Iterator[int]:
    with start(ARGUMENTS, sys.executable) as child:
        yield child.pid
        child.kill()


def start(arguments: tuple[str, ...], executable: str) -> "subprocess.Popen[bytes]":
    child = subprocess.Popen(arguments, executable=executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"\n", "it has called execve()"
    return child


def test_a_process_that_began_later_is_another_one(stranger: int):
    now = boottime()
    assert process.is_alive(stranger)
    assert process.is_alive(stranger, now)
    assert not process.is_alive(stranger, now - 60)
    assert not process.is_alive(2**30, now)


def test_only_the_command_of_the_process_itself_is_read(stranger: int):
    now = boottime()
    command = process.read_command(stranger, now)
    assert command is not None
    assert command.arguments == ARGUMENTS
    assert command.environ["PATH"] == os.environ["PATH"]
    assert str(command.folder) == os.getcwd()
    assert process.read_command(stranger, now - 60) is None, "root would use its kubeconfig"
    assert process.read_command(2**30, now) is None


def test_a_process_that_has_ended_is_not_read(stranger: int):
    os.kill(stranger, 9)
    until("it is a zombie", lambda: not process.is_alive(stranger))
    assert process.read_command(stranger, boottime()) is None
