# SPDX-License-Identifier: Apache-2.0
"""Requests to an API server: paths, queries, lists that come page by page, and explanations of error
responses.
"""

import re
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from kbpf.errors import SourceError
from kbpf.model.events import Kind, ObjectKey
from kbpf.source.api.credentials import MAX_PAGES_BYTES, Cluster
from kbpf.source.api.transport import ApiConnection
from kbpf.source.decode import wire
from kbpf.source.decode.fields import format_json_error

PAGE_SIZE: Final = 500
HTML_PROBE_BYTES: Final = 256
HTML_HINT: Final = "does a proxy or login page answer instead of it?"
JSON: Final = "application/json"
LEAN: Final = "drop=metadata.managedFields"
"""Asks a server of Kubernetes 1.38 with the gate ManagedFieldsOptOut to leave these fields out."""
SOCKET_LB_LABEL: Final = "kbpf.io/socket-lb"
_STATUS_DECODER: Final = msgspec.json.Decoder(wire.ApiStatus)


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object to watch. The selectors are kube-proxy's (server.go)."""

    kind: Kind
    name: str
    path: str
    label_selector: str = ""
    field_selector: str = ""
    metadata_only: bool = False
    """Whether only metadata is requested, in which annotations and labels are."""
    is_optional: bool = False
    """Whether the agent works without permission for it. Then being refused is no failure."""
    narrower: "Resource | None" = None
    """Watched instead if the server has more than PAGE_SIZE objects, or if listing them is
    forbidden."""

    def without_field_selector(self) -> "Resource":
        """For a server that does not support the field selector; decode.py leaves the same objects
        out, and needs more than their metadata for that.
        """
        return replace(self, field_selector="", metadata_only=False)

    def page_query(self, token: str) -> str:
        """LIST of the newest state: the first page, or the page that `token` continues."""
        return self._query(limit=str(PAGE_SIZE), **{"continue": token})

    def one_object_query(self, key: ObjectKey | None) -> str:
        """LIST of one object, `key` or any, to learn the server's current version."""
        if key is None:
            return self._query(limit="1")
        path, selector = self.path, f"metadata.name={key.name}"
        if key.namespace:
            # in its namespace, where the server finds an object by its name without a search
            folder, _, plural = path.rpartition("/")
            path = f"{folder}/namespaces/{urllib.parse.quote(key.namespace, safe='')}/{plural}"
        if self.field_selector and self.field_selector != selector:
            selector = f"{self.field_selector},{selector}"
        return replace(self, path=path, field_selector=selector)._query(limit="1")

    def stream_query(self, seconds: int) -> str:
        """WATCH that starts with all objects of the newest state, followed by an end mark."""
        return self.watch_query("", seconds, sendInitialEvents="true", resourceVersionMatch="NotOlderThan")

    def watch_query(self, version: str, seconds: int, **options: str) -> str:
        """WATCH that resumes from `version`."""
        return self._query(
            **options,
            resourceVersion=version,
            watch="1",
            allowWatchBookmarks="true",
            timeoutSeconds=str(seconds),
        )

    def accept(self, is_watch: bool) -> str:
        """The header Accept of a request. A server that cannot leave the rest out sends everything,
        which decode.py reads as well.
        """
        if not self.metadata_only:
            return f"{JSON};{LEAN},{JSON}"
        kind = "PartialObjectMetadata" if is_watch else "PartialObjectMetadataList"
        return f"{JSON};as={kind};g=meta.k8s.io;v=v1;{LEAN},{JSON}"

    def _query(self, **options: str) -> str:
        options |= {"labelSelector": self.label_selector, "fieldSelector": self.field_selector}
        parameters = {name: value for name, value in options.items() if value}
        return f"{self.path}?{urllib.parse.urlencode(parameters)}"


SERVICES: Final = Resource(
    Kind.SERVICE,
    "services",
    "/api/v1/services",
    label_selector="!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless",
    field_selector="spec.clusterIP!=None",
)
SLICES: Final = Resource(
    Kind.SLICE,
    "endpointslices",
    "/apis/discovery.k8s.io/v1/endpointslices",
    label_selector="!service.kubernetes.io/headless",
)


NODES: Final = Resource(Kind.NODE, "nodes", "/api/v1/nodes")


def own_node_resource(name: str) -> Resource:
    return replace(NODES, field_selector=f"metadata.name={name}")


def node_resource(name: str) -> Resource:
    """All Node objects, for their addresses; only this node's in a large cluster."""
    return replace(NODES, narrower=own_node_resource(name))


def exempt_pod_resource(node: str, with_meshes: bool, is_optional: bool = False) -> Resource:
    """The running Pods of this node, or only those with the label kbpf.io/socket-lb=off. Most
    meshes mark Pods by annotations, and a server cannot select by these.
    """
    return Resource(
        Kind.POD,
        "pods",
        "/api/v1/pods",
        label_selector="" if with_meshes else f"{SOCKET_LB_LABEL}=off",
        field_selector=f"spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed",
        metadata_only=True,
        is_optional=is_optional,
    )


class HttpStatusError(SourceError):
    """The API server responded with a status other than 200. `server_message` is its own
    message.
    """

    status = 0
    retry_after = 0.0
    server_message = ""


def is_html(body: bytes | bytearray) -> bool:
    """Whether a response is a web page. JSON never begins like that."""
    return bytes(body[:HTML_PROBE_BYTES]).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<")


def html_page_error() -> SourceError:
    return SourceError("the response is an HTML page", hint=HTML_HINT)


def make_status_error(resource: Resource, status: int, reason: str, body: bytes, where: str) -> HttpStatusError:
    """Turns a response into an error that says what to do. `where`: the origin of the
    credentials.
    """
    try:
        message = _STATUS_DECODER.decode(body).message or ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        message = ""
    user = match[1] if (match := re.search(r'User "([^"]+)"', message)) else "this user"
    name, role = resource.name, "ClusterRole system:node-proxier"
    if resource.kind is Kind.POD:  # which kube-proxy's role does not include
        role = f"manifests/components/{'mesh-pods' if resource.is_optional else 'socket-lb-label'}"
    hints = {
        401: f"the credentials from {where} are invalid or have expired",
        403: f"grant list and watch on {name} to {user} ({role})",
        404: f"the server does not have {resource.path}; Kubernetes 1.21 or later is required",
    }
    what, hint = f"{status} {reason}".rstrip(), hints.get(status, message[:200])
    if is_html(body):
        what, hint = f"{what}, an HTML page", HTML_HINT
    error = HttpStatusError(what, hint=hint)
    error.status, error.server_message = status, message
    return error


# ---- lists ---------------------------------------------------------------------------------------

COUNT_ITEMS_FROM_BYTES: Final = 1 << 20
"""The items of a page larger than this many bytes are counted before they are decoded."""
MAX_LIST_S: Final = 120.0
PAGE_TIMEOUT_S: Final = 20.0
_PAGE_DECODER: Final = msgspec.json.Decoder(wire.ListPage)


def process_pages(process_page: Callable[[str], wire.ListMeta]) -> wire.ListMeta:
    """Calls `process_page` with the token of each page in turn, which returns the page's metadata;
    returns that of the last one. Raises SourceError if the server repeats a page.
    """
    token = ""
    while True:
        meta = process_page(token)
        previous, token = token, meta.continue_ or ""
        if not token:
            return meta
        if token == previous:
            raise SourceError("the server repeats the same page")


def decode_page(body: bytearray) -> wire.ListPage:
    """Raises SourceError."""
    try:
        if len(body) > COUNT_ITEMS_FROM_BYTES:
            wire.check_items(body)
        return _PAGE_DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if is_html(body):
            raise html_page_error() from error
        hint = "is this a Kubernetes API server?"
        raise SourceError(f"the response is not a list: {format_json_error(error)}", hint=hint) from error


def list_once(
    connection: ApiConnection, cluster: Cluster, resource: Resource, handle: Callable[[msgspec.Raw], None]
) -> None:
    """Calls `handle` with each object, for a command that needs them once. Raises SourceError."""
    deadline = time.monotonic() + MAX_LIST_S

    def list_page(token: str) -> wire.ListMeta:
        if time.monotonic() > deadline:
            raise SourceError(f"the {resource.name} are not complete after {MAX_LIST_S:.0f} s", cluster.url)
        response = connection.request(resource.page_query(token), accept=resource.accept(False))
        if response.status != 200:
            raise make_status_error(
                resource, response.status, response.reason, response.read_error_body(), cluster.access.where
            )
        what = f"a page of {resource.name}"
        page = decode_page(response.read(MAX_PAGES_BYTES, PAGE_TIMEOUT_S, what))
        for raw in page.items or ():
            handle(raw)
        return page.metadata

    try:
        process_pages(list_page)
    except HttpStatusError as error:
        if "field label not supported" not in error.server_message:
            raise
        resource = resource.without_field_selector()
        process_pages(list_page)
