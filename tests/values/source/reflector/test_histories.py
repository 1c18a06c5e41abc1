# SPDX-License-Identifier: Apache-2.0
"""What the reflector requests and reports for a sequence of responses."""

from tests.support.table import each_cells
from tests.values.source.reflector.scripted import LISTED_A, PAGES

WORDS = {"GONE": "watch +a@5 synced@10 error=410 end", "LISTED_A": LISTED_A, "PAGES": PAGES}


@each_cells(
    "responses, asked_text, said_text, waits",
    """\
410 in a watch: a new list at once | GONE; watch synced@20 | stream, stream | +a synced -a synced
410 twice: a wait before the third list | GONE; GONE; LISTED_A | stream, stream, stream | +a synced synced synced | 0.4
410 between pages: the list starts over | PAGES; list@100 a@1 continue=t; 410; list@100 b@2 \
| stream, page, page after t, page, watch 100 | +a +b -a synced | 0.4
a watch that ended cleanly resumes at the last bookmark | watch +a@5 synced@10 @33 end; watch +b@40 \
| stream, watch 33 | +a synced +b
a watch that ends inside a line resumes after the last complete one | watch +a@5 synced@10 +b@11 half end; watch +c@12 \
| stream, watch 11 | +a synced +b +c | 0.2
a watch that is cut inside a line resumes after it, too | watch +a@5 synced@10 +b@11 half cut; watch +c@12 \
| stream, watch 11 | +a synced +b +c | 0.2
so does one that is reset | watch +a@5 synced@10 +b@11 half reset; watch +c@12 \
| stream, watch 11 | +a synced +b +c | 0.2
a connection closed after a watch is opened again at once | watch +a@5 synced@10 close; watch +b@11 \
| stream, watch 10 | +a synced +b
after an outage an object that has changed is not compared, but the one before it \
| watch +a@5 synced@10 +b@11 cut; 503; 503; list@30 b@25; list@30 a@5; watch +b@25 @31 \
| stream, watch 11, page, page, page, watch 11 | +a synced +b +b | 0.2 0.4 0.8
400 as the response to a watch: a new list | watch +a@5 synced@10 end; 400 invalid resource version; LISTED_A \
| stream, watch 10, stream | +a synced synced | 0.4
422 as the response to a watch: a new list | watch +a@5 synced@10 end; 422 resourceVersion: Invalid value; LISTED_A \
| stream, watch 10, stream | +a synced synced | 0.4
504, as etcd was restored from a backup: a new list \
| watch +a@5 synced@10 end; 504 Too large resource version: 10, current: 4; LISTED_A \
| stream, watch 10, stream | +a synced synced | 0.4
400 to a streaming list: pages \
| 400 sendInitialEvents: Forbidden; list@100 a@5 continue=t1; list@100 b@6 continue=t2; list@100 c@7 \
| stream, page, page after t1, page after t2, watch 100 | +a +b +c synced
422 to a streaming list: pages | PAGES; list@100 a@5 continue=t1; list@100 b@6 \
| stream, page, page after t1, watch 100 | +a +b synced
error 500 in a watch: a new list | watch +a@5 synced@10 error=500 end; LISTED_A | stream, stream \
| +a synced synced | 0.2
error 401 in a watch: a new list | watch +a@5 synced@10 error=401 end; LISTED_A | stream, stream \
| +a synced synced | 0.2
error 429 in a watch: a new list | watch +a@5 synced@10 error=429 end; LISTED_A | stream, stream \
| +a synced synced | 0.2
error 0 in a watch: a new list | watch +a@5 synced@10 error=0 end; LISTED_A | stream, stream | +a synced synced | 0.2
a malformed line in a watch: a new list \
| watch +a@5 synced@10 rubbish +b@11 end; watch +a@5 +b@11 synced@20 | stream, stream | +a synced +b synced | 0.2
a watch continues after a rejected object | watch +a@5 synced@10 +x@11:bad +b@12 end; watch +c@13 \
| stream, watch 12 | +a synced !x +b +c
a rejected object can be deleted | watch +a@5 synced@10 +a@11:bad -a@12 | stream | +a synced !a -a
an unknown object is not deleted | watch synced@10 -a@11 +b@12 | stream | synced +b
a Service becomes headless: deleted | watch +a@5 synced@10 +a@11:None +b@12:None | stream | +a synced -a
a refused streaming list is not requested again | PAGES; list@100; watch error=410 end; list@100 \
| stream, page, watch 100, page, watch 100 | synced synced | 0.4
a streaming list that ends is not synced; pages follow | watch +a@5 +b@6 end; list@100 a@5 \
| stream, page, watch 100 | +a +b -b synced | 0.2
a streaming list that is cut is not synced; pages follow | watch +a@5 +b@6 cut; list@100 a@5 \
| stream, page, watch 100 | +a +b -b synced | 0.2
a streaming list that is reset is not synced; pages follow | watch +a@5 +b@6 reset; list@100 a@5 \
| stream, page, watch 100 | +a +b -b synced | 0.2
a new list makes events for differences only \
| watch +a@1 +b@2 +c@3 synced@9 error=410; watch +a@1 +c@8 +d@9 synced@10 | stream, stream \
| +a +b +c synced +c +d -b synced
an object deleted during a streaming list stays deleted \
| watch +a@1 +b@2 -a@3 synced@4 error=410; watch +b@2 synced@10 | stream, stream | +a +b -a synced synced
a list with a failed page deletes nothing \
| PAGES; list@100 a@1 b@2; watch error=410 end; list@100 b@2 continue=t; 500; list@100 b@2 c@3 continue=t; list@200 \
| stream, page, watch 100, page, page after t, page, page after t, watch 200 | +a +b synced +c -a synced | 0.4 0.8
a list with an unreadable object deletes nothing, the next one does \
| PAGES; list@100 a@1; watch error=410 end; list@100 b@2 nameless; watch error=410 end; list@100 b@2 \
| stream, page, watch 100, page, watch 100, page, watch 100 | +a synced +b synced -a synced | 0.4 0.8
a streaming list with a malformed line: pages follow, or deletions would be missed \
| GONE; watch rubbish +b@6 synced@20; list@100 b@6 | stream, stream, page, watch 100 | +a synced +b -a synced | 0.4
""",
)
def test_requests_and_events(start, responses, asked_text, said_text, waits):
    """Responses in the words of step(), one after the other; the requests, the events and the waits that follow."""
    run = start(*(WORDS.get(response, response) for response in responses.split("; ")))
    asked, said = asked_text.split(", "), said_text.split()
    run.until(lambda: run.all_asked == asked and run.said == said)
    run.until_watching(len(asked))
    assert run.waits == list(map(float, waits.split()))
    assert (run.status.failures, run.status.error) == (0, "")
