# SPDX-License-Identifier: Apache-2.0
"""`kbpf verify` against a real API server, and the Event about a backend that keeps failing."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster.cluster import Cluster
from tests.support.cluster.kube import Object
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, port, service, slice_port
from tests.support.features import needs
from tests.support.lab.lab import Agent, inside, until
from tests.support.plane import join_pod, within

NOBODY = 9


class Hasty(Cluster):
    """Its agent looks for failing backends each second."""

    def bring_up(self) -> None:
        self.agent.module = "tests.support.runtime.hasty_agent"
        super().bring_up()


@pytest.fixture(scope="module")
def small(programs: None) -> Iterator[Hasty]:
    with Hasty(1, "w") as made:
        yield made


def verify(cluster: Cluster) -> tuple[int, dict[str, Any]]:
    """With the flags of the agent: its variant is not recognized as an agent of kbpf."""
    place = cluster.agent.node
    command = (
        *(sys.executable, "-m", "kbpf", "verify", "--pin-dir", str(cluster.agent.pin_dir)),
        *("--kubeconfig", str(cluster.kubeconfig()), "--hostname-override", place.name),
        *("--cgroup", str(place.cgroup), "-o", "json"),
    )
    done = subprocess.run(
        inside(place.netns, place.cgroup / "host", *command), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_nothing_differs_from_the_api(small: Hasty):
    with small.given(*small.web(20, "a1 a2", dual=True), *small.web(21, "a1 a2", "UDP")):
        code, document = verify(small)
        assert code == 0, document
        assert (document["equal"], document["notes"]) == (True, [])
        assert document["proven"] >= 3


@contextlib.contextmanager
def stopped(agent: Agent, seconds: float | None) -> Iterator[None]:
    """The agent is stopped for this long, at most in this block."""
    is_over = threading.Event()

    def go_on() -> None:
        is_over.wait(seconds)
        os.kill(agent.pid, signal.SIGCONT)

    thread = threading.Thread(target=go_on)
    os.kill(agent.pid, signal.SIGSTOP)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize(("seconds", "is_equal"), [(7.0, True), (None, False)], ids=["for a while", "for good"])
def test_agent_that_is_stopped_may_catch_up(small: Hasty, seconds: float | None, is_equal: bool):
    """A busy node may not let it work for some seconds. One that hangs hides nothing."""
    late = small.web(31, "a1")
    with stopped(small.agent, seconds):
        small.create(*late)
        try:
            code, document = verify(small)
        finally:
            small.delete(*late)
    small.settle()
    assert (code, document["equal"]) == (int(not is_equal), is_equal), document
    is_named = any(row["subject"].startswith("default/web-31") for row in document["items"])
    assert is_named is not is_equal


# ---- backends that keep failing ------------------------------------------------------------------


def failing_events(cluster: Cluster) -> list[Object]:
    events = cluster.kube.list("Event")["items"]
    return [event for event in events if event["reason"] == "BackendFailing"]


@needs("tracing")
def test_a_backend_that_keeps_failing_is_an_event_of_its_service(small: Hasty):
    """Once, on the Service, with the address that fails; and none for a Service that works."""
    broken = service("broken", port(80, "http"))
    slice_ = endpoint_slice("broken", endpoint(small["a1"].ip), ports=[slice_port(NOBODY, "http")])
    stop = threading.Event()

    def clients(address: str) -> None:
        def connect() -> None:
            for number in range(20):
                join_pod(small["a2"].cgroup.parent, f"client{number % 2}")
                with socket.socket() as client:
                    client.settimeout(5)
                    client.connect_ex((address, 80))

        while not stop.is_set():
            within(small["a2"], connect)

    with small.given(broken, slice_, *small.web(20, "a1 a2")):
        addresses = [small.kube.get("Service", name)["spec"]["clusterIP"] for name in ("broken", "web-20")]
        threads = [threading.Thread(target=clients, args=(address,)) for address in addresses]
        for thread in threads:
            thread.start()
        try:
            until("its Event is stored", lambda: len(failing_events(small)) == 1)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        (event,) = failing_events(small)
        about = event.get("involvedObject") or event["regarding"]
        assert (about["kind"], about["namespace"], about["name"]) == ("Service", "default", "broken")
        assert event["type"] == "Warning"
        note = event.get("message") or event["note"]
        assert note.startswith(f"{small['a1'].ip}:{NOBODY} (http) did not accept ")
