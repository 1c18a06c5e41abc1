# SPDX-License-Identifier: Apache-2.0
"""Backoff, stopping, logging, and what is remembered of objects."""

import logging
import socket
import time
from collections.abc import Iterator

import pytest

from kbpf.model.address import parse_addr
from kbpf.model.events import Event, Kind, ObjectKey, Upsert
from kbpf.model.objects import Service
from kbpf.source.api import transport
from kbpf.source.api.credentials import Cluster
from kbpf.source.api.kubeconfig import Access
from kbpf.source.api.outages import MAX_REASONS, OutageLog
from kbpf.source.api.reflector import Reflector
from kbpf.source.api.resource import SERVICES, SLICES
from kbpf.source.api.watch import KnownVersions
from kbpf.source.base import SourceState
from kbpf.source.decode.decode import DecodedObject
from tests.support.faults.scripted import Exchange, ScriptedServer
from tests.support.lab.lab import until
from tests.support.table import each_case
from tests.values.source.reflector.scripted import LISTED_A, PAGES, Run, bookmark, status, step

# --- no tight loop ---


LISTED = "watch +a@5 synced@10 end"
LOOPS = {
    "watches that end at once": ["watch end"],
    "watches that end after an event": ["watch +b@11 end"],
    "watches that break": ["watch @11 reset"],
    "410 in every watch": ["watch error=410 end", LISTED],
    "410 as every response": ["410", LISTED],
    "500 as every response": ["500"],
    "closed before the headers": [Exchange.cut],
    "malformed lines": ["watch rubbish end", LISTED],
    "lists, but refused watches": ["400", LISTED],
}


@each_case("steps", LOOPS)
def test_no_tight_loop(start, steps):
    run = start(LISTED, *(steps * 20))
    run.server.wait(10)
    run.until(lambda: len(run.waits) >= 8)
    assert sum(run.waits[:8]) > 20
    assert max(run.waits) >= 12


def test_watches_that_keep_ending_at_once_are_reported(start):
    run = start(LISTED, *["watch end"] * 8)
    run.until(lambda: len(run.errors) == 10)
    assert "each watch ends within 5 s" in run.errors[9]


def test_watch_that_lived_resets_the_backoff(start):
    def lives(exchange: Exchange, run: Run) -> None:
        exchange.watch(bookmark(20))
        run.until_version("20")
        run.now += 6
        exchange.end()

    run = start(*["500"] * 3, LISTED, lives, "watch end")
    run.server.wait(7)
    # Three failures and a watch that ended at once; no wait after the watch that lived; then a wait
    # after the next watch that ended at once.
    assert run.waits[:4] == [0.2, 0.4, 0.8, 1.6]
    run.until(lambda: len(run.waits) == 5)
    assert run.waits[4] == 0.4


# --- stopping ---


@pytest.fixture
def patient(monkeypatch) -> None:
    """No timeout ends what stop() has to end."""
    for name in ("CONNECT_TIMEOUT", "RESPONSE_TIMEOUT", "HEADERS_TIMEOUT"):
        monkeypatch.setattr(transport, name, 3600.0)


PATIENT = {"response_timeout": 3600.0, "silence_timeout": 3600.0}
"""The same for a reflector's own."""


def stops(reflector: Reflector) -> None:
    """Calls stop() and waits until the thread has ended."""
    reflector.stop()
    until("the reflector has stopped", lambda: reflector.status().state is SourceState.STOPPED)


def full_listener() -> Iterator[str]:
    """A port at which connect() blocks, because the accept queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        yield f"http://127.0.0.1:{address[1]}"
        for filler in fillers:
            filler.close()


WAITING = {
    "for headers": [Exchange.hang],
    "for the list": ["watch +a@5"],
    "for data": [LISTED_A],
    "for a page": [PAGES, lambda e: (e.head(200, Content_Length="9"), e.hang())],
}
"""What the reflector waits for, and the responses."""


@each_case("script", WAITING)
def test_stop_during_a_request(start, patient, script):
    run = start(*script, **PATIENT)
    run.server.wait(len(script))
    time.sleep(0.05)
    stops(run.reflector)
    assert run.status.error == ""


def test_stop_during_backoff(start):
    run = start(status(500, Retry_After="60"), wait=lambda stop, seconds: stop.wait(seconds))
    run.until(lambda: run.state is SourceState.RETRYING)
    stops(run.reflector)


def test_stop_during_connect(patient: None):
    for url in full_listener():
        cluster = Cluster(Access(url, "the test"))
        reflector = Reflector(cluster, SERVICES, lambda event: None, **PATIENT)
        reflector.start()
        time.sleep(0.1)
        assert reflector.status().last_contact == 0.0
        stops(reflector)


def test_stop_during_the_tls_handshake(patient: None):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        cluster = Cluster(Access(url, "the test", insecure=True))
        reflector = Reflector(cluster, SERVICES, lambda event: None, **PATIENT)
        reflector.start()
        accepted, _ = listener.accept()
        assert accepted.recv(1)
        stops(reflector)
        accepted.close()


def test_state_is_retrying_between_watches(start):
    wait = lambda stop, seconds: stop.wait(seconds and 3600.0)  # noqa: E731
    run = start("watch +a@5 synced@10 end", "watch end", wait=wait)
    run.until(lambda: run.state is SourceState.RETRYING)
    assert run.status.error == ""


def test_stop_before_start_is_no_error():
    reflector = Reflector(Cluster(Access("http://x", "the test")), SERVICES, lambda event: None)
    reflector.stop()
    reflector.start()
    reflector.stop()
    assert reflector.status().state is SourceState.STOPPED


# --- logging ---


def test_failure_and_recovery_are_logged_once(start, caplog):
    caplog.set_level(logging.INFO, "kbpf.source")
    run = start(*["503 not yet"] * 6, LISTED_A)
    run.until_watching(7)
    run.until_said("synced")
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in lines] == ["WARNING", "INFO", "INFO"]
    assert lines[0][1].startswith("watch failed name=services for=0s error=")
    assert "503" in lines[0][1]
    assert lines[0][1].endswith("; what is programmed stays in force")
    assert lines[1][1] == "source synced name=services objects=1"
    assert lines[2][1] == "watch recovered name=services after=0s"


def test_internal_error_does_not_end_the_thread(start, caplog):
    class Faulty(Run):
        def put(self, event: Event) -> None:
            if not self.waits:
                raise RuntimeError("no room")
            super().put(event)

    with ScriptedServer(step(LISTED_A), step("list@100 a@5")) as server:
        run = Faulty(server)
        run.reflector.start()
        try:
            run.until(lambda: run.said == ["+a", "synced"])
        finally:
            run.reflector.stop()
    assert "no room" in caplog.text
    assert run.waits[0] == 0.2


# --- OutageLog and KnownVersions ---


MINUTE = 60.0
FOUR = ("endpointslices", "nodes", "pods", "services")


def told(outages: OutageLog, name: str, reason: str, minutes: float) -> tuple[str, float] | None:
    """Records a failure; returns the (watches, minutes) that are logged for it, or None."""
    outage = outages.record_failure(name, reason, minutes * MINUTE)
    return outage and (",".join(outage.names), outage.seconds / MINUTE)


def test_failure_of_four_watches_is_one_line_repeated_with_growing_intervals():
    outages, lines = OutageLog(), []
    for tick in range(0, 40 * 2 + 1):  # each watch fails twice a minute
        minutes = tick / 2
        lines += [line for name in FOUR if (line := told(outages, name, "refused", minutes))]
    first, *repeated = lines
    assert first == ("endpointslices", 0)
    assert repeated == [(",".join(FOUR), minutes) for minutes in (1, 5, 10, 20, 30, 40)]
    ends = [outages.record_recovery(name, 41 * MINUTE) for name in FOUR]
    assert ends == [None, None, None, (FOUR, 41 * MINUTE)], "its end is one line"
    assert [outages.record_recovery(name, 42 * MINUTE) for name in FOUR] == [None] * 4
    assert told(outages, "nodes", "refused", 50) == ("nodes", 0), "and the next is another one"


def test_alternating_reasons_are_one_line_each():
    outages = OutageLog()
    lines = [told(outages, "pods", reason, at / 60) for at in range(59) for reason in "ab"]
    assert list(filter(None, lines)) == [("pods", 0), ("pods", 0)]
    assert outages.record_recovery("pods", 59.0) == (("pods",), 59.0)


def test_forbidden_watch_does_not_hide_the_recovery_of_the_others():
    outages = OutageLog()
    told(outages, "nodes", "403", 0)
    for name in FOUR:
        told(outages, name, "refused", 10)
    assert told(outages, "nodes", "403", 12) == ("nodes", 12)
    ends = [outages.record_recovery(name, 13 * MINUTE) for name in FOUR if name != "nodes"]
    assert ends == [None, None, (("endpointslices", "pods", "services"), 13 * MINUTE - 600)]


def test_number_of_remembered_reasons_is_limited():
    outages = OutageLog()
    for number in range(1000):
        assert told(outages, "pods", f"error {number}", 0)
    assert len(outages._reasons) <= MAX_REASONS


def test_the_same_failure_of_two_watches_is_one_line(caplog):
    caplog.set_level(logging.INFO, "kbpf.source")
    with ScriptedServer() as server:
        server.script = [step("503 not yet")] * 8
        cluster = Cluster(Access(server.url, "the test"))
        soon = {"wait": lambda stop, seconds: stop.wait(0.05)}
        runs = [Reflector(cluster, each, lambda _: None, **soon) for each in (SERVICES, SLICES)]
        for run in runs:
            run.start()
        server.wait(8)
        server.script = []
        for run in runs:
            run.stop()
    lines = [r.getMessage() for r in caplog.records if "watch failed" in r.getMessage()]
    assert len(lines) == 1


def test_object_without_a_version_is_always_a_change():
    key, known = ObjectKey(Kind.SERVICE, "ns", "a"), KnownVersions()
    item = DecodedObject(key, "", Service("ns", "a", "ClusterIP", (parse_addr("10.96.0.1"),), ()), "")
    assert known.update(item, False, 0) == known.update(item, False, 0) == Upsert(key, item.object)
