# SPDX-License-Identifier: Apache-2.0
"""Decoding the bytes of a watch: chunking, malformed lines, and the version of a streaming list. What the reflector
makes of changes, bookmarks, errors and cut lines: test_histories.py and test_watch.py in reflector/.
"""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbpf.model.events import Kind
from kbpf.source.api.watch import (
    MAX_LINE_BYTES,
    InitialListEnd,
    MalformedLine,
    ObjectChanged,
    WatchFailed,
    WatchMessage,
    WatchStream,
)
from tests.values.source.reflector.scripted import lines


def sent(text: str) -> list[bytes]:
    """The bytes of these lines(), one by one."""
    return [one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines(text)]


def stream(*received: bytes) -> tuple[list[WatchMessage], WatchStream]:
    watch = WatchStream(Kind.SERVICE, "1")
    return watch.feed(b"".join(received)), watch


def test_streaming_list_takes_its_version_from_the_end_bookmark_only():
    watch = WatchStream(Kind.SERVICE, initial=True)
    assert len(watch.feed(b"".join(sent("+a@50 @60 +b@40")))) == 2
    assert watch.resource_version == ""
    assert watch.feed(*sent("synced@55")) == [InitialListEnd()]
    assert watch.resource_version == "55"
    (modified,) = sent("+b@56")
    watch.feed(modified.replace(b"ADDED", b"MODIFIED"))
    assert watch.resource_version == "56"


MALFORMED = [
    b"<html>\n",
    b"null\n",
    b"[]\n",
    b"{}\n",
    b"\xff\xfe\n",
    b"[" * 100_000 + b"\n",
    b'{"type":"ADDED"}\n',
    b'{"type":"ADDED","object":null}\n',
    b'{"type":"ADDED","object":{"metadata":{}}}\n',
    b'{"type":"ADDED","object":{"metadata":{"name":"\xff"}}}\n',
    b'{"type":"GONE","object":{}}\n',
    b'{"type":"BOOKMARK","object":{}}\n',
    b'{"type":"ERROR","object":7}\n',
    b'{"type":"ADDED","object":' + b'{"metadata":' * 9999 + b"}" * 10_000 + b"\n",
]


def test_unknown_event_type_is_truncated_in_the_error():
    said, _ = stream(b'{"type":"%s","object":{}}\n' % (b"A" * 5000))
    assert said == [MalformedLine(f"unknown event type '{'A' * 40}'")]


@pytest.mark.parametrize("rubbish", MALFORMED, ids=lambda it: repr(it[:40]))
def test_malformed_line_is_one_problem_and_the_stream_continues(rubbish):
    said, watch = stream(rubbish, *sent("+web@7"))
    problem, changed = said
    assert isinstance(problem, MalformedLine)
    assert "\n" not in problem.error
    assert len(problem.error) < 400
    assert isinstance(changed, ObjectChanged)
    assert watch.resource_version == "7"


def test_line_may_end_with_crlf():
    said, _ = stream(sent("+web@7")[0].replace(b"\n", b"\r\n"))
    assert isinstance(said[0], ObjectChanged)


def test_line_over_the_limit_fails_the_watch():
    watch = WatchStream(Kind.SERVICE)
    part = b"x" * (MAX_LINE_BYTES // 2)
    assert watch.feed(part) == watch.feed(part) == []
    (said,) = watch.feed(b"x")
    assert isinstance(said, WatchFailed)
    assert not watch.close()


LINES = [*sent("+a@1 +a@2:2001:db8::1 -a@3 +bad@4:no-address @5 synced@6 rubbish error=410 error=500"), b"\n"]


@given(
    some=st.lists(st.sampled_from(LINES), max_size=8),
    cuts=st.lists(st.integers(0, 4000), max_size=12),
    tail=st.sampled_from([b"", b'{"type":"AD', b"\n"]),
    initial=st.booleans(),
)
@settings(max_examples=200)
def test_any_chunking_gives_the_same_messages(some, cuts, tail, initial):
    data = b"".join(some) + tail
    whole = WatchStream(Kind.SERVICE, "0", initial=initial)
    expected = whole.feed(data)
    parts = WatchStream(Kind.SERVICE, "0", initial=initial)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    said = [each for a, b in itertools.pairwise(edges) for each in parts.feed(data[a:b])]
    assert said == expected
    assert parts.resource_version == whole.resource_version
    assert parts.close() == whole.close() == (b"AD" in tail)
