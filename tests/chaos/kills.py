# SPDX-License-Identifier: Apache-2.0
"""The agent is killed, stopped and starved of memory under 1,000 changes a second.

A Service that does not change must be served throughout. Within `CAUGHT_UP` seconds after the last
change (or after the start of the next agent) the maps must hold the last state, and nothing else.
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.world import STAYS, Churn, World
from tests.support.lab.lab import PATIENCE, Agent, until
from tests.support.lab.load import under_load

CHANGES_PER_SECOND = 1000.0
CAUGHT_UP = PATIENCE
"""A deadline, not a goal: the benchmarks measure how long it takes."""
MEMORY_LIMITS = range(20, 140, 5)
"""MB: from less than Python needs to enough for everything."""


@contextlib.contextmanager
def churning(churn: Churn) -> Iterator[None]:
    """Changes Services in a thread, CHANGES_PER_SECOND if the machine is fast enough."""
    stop = threading.Event()

    def work() -> None:
        due = time.monotonic()
        while not stop.wait(max(0.0, due - time.monotonic())):
            due = max(due, time.monotonic() - 1.0) + churn.step() / CHANGES_PER_SECOND

    thread = threading.Thread(target=work, name="churn")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def caught_up(world: World, churn: Churn) -> None:
    """Waits until the maps hold the last written state and no unreferenced entries."""
    try:
        until("the maps hold what was written last", churn.is_programmed, CAUGHT_UP)
        until("no unreferenced entry is left", lambda: not world.strays(), CAUGHT_UP)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{world.agent.status()}\n{world.agent.tail()}") from None
    assert not any(line.startswith("Traceback") for line in world.agent.lines()), world.agent.tail(40)


def kill(world: World, churn: Churn, order: random.Random) -> None:
    """SIGKILL at a random moment of the start or of the work after it; then a new start."""
    agent = world.agent
    with churning(churn):
        agent.start(wait=False)
        time.sleep(order.uniform(0, 2.5))  # a random moment, so no condition to wait for
        agent.kill()
    agent.start()
    caught_up(world, churn)
    agent.kill()


def pause(world: World, churn: Churn, order: random.Random, longest: float = 2.0) -> None:
    """SIGSTOP for a random time; afterwards the same process catches up."""
    agent = world.agent
    if not agent.is_running:
        agent.start()
    with churning(churn):
        time.sleep(order.uniform(0, 0.5))
        os.kill(agent.pid, signal.SIGSTOP)
        time.sleep(order.uniform(0.1, longest))
        os.kill(agent.pid, signal.SIGCONT)
    caught_up(world, churn)


def starve(world: World, churn: Churn, limit_mb: int) -> str:
    """Runs an agent in a memory cgroup of `limit_mb`, then one without a limit. Returns how the
    first ended: "serves", "killed", or its last line.
    """
    agent = world.agent
    if agent.is_running:
        agent.kill()
    with memory_cgroup(f"kbpf-{os.getpid()}", limit_mb) as folder:
        agent.wrapper = ("sh", "-c", f'echo $$ > {folder}/cgroup.procs; exec "$@"', "sh")
        try:
            agent.start(wait=False)
            with churning(churn):
                until("it serves or has ended", lambda: not agent.is_running or _synced(agent))
                time.sleep(0.5)
            outcome = "serves" if agent.is_running else _ended(agent)
            if agent.is_running:
                agent.kill()
        finally:
            agent.wrapper = ()
    agent.start()
    caught_up(world, churn)
    return outcome


def _synced(agent: Agent) -> bool:
    status = agent.own_status()
    return status is not None and bool(status["synced"])


def _ended(agent: Agent) -> str:
    code = agent.wait_ended()
    if code == -signal.SIGKILL:
        return "killed"
    assert code == 1, (code, agent.tail())
    return (agent.lines() or [""])[-1]


def memory_controller() -> Path | None:
    """The root of the cgroup hierarchy that limits memory, version 1 or 2."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, path, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            return Path(path)
        controllers = Path(path) / "cgroup.controllers"
        if kind == "cgroup2" and "memory" in controllers.read_text().split():
            return Path(path)
    return None


@contextlib.contextmanager
def memory_cgroup(name: str, limit_mb: int) -> Iterator[Path]:
    """A cgroup with this memory limit and no swap. Its processes must have ended by the end."""
    root = memory_controller()
    assert root is not None, "this machine cannot limit memory"
    folder = root / name
    folder.mkdir()
    try:
        limit = str(limit_mb << 20)
        if (folder / "memory.limit_in_bytes").exists():
            (folder / "memory.limit_in_bytes").write_text(limit)
        else:
            (folder / "memory.max").write_text(limit)
        yield folder
    finally:
        until("the cgroup is empty", lambda: _removed(folder))


def _removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


@contextlib.contextmanager
def churned(world: World) -> Iterator[Churn]:
    """The Services of a churn exist. Connections to the one that stays succeed all the time."""
    if not world.agent.is_running:
        world.agent.start()
    churn = Churn(world)
    with churn.present(), under_load(world, STAYS, "a2", answers="a1"):
        yield churn
