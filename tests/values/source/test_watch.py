# SPDX-License-Identifier: Apache-2.0
"""Decoding the bytes of a watch: chunking, bookmarks, errors and malformed lines."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbpf.model.events import Kind, ObjectKey
from kbpf.model.objects import Service
from kbpf.source.api.watch import (
    MAX_LINE_BYTES,
    InitialListEnd,
    MalformedLine,
    ObjectChanged,
    VersionExpired,
    WatchFailed,
    WatchMessage,
    WatchStream,
)

END = {"k8s.io/initial-events-end": "true"}


def line(kind: str, obj: Any) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


def service(name: str, version: str, **spec: Any) -> dict[str, Any]:
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]} | spec
    return {"metadata": {"name": name, "namespace": "ns", "resourceVersion": version}, "spec": spec}


def bookmark(version: str, annotations: Any = None) -> bytes:
    meta = {"resourceVersion": version, "annotations": annotations, "creationTimestamp": None}
    return line("BOOKMARK", {"kind": "Service", "metadata": meta, "spec": {}, "status": {}})


def error(code: int, message: str = "why") -> bytes:
    return line("ERROR", {"kind": "Status", "status": "Failure", "message": message, "code": code})


def stream(*lines: bytes, version: str = "1") -> tuple[list[WatchMessage], WatchStream]:
    watch = WatchStream(Kind.SERVICE, version)
    return watch.feed(b"".join(lines)), watch


CHANGES = [
    # the type of an event, fields of the Service's spec, and the error of the object
    ("ADDED", {}, ""),
    ("DELETED", {}, ""),
    ("MODIFIED", {"ports": [{"port": 70000}]}, "spec.ports[0].port: 70000 is not a port"),
    ("MODIFIED", {"ports": 7}, "spec.ports: expected a list, got an integer"),
]


@pytest.mark.parametrize(("kind", "spec", "error"), CHANGES)
def test_changed_object_is_returned_and_advances_the_version(kind: str, spec: dict[str, Any], error: str):
    (said,), watch = stream(line(kind, service("web", "7", **spec)))
    assert isinstance(said, ObjectChanged)
    assert said.item.key == ObjectKey(Kind.SERVICE, "ns", "web")
    assert (said.item.error, isinstance(said.item.object, Service)) == (error, not error)
    assert said.deleted is (kind == "DELETED")
    assert watch.resource_version == "7"


@pytest.mark.parametrize("annotations", [None, END], ids=["plain", "the end of a list, outside of one"])
def test_bookmark_only_advances_the_version(annotations: Any):
    said, watch = stream(bookmark("20", annotations))
    assert (said, watch.resource_version) == ([], "20")


def test_streaming_list_takes_its_version_from_the_end_bookmark_only():
    watch = WatchStream(Kind.SERVICE, initial=True)
    assert len(watch.feed(line("ADDED", service("a", "50")) + bookmark("60"))) == 1
    assert watch.resource_version == ""
    assert len(watch.feed(line("ADDED", service("b", "40")))) == 1
    assert watch.resource_version == ""
    assert watch.feed(bookmark("55", END)) == [InitialListEnd()]
    assert watch.resource_version == "55"
    watch.feed(line("MODIFIED", service("b", "56")))
    assert watch.resource_version == "56"


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (error(410, "too old resource version"), VersionExpired("too old resource version")),
        (error(500, "etcd"), WatchFailed(500, "etcd")),
        (line("ERROR", {}), WatchFailed(0, "no message")),
    ],
)
def test_error_410_means_expired_and_others_failed(sent: bytes, message: WatchMessage):
    assert stream(sent)[0] == [message]


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
    said, _ = stream(line("A" * 5000, {}))
    assert said == [MalformedLine(f"unknown event type '{'A' * 40}'")]


@pytest.mark.parametrize("rubbish", MALFORMED, ids=lambda it: repr(it[:40]))
def test_malformed_line_is_one_problem_and_the_stream_continues(rubbish):
    said, watch = stream(rubbish, line("ADDED", service("web", "7")))
    problem, changed = said
    assert isinstance(problem, MalformedLine)
    assert "\n" not in problem.error
    assert len(problem.error) < 400
    assert isinstance(changed, ObjectChanged)
    assert watch.resource_version == "7"


def test_empty_lines_are_ignored():
    assert stream(b"\n", b" \r\n", b"\n")[0] == []


def test_line_may_end_with_crlf():
    said, _ = stream(line("ADDED", service("web", "7"))[:-1] + b"\r\n")
    assert isinstance(said[0], ObjectChanged)


def test_truncated_line_is_never_decoded():
    whole = line("ADDED", service("web", "7"))
    for size in (1, len(whole) // 2, len(whole) - 1):
        said, watch = stream(whole[:size])
        assert said == []
        assert watch.close()
        assert watch.resource_version == "1"


def test_complete_line_leaves_no_remainder():
    assert not stream(line("ADDED", service("web", "7")))[1].close()
    assert not WatchStream(Kind.SERVICE).close()


@pytest.mark.parametrize(
    ("pieces", "inside"),
    [
        ([], False),
        ([b"x"], True),
        ([b"x", b"\n"], False),
        ([b"\n"], False),
        ([b"\n{"], True),
        ([b"{", b"}\n{", b"}"], True),
        ([b"{", b"}\n"], False),
    ],
)
def test_is_inside_line(pieces, inside):
    stream = WatchStream(Kind.SERVICE, "1")
    for piece in pieces:
        stream.feed(piece)
    assert stream.is_inside_line is inside


def test_line_over_the_limit_fails_the_watch():
    watch = WatchStream(Kind.SERVICE)
    part = b"x" * (MAX_LINE_BYTES // 2)
    assert watch.feed(part) == watch.feed(part) == []
    (said,) = watch.feed(b"x")
    assert isinstance(said, WatchFailed)
    assert not watch.close()


LINES = [
    line("ADDED", service("a", "1")),
    line("MODIFIED", service("a", "2", externalIPs=["2001:db8::1", "198.51.100.1"])),
    line("DELETED", service("a", "3")),
    line("ADDED", service("bad", "4", ports=[{"port": 0}])),
    bookmark("5"),
    bookmark("6", END),
    b"rubbish\n",
    b"\n",
    error(410),
    error(500),
]


@given(
    lines=st.lists(st.sampled_from(LINES), max_size=8),
    cuts=st.lists(st.integers(0, 4000), max_size=12),
    tail=st.sampled_from([b"", b'{"type":"AD', b"\n"]),
    initial=st.booleans(),
)
@settings(max_examples=200)
def test_any_chunking_gives_the_same_messages(lines, cuts, tail, initial):
    data = b"".join(lines) + tail
    whole = WatchStream(Kind.SERVICE, "0", initial=initial)
    expected = whole.feed(data)
    parts = WatchStream(Kind.SERVICE, "0", initial=initial)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    said = [each for a, b in itertools.pairwise(edges) for each in parts.feed(data[a:b])]
    assert said == expected
    assert parts.resource_version == whole.resource_version
    assert parts.close() == whole.close() == (b"AD" in tail)
