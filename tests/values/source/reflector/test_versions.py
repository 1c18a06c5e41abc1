# SPDX-License-Identifier: Apache-2.0
"""Servers whose version goes back, e.g. after a restore of etcd, and the hourly relist."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from kbpf.source.api.credentials import Cluster
from kbpf.source.api.kubeconfig import Access
from kbpf.source.api.watch import is_rewind
from tests.support.faults.scripted import Exchange
from tests.support.table import each_case, each_cells
from tests.values.source.reflector.scripted import LISTED_A, Run, added, bookmark, lines, streamed

# --- a server whose version goes back, e.g. after a restore of etcd ---


def as_of(name: str, version: int, uid: str, **spec: Any) -> dict[str, Any]:
    """A watch event with a Service that has a uid."""
    line = added(name, version, **spec)
    line["object"]["metadata"]["uid"] = uid
    return line


WENT_BACK = "the API server's version went back from"


OTHERS = {"other content": as_of("a", 5, "u1", clusterIP="10.96.0.2"), "another uid": as_of("a", 5, "u2")}


@each_case("after", OTHERS)
def test_equal_versions_with_different_content_or_uid_are_a_change(start, after):
    run = start(streamed(as_of("a", 5, "u1"), *lines("synced@10 error=410")), streamed(after, *lines("synced@11")))
    run.until_said("synced", 2)
    assert run.said == ["+a", "synced", "+a", "synced"]


@each_cells("line", "a bookmark | @7\nan event | +b@7\na deletion | -a@7")
def test_version_that_goes_back_is_one_warning_and_a_new_list(start, caplog, line):
    run = start(
        f"watch +a@5 synced@10 {line}",
        "watch +a@3:10.96.0.2 synced@8 @9",
    )
    run.until_said("synced", 2)
    run.until_version("9")
    assert run.all_asked == ["stream", "stream"]
    assert [mark for mark in run.said[2:] if mark not in ("+b", "-b", "-a")] == ["+a", "synced"]
    assert caplog.text.count(WENT_BACK) == 1
    assert run.waits == []
    assert run.status.error == ""


def test_rewind_is_reported_from_the_last_received_version(start, caplog):
    """Even if both versions arrive in one chunk."""
    both = b"".join(json.dumps(bookmark(version)).encode() + b"\n" for version in (20, 7))
    run = start(streamed(*lines("+a@5 synced@10"), both), "watch +a@5 synced@15")
    run.until_said("synced", 2)
    assert f"{WENT_BACK} '20' to '7'" in caplog.text


def test_objects_unknown_to_a_restored_server_are_deleted(start, caplog):
    run = start("watch +a@5 synced@10 +new@12 error=410 end", "watch +a@5 synced@8")
    run.until_said("synced", 2)
    assert run.said == ["+a", "synced", "+new", "-new", "synced"]
    assert caplog.text.count(WENT_BACK) == 1
    assert f"{WENT_BACK} '12' to '8' (first seen by watch services)" in caplog.text


def test_after_an_outage_a_rewind_is_detected_before_the_watch_resumes(start, caplog):
    """A restored server may stay silent on a watch from a version it has not reached yet."""
    run = start(
        "watch +a@5 synced@10 +new@12 cut",
        *["503"] * 2,
        "list@11",
        "watch +a@5 synced@11",
    )
    run.until_said("synced", 2)
    assert run.said == ["+a", "synced", "+new", "-new", "synced"]
    assert [run.server.requests[n].query.get("limit") for n in range(5)] == [None, None, "1", "1", None]
    assert run.asked(4) == "stream"
    assert caplog.text.count(WENT_BACK) == 1


def test_after_an_outage_without_a_rewind_the_watch_resumes_without_a_list(start, caplog):
    run = start("watch +a@5 synced@10 cut", *["503"] * 2, "list@30 a@5", "watch @31")
    run.until_version("31")
    check = run.server.requests[3]
    assert check.path == "/api/v1/namespaces/ns/services"
    assert check.query["fieldSelector"] == "spec.clusterIP!=None,metadata.name=a"
    assert run.asked(4) == "watch 10"
    assert WENT_BACK not in caplog.text


@each_cells(
    "events, objects, warns",
    """
it is older             |             | a@3           | yes
it has other content    |             | a@5:10.96.0.2 | no
it has changed since    |             | a@20          | no
it is gone              |             |               | no
another one is sent     |             | b@5           | no
it cannot be read       |             | nameless      | no
a deletion came later   | +b@11 -b@12 | a@5           | no
all were deleted        | -a@12       |               | no
""",
    warns=bool,
)
def test_after_an_outage_a_doubt_about_the_last_change_is_a_new_list(start, caplog, events, objects, warns):
    """Events before the outage, the newest object afterwards, and whether the version certainly went back. The restored
    server's version is higher than ours again: other objects were written. The last change that we know of is compared.
    """
    run = start(
        f"watch +a@5 synced@10 {events} cut",
        *["503"] * 2,
        f"list@30 {objects}",
        "watch +restored@4 synced@31",
    )
    run.until_said("synced", 2)
    assert run.asked(4) == "stream"
    assert run.said[-1] == "synced"
    assert "+restored" in run.said
    assert run.said.count("+a") == run.said.count("-a") == 1, "the new list does not have it"
    assert caplog.text.count(WENT_BACK) == warns


def test_rewind_seen_by_four_watches_is_one_warning(caplog):
    cluster = Cluster(Access("http://x", "the test"))
    for name in ("services", "endpointslices", "nodes", "pods"):
        cluster.report_rewind(name, "100", "7")
    assert caplog.text.count(WENT_BACK) == 1


def test_versions_are_compared_as_numbers():
    assert is_rewind("10", "9")
    for before, now in (("10", "10"), ("9", "10"), ("", "5"), ("10", ""), ("10", "x"), ("x", "1"), ("9" * 30, "1")):
        assert not is_rewind(before, now), (before, now)


# --- the hourly relist ---


def relisted(start: Callable[..., Run], text: str) -> Run:
    """A Run that lists `a` and `b` (versions 5 and 6, list version 10), then `text` an hour later.

    A bookmark with version 20 comes before the second list.
    """

    def later(exchange: Exchange, run: Run) -> None:
        exchange.watch(*lines("+a@5 +b@6 synced@10"))
        run.until_said("synced")
        run.now += 4501.0
        exchange.line(bookmark(20))
        exchange.hang()

    run = start(later, f"watch {text}")
    run.until_said("synced", 2)
    assert run.all_asked == ["stream", "stream"]
    return run


@each_cells(
    "listed, said, missed",
    """
no change                          | +a@5 +b@6
a change after the watch's version | +a@5 +b@25         | +b
a new object after it              | +a@5 +b@6 +c@25    | +c
a missed change                    | +a@5 +b@15         | +b | 1
a missed new object                | +a@5 +b@6 +c@15    | +c | 1
a missed deletion                  | +a@5               | -b | 1
other content                      | +a@5 +b@6:10.9.9.9 | +b | 1
""",
    missed=lambda cell: int(cell or 0),
)
def test_relist_finds_and_counts_missed_changes(start, caplog, listed, said, missed):
    """The second list, the event that it makes, and how many changes the watch has missed."""
    run = relisted(start, f"{listed} synced@30")
    assert run.said[3:-1] == said.split()
    assert run.status.drift == missed
    assert ("objects changed without an event" in caplog.text) == bool(missed)
    assert run.waits == []


@pytest.mark.parametrize(("random", "due"), [(0.0, 2_700.0), (0.5, 3_600.0), (1.0, 4_500.0)])
def test_relists_are_spread_over_45_to_75_minutes(start, random, due):
    """Nodes that started together would otherwise list together."""

    def soon_due(exchange: Exchange, run: Run) -> None:
        exchange.watch(*lines("+a@5 synced@10"))
        run.until_said("synced")
        run.now += due - 1
        exchange.line(bookmark(20))
        exchange.hang()

    def due_now(exchange: Exchange, run: Run) -> None:
        run.now += 1
        exchange.watch(bookmark(21))
        exchange.hang()

    run = start(soon_due, due_now, LISTED_A, rng=lambda: random)
    run.until_said("synced", 2)
    assert run.all_asked == ["stream", "watch 20", "stream"]
