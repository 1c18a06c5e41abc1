"""What is asked of an API server: paths and queries, and what its refusals mean."""

import re
import urllib.parse
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from kbpf.errors import SourceError
from kbpf.model.events import Kind
from kbpf.source.decode import wire

PAGE: Final = 500
HTML_BYTES: Final = 256
HTML_HINT: Final = "is there a proxy or login page in front of it?"
SOCKET_LB_LABEL: Final = "kbpf.io/socket-lb"
_STATUS: Final = msgspec.json.Decoder(wire.Status)


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind to watch, and what the server shall leave out, as kube-proxy's server.go."""

    kind: Kind
    name: str
    path: str
    labels: str = ""
    fields: str = ""
    instead: "Resource | None" = None
    """What is watched where the server has more than PAGE of these, or we may not list them."""

    def without_fields(self) -> "Resource":
        """For a server that does not know the field selector: decode.py leaves the same out."""
        return replace(self, fields="")

    def page(self, token: str) -> str:
        """A page of a LIST of the newest state, or the page that `token` continues."""
        return self._query(limit=str(PAGE), **{"continue": token})

    def newest(self) -> str:
        """A LIST of one object: what matters is the version at which the server is."""
        return self._query(limit="1")

    def stream(self, seconds: int) -> str:
        """A WATCH that begins with all objects of the newest state, then their end mark."""
        return self._query(
            sendInitialEvents="true",
            resourceVersionMatch="NotOlderThan",
            watch="1",
            allowWatchBookmarks="true",
            timeoutSeconds=str(seconds),
        )

    def watch(self, version: str, seconds: int) -> str:
        """A WATCH that goes on from `version`."""
        return self._query(
            resourceVersion=version,
            watch="1",
            allowWatchBookmarks="true",
            timeoutSeconds=str(seconds),
        )

    def _query(self, **options: str) -> str:
        options |= {"labelSelector": self.labels, "fieldSelector": self.fields}
        given = {name: value for name, value in options.items() if value}
        return f"{self.path}?{urllib.parse.urlencode(given)}"


SERVICES: Final = Resource(
    Kind.SERVICE,
    "services",
    "/api/v1/services",
    labels="!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless",
    fields="spec.clusterIP!=None",
)
SLICES: Final = Resource(
    Kind.SLICE,
    "endpointslices",
    "/apis/discovery.k8s.io/v1/endpointslices",
    labels="!service.kubernetes.io/headless",
)


def own_node(name: str) -> Resource:
    """Our own Node only."""
    return Resource(Kind.NODE, "nodes", "/api/v1/nodes", fields=f"metadata.name={name}")


def nodes(name: str, watched: str) -> Resource:
    """Our own Node, or all of them for their addresses, as the setting watch_nodes says."""
    own = own_node(name)
    if watched == "own":
        return own
    return replace(own, fields="", instead=own if watched == "auto" else None)


def exempt_pods(node: str) -> Resource:
    """The Pods of our node that ask to be left alone: none, in most clusters."""
    return Resource(
        Kind.POD,
        "pods",
        "/api/v1/pods",
        labels=f"{SOCKET_LB_LABEL}=off",
        fields=f"spec.nodeName={node}",
    )


class Refused(SourceError):
    """The API server answered with something other than 200. `message` is its own text."""

    status = 0
    retry_after = 0.0
    message = ""


def _role(resource: Resource) -> str:
    """Who has the right: kube-proxy's own role knows no Pods."""
    if resource.kind is Kind.POD:
        return "manifests/components/socket-lb-label"
    return "ClusterRole system:node-proxier"


def is_html(body: bytes | bytearray) -> bool:
    """Whether an answer is a web page: no JSON begins so."""
    return bytes(body[:HTML_BYTES]).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<")


def html_page() -> SourceError:
    """The error of an answer that is one."""
    return SourceError("answered with an HTML page", hint=HTML_HINT)


def refused(resource: Resource, status: int, reason: str, body: bytes, where: str) -> Refused:
    """The answer as an error that says what to do. `where`: where our credentials come from."""
    try:
        message = _STATUS.decode(body).message or ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        message = ""
    user = found[1] if (found := re.search(r'User "([^"]+)"', message)) else "this user"
    name = resource.name
    hints = {
        401: f"the credentials from {where} are not valid (any more)",
        403: f"grant list and watch on {name} to {user} ({_role(resource)})",
        404: f"{resource.path} is not known there: is it Kubernetes 1.21 or later?",
    }
    what, hint = f"{status} {reason}".rstrip(), hints.get(status, message[:200])
    if is_html(body):
        what, hint = f"{what}, with an HTML page", HTML_HINT
    error = Refused(what, hint=hint)
    error.status, error.message = status, message
    return error
