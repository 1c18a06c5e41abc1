# SPDX-License-Identifier: Apache-2.0
"""What the reflector requests and reports for a sequence of responses."""

from typing import NamedTuple

import pytest

from tests.values.source.reflector.scripted import LISTED_A, PAGES


class History(NamedTuple):
    """Responses in the words of step(), one after the other; the requests, the events and the waits that follow."""

    name: str
    responses: str
    asked: str
    said: str
    waits: tuple[float, ...] = ()


GONE = "watch +a@5 synced@10 error=410 end"
HISTORIES = [
    History("410 in a watch: a new list at once", f"{GONE} | watch synced@20", "stream, stream", "+a synced -a synced"),
    History(
        "410 twice: a wait before the third list",
        f"{GONE} | {GONE} | {LISTED_A}",
        "stream, stream, stream",
        "+a synced synced synced",
        (0.4,),
    ),
    History(
        "410 between pages: the list starts over",
        f"{PAGES} | list@100 a@1 continue=t | 410 | list@100 b@2",
        "stream, page, page after t, page, watch 100",
        "+a +b -a synced",
        (0.4,),
    ),
    History(
        "a watch that ended cleanly resumes at the last bookmark",
        "watch +a@5 synced@10 @33 end | watch +b@40",
        "stream, watch 33",
        "+a synced +b",
    ),
    *(
        History(
            f"{refusal} as the response to a watch: a new list",
            f"watch +a@5 synced@10 end | {refusal} | {LISTED_A}",
            "stream, watch 10, stream",
            "+a synced synced",
            (0.4,),
        )
        for refusal in (
            "400 invalid resource version",
            "422 resourceVersion: Invalid value",
            "504 Too large resource version: 10, current: 4",  # etcd was restored from a backup
        )
    ),
    *(
        History(
            f"{code} to a streaming list: pages",
            f"{code} sendInitialEvents: Forbidden | list@100 a@5 continue=t1 | list@100 b@6 continue=t2 | list@100 c@7",
            "stream, page, page after t1, page after t2, watch 100",
            "+a +b +c synced",
        )
        for code in (400, 422)
    ),
    *(
        History(
            f"error {code} in a watch: a new list",
            f"watch +a@5 synced@10 error={code} end | {LISTED_A}",
            "stream, stream",
            "+a synced synced",
            (0.2,),
        )
        for code in (500, 401, 429, 0)
    ),
    History(
        "a malformed line in a watch: a new list",
        "watch +a@5 synced@10 rubbish +b@11 end | watch +a@5 +b@11 synced@20",
        "stream, stream",
        "+a synced +b synced",
        (0.2,),
    ),
    History("a rejected object can be deleted", "watch +a@5 synced@10 +a@11:bad -a@12", "stream", "+a synced !a -a"),
    History("an unknown object is not deleted", "watch synced@10 -a@11 +b@12", "stream", "synced +b"),
    History(
        "a Service becomes headless: deleted", "watch +a@5 synced@10 +a@11:None +b@12:None", "stream", "+a synced -a"
    ),
    History(
        "a refused streaming list is not requested again",
        f"{PAGES} | list@100 | watch error=410 end | list@100",
        "stream, page, watch 100, page, watch 100",
        "synced synced",
        (0.4,),
    ),
    *(
        History(
            f"a broken streaming list ({how}) is not synced; pages follow",
            f"watch +a@5 +b@6 {how} | list@100 a@5",
            "stream, page, watch 100",
            "+a +b -b synced",
            (0.2,),
        )
        for how in ("end", "cut", "reset")
    ),
    History(
        "a new list makes events for differences only",
        "watch +a@1 +b@2 +c@3 synced@9 error=410 | watch +a@1 +c@8 +d@9 synced@10",
        "stream, stream",
        "+a +b +c synced +c +d -b synced",
    ),
    History(
        "an object deleted during a streaming list stays deleted",
        "watch +a@1 +b@2 -a@3 synced@4 error=410 | watch +b@2 synced@10",
        "stream, stream",
        "+a +b -a synced synced",
    ),
    History(
        "a list with a failed page deletes nothing",
        f"{PAGES} | list@100 a@1 b@2 | watch error=410 end | list@100 b@2 continue=t | 500 "
        "| list@100 b@2 c@3 continue=t | list@200",
        "stream, page, watch 100, page, page after t, page, page after t, watch 200",
        "+a +b synced +c -a synced",
        (0.4, 0.8),
    ),
    History(
        "a list with an unreadable object deletes nothing, the next one does",
        f"{PAGES} | list@100 a@1 | watch error=410 end | list@100 b@2 nameless | watch error=410 end | list@100 b@2",
        "stream, page, watch 100, page, watch 100, page, watch 100",
        "+a synced +b synced -a synced",
        (0.4, 0.8),
    ),
    History(
        "a streaming list with a malformed line: pages follow, or deletions would be missed",
        f"{GONE} | watch rubbish +b@6 synced@20 | list@100 b@6",
        "stream, stream, page, watch 100",
        "+a synced +b -a synced",
        (0.4,),
    ),
]


@pytest.mark.parametrize("row", HISTORIES, ids=lambda row: row.name)
def test_requests_and_events(start, row: History):
    run = start(*row.responses.split(" | "))
    asked, said = row.asked.split(", "), row.said.split()
    run.until(lambda: run.all_asked == asked and run.said == said)
    run.until_watching(len(asked))
    assert tuple(run.waits) == row.waits
    assert (run.status.failures, run.status.error) == (0, "")
