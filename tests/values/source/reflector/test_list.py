# SPDX-License-Identifier: Apache-2.0
"""How the reflector lists: streaming lists, pages, and all Nodes or only our own."""

import logging
from typing import Any

import pytest

from kbpf.model.events import Kind
from kbpf.source.api.resource import PAGE_SIZE, SLICES, exempt_pod_resource, node_resource, own_node_resource
from kbpf.source.base import SourceState
from tests.support.faults.scripted import Exchange, Step
from tests.support.table import each_case
from tests.values.source.reflector.scripted import (
    LISTED_A,
    LOGIN,
    PAGES,
    Run,
    added,
    bookmark,
    streamed,
)

HEADLESS = "service.kubernetes.io/headless"


def counted(more: int, version: int = 90) -> Step:
    """A first page whose `remainingItemCount` is `more`."""
    meta = {"resourceVersion": str(version), "continue": "x", "remainingItemCount": more}
    return lambda exchange: exchange.answer(200, {"metadata": meta, "items": []})


# --- listing ---


def test_streaming_list_uses_the_selectors_of_kube_proxy(start):
    run = start(LISTED_A)
    run.until_watching(1)
    (request,) = run.server.requests
    assert request.path == "/api/v1/services"
    seconds = request.query.pop("timeoutSeconds")
    assert 300 <= int(seconds) <= 600
    assert request.query == {
        "watch": "1",
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "allowWatchBookmarks": "true",
        "labelSelector": f"!service.kubernetes.io/service-proxy-name,!{HEADLESS}",
        "fieldSelector": "spec.clusterIP!=None",
    }


RUNNING_ON_N1 = "spec.nodeName=n1,status.phase!=Succeeded,status.phase!=Failed"


@pytest.mark.parametrize(
    ("resource", "path", "selector"),
    [
        (SLICES, "/apis/discovery.k8s.io/v1/endpointslices", {"labelSelector": f"!{HEADLESS}"}),
        (own_node_resource("n1"), "/api/v1/nodes", {"fieldSelector": "metadata.name=n1"}),
        (
            exempt_pod_resource("n1", with_meshes=False),
            "/api/v1/pods",
            {"labelSelector": "kbpf.io/socket-lb=off", "fieldSelector": RUNNING_ON_N1},
        ),
        (exempt_pod_resource("n1", with_meshes=True), "/api/v1/pods", {"fieldSelector": RUNNING_ON_N1}),
    ],
    ids=("slices", "our node", "labelled pods of our node", "all pods of our node"),
)
def test_selectors_of_slices_our_node_and_exempt_pods(start, resource, path, selector):
    run = start(PAGES, "list@100", resource=resource)
    run.server.wait(3)
    assert run.server.requests[1].query["limit"] == "500"
    for request in run.server.requests:
        assert request.path == path
        chosen = {n: v for n, v in request.query.items() if n.endswith("Selector")}
        assert chosen == selector


PODS = exempt_pod_resource("n1", with_meshes=True, is_optional=True)
DROP = "drop=metadata.managedFields"


def test_only_metadata_of_pods_is_requested(start):
    run = start("422 sendInitialEvents: Forbidden", "list@100", "watch", resource=PODS)
    run.until_watching(3)
    kinds = ("PartialObjectMetadata", "PartialObjectMetadataList", "PartialObjectMetadata")
    assert [request.headers["accept"] for request in run.server.requests] == [
        f"application/json;as={kind};g=meta.k8s.io;v=v1;{DROP},application/json" for kind in kinds
    ]


def test_managed_fields_are_not_requested(start):
    """Older servers ignore the parameter, and others may send what is named last."""
    run = start(PAGES, "list@100", "watch")
    run.until_watching(3)
    accepted = {request.headers["accept"] for request in run.server.requests}
    assert accepted == {f"application/json;{DROP},application/json"}


def test_optional_resource_without_permission_is_no_failure(start, caplog):
    """It is tried again soon, because an API server that starts may refuse what it will permit."""
    caplog.set_level(logging.INFO, "kbpf.source")
    run = start(*["403 pods is forbidden"] * 11, "watch synced@10", resource=PODS)
    run.until_watching(12)
    assert run.waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0]
    assert run.said == ["synced"]
    assert run.status.failures == 0
    lines = [record.getMessage() for record in caplog.records]
    (line,) = (line for line in lines if "not permitted" in line)
    assert "manifests/components/mesh-pods" in line
    assert not [line for line in lines if "watch failed" in line]


def test_optional_resource_that_was_permitted_is_tried_again_soon(start):
    refusals = ["403 pods is forbidden"] * 3
    restarted = "watch synced@10 cut"
    run = start(*refusals, restarted, *refusals[:2], "watch synced@30", resource=PODS)
    run.until_watching(7)
    assert run.waits == [1.0, 2.0, 4.0, 0.2, 1.0, 2.0]


def test_streaming_list_then_synced_then_watch(start):
    run = start("watch +a@5 synced@10 +b@11 -a@12")
    run.until(lambda: len(run.events) == 4)
    assert run.said == ["+a", "synced", "+b", "-a"]
    first = run.events[0]
    assert first.received_at == 1000.0
    status = run.status
    assert (status.kinds, status.synced, status.error) == ((Kind.SERVICE,), True, "")
    assert (status.state, status.failures) == (SourceState.WATCHING, 0)
    assert (status.resource_version, status.last_contact) == ("12", 1000.0)


def test_unsupported_field_selector_is_replaced_by_local_filtering(start):
    run = start(
        '400 field selector "spec.clusterIP!=None": field label not supported: spec.c',
        "watch +a@5 +headless@6:None synced@10",
    )
    run.until_said("synced")
    assert run.said == ["+a", "synced"]
    assert "fieldSelector" not in run.server.requests[1].query
    assert run.all_asked == ["stream", "stream"]


def test_streaming_list_without_end_bookmark_times_out(start):
    def respond(exchange: Exchange, run: Run) -> None:
        exchange.watch(added("a", 5))
        run.until(lambda: run.said == ["+a"])
        run.now += 121
        exchange.line(bookmark(7))
        exchange.hang()

    run = start(respond, "list@100 a@5")
    run.until_watching(3)
    assert run.all_asked == ["stream", "page", "watch 100"]


HTML = "the response is an HTML page"
NOT_LISTS = {
    "a login page": (LOGIN, HTML, HTML),
    "null": (b"null\n", "the response is not a list: expected an object", "a line is not an event: expected an object"),
    "empty": (b"", "the response is not a list: invalid JSON: ", "the stream ended before the list did"),
    "broken": (
        b'{"items": [}\n',
        "the response is not a list: invalid JSON: JSON is malformed",
        "a line is not an event: invalid JSON: JSON is malformed",
    ),
    "truncated": (
        b'{"items": ',
        "the response is not a list: invalid JSON: ",
        "invalid JSON: the stream ended inside a line",
    ),
    "plain text": (
        b"welcome\n",
        "the response is not a list: invalid JSON: ",
        "a line is not an event: invalid JSON: ",
    ),
}
"""The body of a 200 response that is not a list, and the words of the error in either mode."""


@pytest.mark.parametrize("how", ["pages", "stream"])
@each_case("body, pages, stream", NOT_LISTS)
def test_response_that_is_not_a_list_is_an_error_that_describes_it(start, caplog, body, pages, stream, how):
    caplog.set_level(logging.WARNING, "kbpf.source")
    steps = (PAGES,) if how == "pages" else ()
    run = start(*steps, lambda exchange: exchange.answer(200, body), "list@100 a@1")
    run.until_watching(len(steps) + 3)
    assert run.said == ["+a", "synced"]
    (line,) = [r.getMessage() for r in caplog.records if "watch failed" in r.getMessage()]
    wanted = pages if how == "pages" else stream
    assert f"cannot list services: {wanted}" in line
    assert ("does a proxy or login page answer instead of it?" in line) == (wanted == HTML)


def test_items_null_is_an_empty_list(start):
    body = {"metadata": {"resourceVersion": "9"}, "items": None}
    run = start(PAGES, lambda exchange: exchange.answer(200, body))
    run.until_watching(3)
    assert run.said == ["synced"]
    assert run.asked(2) == "watch 9"


def test_page_that_continues_with_itself_is_an_error_with_backoff(start):
    run = start(PAGES, *["list@100 a@1 continue=t"] * 8)
    run.until(lambda: len(run.waits) >= 3)
    assert "synced" not in run.said
    assert "same page" in run.status.error


# --- watching all Nodes or only our own ---


OWN = "metadata.name=n1"
NODES = {
    "one Node": (counted(0), ""),
    "a full page": (counted(PAGE_SIZE - 1), ""),
    "more than a page": (counted(PAGE_SIZE), OWN),
    "a server without remainingItemCount": ("list@90", ""),
    "listing is forbidden": ("403 nodes is forbidden", OWN),
}
"""The response to the count of Nodes, and the field selector of the watch that follows."""


@each_case("first_page, selector", NODES)
def test_all_nodes_are_watched_up_to_one_page(start, first_page, selector):
    run = start(first_page, "watch synced@100", resource=node_resource("n1"))
    run.until_watching(2)
    first, stream = run.server.requests
    assert first.query == {"limit": "1"}
    assert "sendInitialEvents" in stream.query
    assert stream.query.get("fieldSelector", "") == selector
    assert run.said == ["synced"]


def test_cluster_that_outgrows_a_page_is_watched_by_own_node_only(start):
    """Nodes are counted before each list. Those no longer watched are deleted, which does not count
    as drift.
    """

    def node(name: str) -> dict[str, Any]:
        meta = {"name": name, "uid": f"uid-{name}", "resourceVersion": "5"}
        return {"kind": "Node", "apiVersion": "v1", "metadata": meta}

    event = {"type": "ADDED", "object": node("n1")}
    run = start(
        counted(1),
        streamed(
            event, {"type": "ADDED", "object": node("n2")}, bookmark(10, end=True), then=lambda exchange: exchange.end()
        ),
        "410",
        counted(PAGE_SIZE),
        streamed(event, bookmark(20, end=True)),
        resource=node_resource("n1"),
    )
    run.until_watching(5)
    assert run.said == ["+n1", "+n2", "synced", "-n2", "synced"]
    assert run.status.drift == 0
