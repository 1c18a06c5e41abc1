# SPDX-License-Identifier: Apache-2.0
"""Responses without an end, too large or too slow ones, and silence."""

import contextlib
import json
import threading
import time

import pytest

from kbpf.errors import SourceError
from kbpf.source.api.credentials import PageMemory
from kbpf.source.base import SourceState
from tests.support.faults.scripted import Exchange, Step, quiet
from tests.values.source.reflector.scripted import LISTED_A, PAGES, added, bookmark, step

# --- responses without an end ---


def test_response_header_sent_slowly_times_out(start, monkeypatch):
    monkeypatch.setattr("kbpf.source.api.transport.HEADERS_TIMEOUT", 0.3)

    def dribble(exchange: Exchange) -> None:
        with contextlib.suppress(OSError):
            for byte in b"HTTP/1.1 200 OK\r\nX-Filler: " + b"x" * 10_000:
                exchange.sock.sendall(bytes([byte]))
                time.sleep(0.05)
        exchange.open = False

    run = start(dribble, hold=True)
    run.reflector.start()
    run.until(lambda: run.status.failures)
    assert "the response header took too long" in run.status.error


def test_page_sent_slowly_times_out(start, monkeypatch):
    monkeypatch.setattr("kbpf.source.api.reflector.PAGE_TIMEOUT", 0.3)

    def dribble(exchange: Exchange) -> None:
        exchange.head(200, Content_Length="100000")
        with contextlib.suppress(OSError):
            for _ in range(10_000):
                exchange.sock.sendall(b" ")
                time.sleep(0.05)
        exchange.open = False

    run = start(PAGES, dribble)
    run.until(lambda: run.status.failures)
    assert "a page of services took too long" in run.status.error


def test_page_over_the_size_limit_is_an_error(start, monkeypatch):
    monkeypatch.setattr("kbpf.source.api.reflector.MAX_PAGES_BYTES", 200_000)

    def endless(exchange: Exchange) -> None:
        exchange.head(200)
        with contextlib.suppress(OSError):
            while True:
                exchange.sock.sendall(b" " * 4096)
        exchange.open = False

    run = start(PAGES, endless)
    run.until(lambda: run.status.failures)
    assert "a page of services has more than 195 KiB" in run.status.error


@pytest.mark.parametrize(("each", "error"), [(300, ""), (301, "the list is not complete after 600 s")])
def test_list_by_pages_times_out_after_600_seconds(start, each: int, error: str):
    seen: list[str] = []

    def page(token: str) -> Step:
        def respond(exchange: Exchange) -> None:
            run.now += each
            step(f"list@100 a@1 continue={token}")(exchange)

        return respond

    def last(exchange: Exchange) -> None:
        seen.append(run.status.error)
        step("list@100 a@1")(exchange)

    run = start(PAGES, page("1"), page("2"), last, hold=True)
    run.reflector.start()
    run.until_said("synced")
    assert error in seen[0]
    assert bool(error) == bool(seen[0])
    assert run.asked(3) == ("page" if error else "page after 2")


def test_error_response_counts_as_contact(start):
    def refuse(exchange: Exchange) -> None:
        run.now += 5
        step("500")(exchange)

    run = start(refuse, hold=True)
    run.reflector.start()
    run.until(lambda: run.waits)
    assert run.status.last_contact == 1005.0


def test_pages_of_all_watches_share_a_memory_limit():
    room = PageMemory(100)
    with room.lease() as one, room.lease() as two:
        one(60)
        with pytest.raises(SourceError, match="together"):
            two(41)
        two(40)
    with room.lease() as again:
        again(100)


def test_page_with_too_many_items_is_an_error(start, monkeypatch):
    monkeypatch.setattr("kbpf.source.api.pages.COUNT_ITEMS_FROM_BYTES", 10)
    monkeypatch.setattr("kbpf.source.decode.wire.MAX_PAGE_ITEMS", 100)
    many = {"metadata": {"resourceVersion": "5"}, "items": [{}] * 101}
    run = start(PAGES, lambda e: e.answer(200, many), "list@100" + 100 * " a@1")
    run.until_said("synced")
    assert run.waits == [0.4]


def test_list_is_a_problem_after_30_seconds(start):
    def respond(exchange: Exchange) -> None:
        exchange.watch(added("a", 5))
        run.until(lambda: run.said == ["+a"])
        assert run.state is SourceState.LISTING
        assert run.status.problems == ()
        run.now += 30
        assert run.status.problems == ()
        run.now += 1
        (line,) = run.status.problems
        assert "listing services has taken more than 30 s" in line
        exchange.line(bookmark(7, end=True))
        exchange.hang()

    run = start(respond, hold=True)
    run.reflector.start()
    run.until_said("synced")
    assert run.status.problems == ()


@pytest.mark.parametrize(
    ("name", "piece", "steps", "error"),
    [
        ("a line without an end", b"x", 3, "a line is not complete after 30 s"),
        ("empty lines alone", b"\n", 5, ""),
    ],
)
def test_watch_with_an_unfinished_line_fails_and_one_with_empty_lines_ends(start, name, piece, steps, error):
    seen: list[str] = []

    def respond(exchange: Exchange) -> None:
        step("watch +a@5 synced@10 open")(exchange)
        run.until_said("synced")
        with contextlib.suppress(OSError):
            for _ in range(steps):
                run.now += 25
                exchange.line(piece)
                run.until(lambda: run.status.last_contact == run.now or len(run.server.requests) > 1)
        exchange.hang()

    def again(exchange: Exchange) -> None:
        seen.append(run.status.error)
        quiet(exchange)

    run = start(respond, again, hold=True)
    run.reflector.start()
    run.server.wait(2)
    run.until(lambda: seen)
    assert error in seen[0]
    assert bool(error) == bool(seen[0])
    assert run.asked(1) == "watch 10"


def test_line_after_a_silent_minute_has_its_full_time(start):
    """Bookmarks come once a minute, and a large object comes in several chunks."""
    line = json.dumps(added("b", 11)).encode() + b"\n"

    def respond(exchange: Exchange) -> None:
        step("watch +a@5 synced@10 open")(exchange)
        run.until_said("synced")
        run.now += 60
        for piece in (line[:40], line[40:80], line[80:]):
            exchange.line(piece)
            run.until(lambda: run.status.last_contact == run.now)
            run.now += 14
        exchange.hang()

    run = start(respond, quiet, hold=True)
    run.reflector.start()
    run.until(lambda: "+b" in run.said or run.waits)
    assert run.said == ["+a", "synced", "+b"]
    assert run.status.error == ""
    assert len(run.server.requests) == 1


def test_run_in_the_callers_thread_ends_with_stop(start):
    run, stop = start(LISTED_A, hold=True), threading.Event()
    thread = threading.Thread(target=run.reflector.run, args=(stop,))
    thread.start()
    run.until_watching(1)
    run.reflector.stop()
    assert stop.is_set()
    thread.join(60.0)
    assert not thread.is_alive()


# --- silence ---


def test_silent_server_is_an_error(start):
    # Several responses may miss the very short timeout on a busy machine.
    run = start(Exchange.hang, *[LISTED_A] * 100, response_timeout=0.1)
    run.until_said("synced")
    assert run.waits[0] == 0.2
    assert run.all_asked[:2] == ["stream", "stream"]


def test_silent_watch_is_resumed_without_a_failure(start, caplog):
    run = start(LISTED_A, "watch +b@11", silence_timeout=0.1, response_timeout=60)
    run.until_said("+b")
    assert run.asked(1) == "watch 10"
    assert "watch failed" not in caplog.text
    assert run.said[:3] == ["+a", "synced", "+b"]


def test_silent_streaming_list_is_an_error(start):
    run = start("watch +a@5", "list@100 a@5", silence_timeout=0.1)
    run.until_said("synced")
    assert run.all_asked[:2] == ["stream", "page"]
    assert run.waits[:1] == [0.2]  # the silent watches that follow cause more


def test_page_may_take_longer_than_the_silence_timeout(start):
    """The server is silent while it reads the page from etcd."""

    def slow(exchange: Exchange) -> None:
        body = json.dumps({"metadata": {"resourceVersion": "100"}, "items": []}).encode()
        exchange.head(200, Content_Length=str(len(body)))
        exchange.closing(1.2)
        exchange.sock.sendall(body)

    def watch(exchange: Exchange) -> None:
        seen.append((run.all_asked, list(run.waits)))
        quiet(exchange)

    seen: list[tuple[list[str], list[float]]] = []
    run = start(PAGES, slow, watch, silence_timeout=0.5, hold=True)
    run.reflector.start()
    run.until(lambda: seen)
    assert seen[0] == (["stream", "page", "watch 100"], [])
    assert run.said == ["synced"]
