# SPDX-License-Identifier: Apache-2.0
"""Responses without an end, too large or too slow ones, and silence."""

import contextlib
import json
import threading
import time
from collections.abc import Callable

import pytest

from kbpf.errors import SourceError
from kbpf.source.api.credentials import PageMemory
from kbpf.source.base import SourceState
from tests.support.faults.scripted import Exchange
from tests.support.table import each_case
from tests.values.source.reflector.scripted import LISTED_A, PAGES, Run, added, bookmark, step

# --- responses without an end ---


def endless(head: bytes, piece: bytes, pause: float) -> Callable[[Exchange], None]:
    """A step: `head`, and then this piece again and again."""

    def respond(exchange: Exchange) -> None:
        with contextlib.suppress(OSError):
            exchange.sock.sendall(head)
            while True:
                exchange.sock.sendall(piece)
                time.sleep(pause)
        exchange.open = False

    return respond


OK = b"HTTP/1.1 200 OK\r\n"
ENDLESS = {
    # a limit, the response to a page, and the error
    "a header": ("transport.HEADERS_TIMEOUT", 0.3, endless(OK + b"X-Filler: ", b"x", 0.05), "the response header took"),
    "a page": ("reflector.PAGE_TIMEOUT", 0.3, endless(OK + b"\r\n", b" ", 0.05), "a page of services took too long"),
    "a page, at once": (
        "reflector.MAX_PAGES_BYTES",
        200_000,
        endless(OK + b"\r\n", b" " * 4096, 0),
        "a page of services has more than 195 KiB",
    ),
}


@each_case("limit, value, respond, error", ENDLESS)
def test_a_response_without_an_end_is_an_error(start, monkeypatch, limit, value, respond, error):
    monkeypatch.setattr(f"kbpf.source.api.{limit}", value)
    run = start(PAGES, respond)
    run.until(lambda: run.status.failures)
    assert error in run.status.error


@pytest.mark.parametrize(("each", "error"), [(300, ""), (301, "the list is not complete after 600 s")])
def test_list_by_pages_times_out_after_600_seconds(start, each, error):
    def page(exchange: Exchange, run: Run) -> None:
        run.now += each
        step(f"list@100 a@1 continue={len(run.server.requests) - 1}")(exchange)

    run = start(PAGES, page, page, "list@100 a@1")
    run.until_said("synced")
    assert error in run.errors[3]
    assert bool(error) == bool(run.errors[3])
    assert run.asked(3) == ("page" if error else "page after 2")


def test_error_response_counts_as_contact(start):
    def refuse(exchange: Exchange, run: Run) -> None:
        run.now += 5
        step("500")(exchange)

    run = start(refuse)
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
    monkeypatch.setattr("kbpf.source.api.resource.COUNT_ITEMS_FROM_BYTES", 10)
    monkeypatch.setattr("kbpf.source.decode.wire.MAX_PAGE_ITEMS", 100)
    many = {"metadata": {"resourceVersion": "5"}, "items": [{}] * 101}
    run = start(PAGES, lambda e: e.answer(200, many), "list@100" + 100 * " a@1")
    run.until_said("synced")
    assert run.waits == [0.4]


def test_list_is_a_problem_after_30_seconds(start):
    def respond(exchange: Exchange, run: Run) -> None:
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

    run = start(respond)
    run.until_said("synced")
    assert run.status.problems == ()


UNFINISHED = {
    "a line without an end": (b"x", 3, "a line is not complete after 30 s"),
    "empty lines alone": (b"\n", 5, ""),
}


@each_case("piece, steps, error", UNFINISHED)
def test_watch_with_an_unfinished_line_fails_and_one_with_empty_lines_ends(start, piece, steps, error):
    def respond(exchange: Exchange, run: Run) -> None:
        step("watch +a@5 synced@10 open")(exchange)
        run.until_said("synced")
        with contextlib.suppress(OSError):
            for _ in range(steps):
                run.now += 25
                exchange.line(piece)
                run.until(lambda: run.status.last_contact == run.now or len(run.server.requests) > 1)
        exchange.hang()

    run = start(respond)
    run.until(lambda: len(run.errors) == 2)
    assert error in run.errors[1]
    assert bool(error) == bool(run.errors[1])
    assert run.asked(1) == "watch 10"


def test_line_after_a_silent_minute_has_its_full_time(start):
    """Bookmarks come once a minute, and a large object comes in several chunks."""
    line = json.dumps(added("b", 11)).encode() + b"\n"

    def respond(exchange: Exchange, run: Run) -> None:
        step("watch +a@5 synced@10 open")(exchange)
        run.until_said("synced")
        run.now += 60
        for piece in (line[:40], line[40:80], line[80:]):
            exchange.line(piece)
            run.until(lambda: run.status.last_contact == run.now)
            run.now += 14
        exchange.hang()

    run = start(respond)
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

    run = start(PAGES, slow, silence_timeout=0.5)
    run.until(lambda: len(run.errors) >= 3)
    assert run.all_asked[:3] == ["stream", "page", "watch 100"]
    assert run.errors[:3] == [""] * 3
    assert run.said == ["synced"]
