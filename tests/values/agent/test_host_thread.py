# SPDX-License-Identifier: Apache-2.0
"""The thread `host`: what the agent asks the node does not delay what it writes."""

import threading
from collections.abc import Collection

import pytest

from kbpf.agent import agent as module
from kbpf.agent import host_thread
from kbpf.agent.agent import Agent
from kbpf.dataplane.base import Report
from kbpf.errors import KernelError
from kbpf.model.address import parse_addr
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState, FrontendAddress, ServicePortKey
from kbpf.model.objects import Protocol
from tests.support.lab.lab import until
from tests.values.agent.recording import NODE, SYNCED, RecordingPlane, service

CHANGES = 20


class SlowHost(RecordingPlane):
    """A data plane on a node whose rules take for ever to read, or cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answer = threading.Event(), threading.Event()
        self.applied_in: set[str] = set()
        self.host_error = ""

    def apply(
        self,
        desired: DesiredState,
        touched: Collection[ServicePortKey] | None,
        authoritative: bool = True,
    ) -> Report:
        self.applied_in.add(threading.current_thread().name)
        return super().apply(desired, touched, authoritative)

    def tick(self, now: float, coexisting: bool = False):
        return super().tick(now)

    def maintain_host(self, _: float) -> None:
        if self.host_error:
            raise KernelError(self.host_error)
        self.asked.set()
        assert self.answer.wait(30)


@pytest.fixture
def plane(monkeypatch):
    monkeypatch.setattr(module.addresses, "watch_addresses", lambda _, stop: stop.wait())
    monkeypatch.setattr(host_thread.ConntrackSysctls, "apply", lambda *_: None)
    slow = SlowHost()
    yield slow
    slow.answer.set()


def test_a_slow_question_to_the_host_does_not_delay_a_change(plane: SlowHost):
    """Thousands of rules in FORWARD take seconds to read, whenever one is added."""
    agent = Agent(Config("me", min_sync_period=0.0), plane, lambda _: ())
    writer = threading.Thread(target=agent.run, name="writer")
    writer.start()
    try:
        for event in (NODE, *SYNCED):
            agent._enqueue(event)
        until("everything is programmed", lambda: plane.applied == [None])
        assert plane.asked.wait(30)
        for number in range(CHANGES):
            agent._enqueue(service(chr(ord("a") + number)))
            until("the change is programmed", lambda n=number: len(plane.applied) == n + 2)
        assert not plane.answer.is_set(), "while the host has not answered"
    finally:
        plane.answer.set()
        agent.stop()
        writer.join(30)
    assert not writer.is_alive()
    assert plane.applied_in == {"writer"}


def test_a_question_that_fails_is_logged_once_and_a_problem_while_it_fails(plane: SlowHost, caplog):
    agent = Agent(Config("me"), plane, lambda _: ())
    plane.answer.set()
    for error in ("no", "no", "", "no"):
        plane.host_error = error
        agent._host_thread.run_once(0.0)
        assert ("no" in agent.status().problems) is bool(error)
    failures = [line for line in caplog.messages if "cannot maintain the settings" in line]
    assert len(failures) == 2


def test_another_listening_process_wakes_the_agent(plane: SlowHost, monkeypatch):
    """Its port is taken from a Service at the node's address."""
    agent = Agent(Config("me"), plane, lambda _: ())
    plane.answer.set()
    read = [frozenset[FrontendAddress]()]
    agent.reconciler.listeners = agent._host_thread._listeners = host_thread.Listeners(lambda: read[0])
    agent._host_thread.run_once(0.0)
    agent.step([NODE, *SYNCED])
    read[0] = frozenset({FrontendAddress(parse_addr("0.0.0.0"), 22, Protocol.TCP)})
    later = 1e9
    agent._host_thread.run_once(later)
    assert [wake.reason for wake in agent._inbox.get_batch(0.0)] == ["listeners"]
    assert agent.reconciler.listeners.ports == read[0]
    agent._host_thread.run_once(later + host_thread.LISTENER_POLL_INTERVAL_S)
    assert agent._inbox.get_batch(0.0) == [], "nothing has changed"
