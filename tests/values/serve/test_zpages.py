# SPDX-License-Identifier: Apache-2.0
"""/statusz and /flagz. The rows were recorded from the handlers of Kubernetes 1.37.1
(k8s.io/apiserver/pkg/server/statusz and flagz, run with httptest). tests/lab/agent/test_observe.py
compares the pages with a real kube-proxy.
"""

import json
from typing import NamedTuple

import pytest
import yaml

from kbpf.serve import zpages
from kbpf.serve.message import HttpRequest, HttpResponse, parse_head

STARTED = 1_796_000_000.0
FLAGS = {"--b": "2", "--a": 'x: "1"', "-v": "", "--master": "https://me:secret@10.0.0.1"}
STATUSZ, FLAGZ = (f"as={kind};v=v1beta1;g=config.k8s.io" for kind in ("Statusz", "Flagz"))
OLD_STATUSZ, OLD_FLAGZ = (each.replace("v1beta1", "v1alpha1") for each in (STATUSZ, FLAGZ))


class Wish(NamedTuple):
    """An Accept header, and the form of the two pages' responses (see form())."""

    accept: str
    statusz: str
    flagz: str


NONE = "406 json pretty"
WISHES = [
    Wish("", "text", "text"),
    Wish(" ", "text", "text"),
    Wish("*/*", "text", "text"),
    Wish("*", "text", "text"),
    Wish("text/plain", "text", "text"),
    Wish("text/*", "text", "text"),
    Wish("text/plain;charset=utf-8", "text", "text"),
    Wish("text/plain;x=y;q=zz", "text", "text"),
    Wish("image/png, text/plain;q=0", "text", "text"),
    Wish("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "text", "text"),
    Wish(f"application/json;{STATUSZ}", "json", NONE),
    Wish(f"application/json;{OLD_STATUSZ}", "json old", NONE),
    Wish(f"application/json;{STATUSZ}".replace(";", "; "), "json", NONE),
    Wish(f"application/json;{STATUSZ};x=y", "json", NONE),
    Wish(f"application/json;{STATUSZ};pretty=1", "json pretty", NONE),
    Wish(f"application/yaml;{STATUSZ}", "yaml", NONE),
    Wish(f"*/*;{STATUSZ}", "json", NONE),
    Wish(f"text/plain;q=0.1,application/json;{STATUSZ}", "json", "text"),
    Wish(f"application/json;{FLAGZ}", NONE, "json"),
    Wish(f"application/json;{OLD_FLAGZ}", NONE, "json old"),
    Wish(f"application/json;{FLAGZ};pretty=1", NONE, "json pretty"),
    Wish(f"application/yaml;{FLAGZ}", NONE, "yaml"),
    Wish("application/json", "406 json", "406 json"),
    Wish("application/yaml", "406 yaml", "406 yaml"),
    Wish("application/*", "406 json", "406 json"),
    Wish("text/html;q=0.9, application/json;q=0.1", "406 json", "406 json"),
    Wish("text/html", NONE, NONE),
    Wish("application/cbor", NONE, NONE),
    Wish(f"application/cbor;{STATUSZ}", NONE, NONE),
    Wish(f"text/plain;{STATUSZ}", NONE, NONE),
    Wish("application/json;as=Statusz;v=v1;g=config.k8s.io", NONE, NONE),
    Wish("application/json;as=Statusz;v=v1beta1", NONE, NONE),
    Wish(f"application/json;{STATUSZ};stream=watch", NONE, NONE),
    Wish(f"application/json;{STATUSZ};sv=v1", NONE, NONE),
    Wish("garbage", NONE, NONE),
    Wish(",", NONE, NONE),
    Wish(";;;", NONE, NONE),
    Wish("application/vnd.kubernetes.protobuf", NONE, NONE),
    Wish("application/vnd.kubernetes.protobuf, text/html", NONE, NONE),
    Wish("APPLICATION/JSON", NONE, NONE),
    Wish("Text/Plain", NONE, NONE),
]


def ask(path: str, accept: str = "", query: str = "", agent: str = "") -> HttpResponse:
    request = HttpRequest("GET", path, query, accept, agent)
    if path == "/flagz":
        return zpages.flagz(request, FLAGS)
    return zpages.statusz(request, "0.1", STARTED)


def form(answer: HttpResponse) -> str:
    """The form of a response in the words of the rows: "[STATUS] FORMAT [pretty] [old]"."""
    media = answer.content_type.partition(";")[0].partition("/")[2].replace("plain", "text")
    words = [] if answer.status == 200 else [str(answer.status)]
    words += [media, *(["pretty"] if answer.body.startswith(b"{\n") else [])]
    return " ".join([*words, *(["old"] if dict(answer.headers).get("Warning") else [])])


@pytest.mark.parametrize("wish", WISHES, ids=lambda wish: repr(wish.accept))
def test_content_negotiation(wish: Wish):
    for path, expected in (("/statusz", wish.statusz), ("/flagz", wish.flagz)):
        answer = ask(path, wish.accept)
        assert form(answer) == expected
        if answer.status == 406:
            assert yaml.safe_load(answer.body) == {
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "message": "only the following media types are accepted: application/json, "
                "application/yaml, text/plain", "reason": "NotAcceptable", "code": 406,
            }  # fmt: skip


WARNING = (
    "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility "
    "guarantees and is for debugging purposes only.\n"
)


def test_text_is_that_of_kube_proxy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zpages.time, "time", lambda: STARTED + 90_061.9)
    assert ask("/statusz").body.decode() == (
        f"\nkbpf statusz\n{WARNING}\n"
        "Started: Mon Nov 30 00:53:20 UTC 2026\n"
        "Up: 25 hr 01 min 01 sec\n"
        "Binary version: 0.1\n"
        "Emulation version: 1.37\n"
        "Paths: /configz /flagz /healthz /metrics /proxyMode /readyz\n"
    )
    assert ask("/flagz").body.decode() == (
        f'\nkbpf flagz\n{WARNING}a=x: "1"\nb=2\nmaster=CLASSIFIED\nv=\n'
    )


def test_json_is_that_of_kube_proxy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zpages.time, "time", lambda: STARTED + 61)
    head = '{"kind":"Statusz","apiVersion":"config.k8s.io/v1beta1","metadata":{"name":"kbpf"},'
    answer = ask("/statusz", f"application/json;{STATUSZ}")
    assert answer.content_type == "application/json;g=config.k8s.io;v=v1beta1;as=Statusz"
    assert answer.body.decode() == (
        head + '"startTime":"2026-11-30T00:53:20Z","uptimeSeconds":61,"goVersion":"",'
        '"binaryVersion":"0.1","emulationVersion":"1.37",'
        '"paths":["/configz","/flagz","/healthz","/metrics","/proxyMode","/readyz"]}\n'
    )
    assert dict(ask("/statusz", f"application/json;{OLD_STATUSZ}").headers)["Warning"] == (
        '299 - "This version of the statusz endpoint is deprecated. Please use a newer version."'
    )


@pytest.mark.parametrize(("path", "wish"), [("/statusz", STATUSZ), ("/flagz", FLAGZ)])
def test_yaml_equals_json(path: str, wish: str):
    made = json.loads(ask(path, f"application/json;{wish}").body)
    answer = ask(path, f"application/yaml;{wish}")
    assert yaml.safe_load(answer.body) == made
    assert list(yaml.safe_load(answer.body)) == sorted(made)


@pytest.mark.parametrize(
    ("query", "agent", "pretty"),
    [("", "", False), ("", "curl/8", True), ("", "Wget/1", True), ("", "Mozilla/5.0 (X)", True),
     ("pretty=true", "", True), ("pretty=0", "curl/8", False), ("pretty", "curl/8", True)],
)  # fmt: skip
def test_json_is_indented_for_browsers_and_curl(query: str, agent: str, pretty: bool):
    answer = ask("/flagz", f"application/json;{FLAGZ}", query, agent)
    assert ("pretty" in form(answer)) is pretty


def test_without_flags_the_field_is_missing():
    request = HttpRequest("GET", "/flagz", "", f"application/json;{FLAGZ}")
    assert "flags" not in json.loads(zpages.flagz(request, {}).body)


def test_accept_and_user_agent_are_parsed():
    head = parse_head(b"GET /statusz HTTP/1.1\r\nACCEPT: a/b\r\nAccept: c/d\r\nUser-Agent: curl")
    assert head is not None
    assert (head.request.accept, head.request.user_agent) == ("a/b, c/d", "curl")


@pytest.mark.parametrize("accept", ["," * 8000, "*/*;" * 2000, "a/b;q=1e999,*/*", "\xff/\xe9"])
def test_odd_accept_headers_cause_no_error(accept: str):
    assert ask("/statusz", accept).status in (200, 406)
