# SPDX-License-Identifier: Apache-2.0
"""BackgroundCollector: when it collects, what a scrape returns, and which errors it survives."""

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kbpf.errors import KernelError
from kbpf.model.metrics import Pause, TrafficStats
from kbpf.serve import collector
from kbpf.serve.collector import BackgroundCollector
from tests.support.lab.lab import PATIENCE, until

NOTHING = TrafficStats()


class Source:
    """Counts its collections; the lines of a scrape have that number. Each first runs `instead`."""

    def __init__(self) -> None:
        self.counts = 0
        self.instead: Callable[[Pause], None] = lambda pause: None

    def count(self, pause: Pause) -> TrafficStats:
        self.counts += 1
        self.instead(pause)
        return NOTHING

    def show(self, found: TrafficStats) -> list[str]:
        assert found is NOTHING
        return [f"count {self.counts}"]


@pytest.fixture
def source(monkeypatch) -> Source:
    monkeypatch.setattr(collector, "MIN_COLLECT_INTERVAL_S", 0.0)
    return Source()


@pytest.fixture
def made(source: Source) -> Iterator[BackgroundCollector]:
    one = BackgroundCollector(source.count, source.show, lambda: None)
    yield one
    one.stop()


def number(made: BackgroundCollector) -> int:
    """The number of the collection that a scrape returns."""
    lines = made.scrape().decode()
    return int(lines.split()[1]) if lines else 0


def test_nothing_is_collected_before_the_first_scrape(made: BackgroundCollector):
    made.start()
    assert made.scrape() == b"", "and who asks first waits for nothing"
    until("the first collection", lambda: number(made) > 0)


def test_refreshing_does_not_delay_the_next_collection(source: Source):
    """It collects while it is scraped. At MAX_CPU_SHARE, 0.05 s of CPU time would delay it by 10 s."""

    def burn() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    one = BackgroundCollector(source.count, source.show, burn)
    one.start()
    try:
        until("ten collections", lambda: number(one) >= 10, seconds=30)
    finally:
        one.stop()


def test_pauses_without_scrapes(made: BackgroundCollector, source: Source, monkeypatch):
    """After a pause, each scrape triggers one collection."""
    monkeypatch.setattr(collector, "ACTIVE_AFTER_SCRAPE_S", -1.0)
    made.start()
    for asked in (1, 2):
        made.scrape()
        until("one collection per scrape", lambda: source.counts == asked)  # noqa: B023


def test_collects_at_the_idle_interval_without_scrapes(made: BackgroundCollector, source: Source, monkeypatch):
    monkeypatch.setattr(collector, "IDLE_COLLECT_INTERVAL_S", 0.01)
    made.start()
    until("three collections", lambda: source.counts > 2)


def test_failed_collection_is_logged_once_and_shows_nothing(made: BackgroundCollector, source: Source, caplog):
    logging.getLogger("kbpf").propagate = True
    made.collect()
    assert made.scrape()

    def refuse(pause: Pause) -> None:
        raise KernelError("no maps")

    source.instead = refuse
    made.collect()
    made.collect()
    assert made.scrape() == b"", "rather nothing than what was true once"
    assert caplog.text.count("no maps") == 1
    source.instead = lambda pause: None
    made.collect()
    assert made.scrape() == b"count 4\n"


def test_internal_error_does_not_end_the_thread(made: BackgroundCollector, source: Source):
    def fault(pause: Pause) -> None:
        if source.counts == 1:
            raise ZeroDivisionError

    source.instead = fault
    made.start()
    until("the next collection succeeds", lambda: number(made) > 1)


def test_stop_during_a_collection(made: BackgroundCollector, source: Source):
    under_way, go_on = threading.Event(), threading.Event()

    def long(pause: Pause) -> None:
        under_way.set()
        go_on.wait(PATIENCE)
        for _ in range(1000):
            pause()

    source.instead = long
    made.start()
    made.scrape()
    assert under_way.wait(PATIENCE)
    ended = threading.Thread(target=made.stop)
    ended.start()
    go_on.set()
    ended.join(PATIENCE)
    assert not ended.is_alive()
