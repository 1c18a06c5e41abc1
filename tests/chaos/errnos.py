# SPDX-License-Identifier: Apache-2.0
"""System calls fail: strace injects one errno at the Nth system call of each thread of the agent.

The agent ends up serving everything, or ends with one line that says why. In both cases the Service
that was served before is served throughout, and the next agent, without faults, recovers from
whatever state the last one left.
"""

import errno
import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.chaos.world import Churn, World
from tests.support.lab.lab import PATIENCE, until

CALLS = (
    "bpf,socket,bind,setsockopt,sendto,sendmsg,recvfrom,recvmsg,mkdir,rename,unlinkat,rmdir,mount,flock,statfs,setns"
)
"""bpf(2), netlink, and the file calls that create, rename and remove pins."""
ERRNOS = ("ENOMEM", "ENOSPC", "E2BIG", "EBUSY", "EAGAIN", "EINTR", "ENOBUFS", "EPERM")
FIRST_CALLS = 500
ENDED = re.compile(r"^(?:\S+ ERROR kbpf |kbpf: )")
"""The beginning of the last line of an agent that gave up; the rest says why."""

LIBNFTABLES = re.compile(r"^mnl\.c:\d+: Unable to initialize Netlink socket: ")
"""The message with which libnftables ends the process (exit status 3) if its own socket() fails,
and not the one that forward_rules.run_transaction() opened just before.
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """`call`: the number of the failing call in each thread, from 1. `fresh`: nothing was
    pinned.
    """

    call: int
    name: str
    fresh: bool

    def __str__(self) -> str:
        return f"{'fresh' if self.fresh else 'adopt'}-{self.call}-{self.name}"

    @property
    def wrapper(self) -> tuple[str, ...]:
        """The command that runs an agent with this fault."""
        inject = f"inject={CALLS}:error={self.name}:when={self.call}"
        quiet = ("-qq", "-o", "/dev/null", "-e", f"trace={CALLS}", "-e", inject)
        return ("strace", "-D", "-f", "--seccomp-bpf", *quiet)


def faults(count: int, seed: int) -> list[Fault]:
    """`count` of the first calls, evenly spread, with alternating errnos and starts."""
    order, step = random.Random(seed), FIRST_CALLS / count
    rows = []
    for index in range(count):
        call = 1 + int(index * step + order.random() * step)
        rows.append(Fault(call, ERRNOS[(index + seed) % len(ERRNOS)], (index // len(ERRNOS) + index) % 2 > 0))
    return rows


def run(world: World, fault: Fault) -> str:
    """Starts an agent with this fault, has it apply Services and grow maps, and checks the
    promises.

    Returns how it ended: "serves" or its last line. Raises AssertionError.
    """
    agent = world.agent
    if agent.is_running:
        agent.kill()
    if fault.fresh:
        agent.remove_pins()
    agent.wrapper = fault.wrapper
    try:
        agent.start(wait=False)
        _watch(world, lambda: _is_settled(world), fault)
    finally:
        agent.wrapper = ()
    churn = Churn(world, files=2)
    try:
        churn.write_all()
        if agent.is_running:
            _watch(world, lambda: churn.is_programmed() or not agent.is_running, fault)
        outcome = _outcome(world, fault)
        if outcome != "serves":
            agent.start()
            until("the next agent programs everything", churn.is_programmed, PATIENCE)
        assert world.stays_served()
    finally:
        for path in world.folder.glob("churn-*.json"):
            path.unlink()

    def is_unprogrammed() -> bool:
        nonlocal outcome
        if not agent.is_running:  # a thread may get as far as its failing call only now
            outcome = _outcome(world, fault)
            agent.start()
        return not world.programmed()

    until("deleted Services are unprogrammed", is_unprogrammed, PATIENCE)
    return outcome


def _watch(world: World, is_done: Callable[[], bool], fault: Fault) -> None:
    """Waits; Services that were served before must stay served meanwhile."""

    def check() -> bool:
        if not fault.fresh:
            assert world.stays_served(), f"not served any more: {world.agent.tail()}"
        return is_done()

    try:
        until(f"{fault}: the agent serves or ends", check, PATIENCE)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{world.agent.status()}\n{world.agent.tail()}") from None


def _is_settled(world: World) -> bool:
    status = world.agent.own_status()
    return not world.agent.is_running or (status is not None and bool(status["synced"]))


def _outcome(world: World, fault: Fault) -> str:
    lines = world.agent.lines()
    assert not any(line.startswith("Traceback") for line in lines), "\n".join(lines)
    if world.agent.is_running:
        return "serves"
    code = world.agent.wait_ended()
    lines = world.agent.lines()
    expected = 3 if lines and LIBNFTABLES.match(lines[-1]) else 1
    assert code == expected, (code, lines)
    assert says_why(lines, fault), "\n".join(lines)
    return lines[-1]


def says_why(lines: Sequence[str], fault: Fault) -> bool:
    """Whether exactly one line says why the agent ended: the last one, and it names the errno."""
    ends = [line for line in lines if ENDED.match(line) or LIBNFTABLES.match(line)]
    names = (fault.name, os.strerror(getattr(errno, fault.name)))
    return len(ends) == 1 and ends[0] == lines[-1] and any(name in ends[0] for name in names)
