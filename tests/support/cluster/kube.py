# SPDX-License-Identifier: Apache-2.0
"""A small client of the Kubernetes API for tests.

It uses http.client and plain dicts, nothing of kbpf and no Kubernetes library, so that kbpf reads
objects written by independent code. Each Kube keeps one connection open and belongs to one thread;
`create_many` opens more connections.
"""

import http.client
import json
import select
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import quote, urlsplit

from tests.support.lab import sockets
from tests.support.lab.lab import PATIENCE
from tests.support.table import table

Object = dict[str, Any]
Row = TypeVar("Row")


class _Kind(NamedTuple):
    name: str
    group: str
    resource: str
    is_namespaced: bool


_KINDS = {
    kind.name: kind
    for kind in table(
        _Kind,
        """
Namespace          | /api/v1                            | namespaces          | no
Node               | /api/v1                            | nodes               | no
Secret             | /api/v1                            | secrets             | yes
ClusterRole        | /apis/rbac.authorization.k8s.io/v1 | clusterroles        | no
ClusterRoleBinding | /apis/rbac.authorization.k8s.io/v1 | clusterrolebindings | no
Service            | /api/v1                            | services            | yes
Pod                | /api/v1                            | pods                | yes
ServiceAccount     | /api/v1                            | serviceaccounts     | yes
ConfigMap          | /api/v1                            | configmaps          | yes
DaemonSet          | /apis/apps/v1                      | daemonsets          | yes
ControllerRevision | /apis/apps/v1                      | controllerrevisions | yes
EndpointSlice      | /apis/discovery.k8s.io/v1          | endpointslices      | yes
Event              | /apis/events.k8s.io/v1             | events              | yes
NetworkPolicy      | /apis/networking.k8s.io/v1         | networkpolicies     | yes
ServiceCIDR        | /apis/networking.k8s.io/v1         | servicecidrs        | no
""",
    )
}


class KubeError(Exception):
    """The server returned an error: its status code, reason and message."""

    def __init__(self, status: int, what: str, body: bytes) -> None:
        try:
            said: Object = json.loads(body)
        except ValueError:
            said = {"message": body[:300].decode(errors="replace")}
        self.status = status
        self.reason = str(said.get("reason", ""))
        super().__init__(f"{what}: {status} {self.reason}: {said.get('message', '')}")


@dataclass(frozen=True, slots=True)
class Target:
    """The address of an API server, the network namespace to dial it from, and the CA to verify
    it.
    """

    host: str
    port: int
    ca: Path
    netns: str | None = None


class Connection(http.client.HTTPSConnection):
    """A connection from the target's namespace, verified with the target's CA."""

    def __init__(self, target: Target, timeout: float | None) -> None:
        context = ssl.create_default_context(cafile=str(target.ca))
        super().__init__(target.host, target.port, timeout=timeout, context=context)
        self._target, self._verify = target, context

    def connect(self) -> None:
        target = self._target
        raw = sockets.connect(target.netns, target.host, target.port, self.timeout)
        self.sock = self._verify.wrap_socket(raw, server_hostname=target.host)


class Kube:
    """A user's client of one API server, at a URL such as https://127.0.0.1:6443."""

    def __init__(
        self,
        url: str,
        token: str,
        ca: Path,
        *,
        netns: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" or parts.hostname is None or parts.port is None:
            raise ValueError(f"not https://HOST:PORT: {url}")
        self.target = Target(parts.hostname, parts.port, ca, netns)
        self._url = url
        self._token = token
        self._kept: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def create(self, obj: Object) -> Object:
        """POST; the namespace `default` if the object names none."""
        return self._send("POST", _path_of(obj, named=False), obj)

    def create_many(self, objects: Iterable[Object], workers: int = 4) -> None:
        """POST all objects over a few connections in parallel, in no particular order."""
        self._spread(lambda kube, obj: kube.create(obj), list(objects), workers)

    def replace(self, obj: Object) -> Object:
        """PUT; without metadata.resourceVersion it replaces any stored version."""
        return self._send("PUT", _path_of(obj), obj)

    def patch(self, kind: str, name: str, change: Object, namespace: str = "default", sub: str = "") -> Object:
        """PATCH by JSON merge: null deletes a field, a list replaces a list."""
        path = path_of(kind, namespace, name) + (f"/{sub}" if sub else "")
        return self._send("PATCH", path, change, "application/merge-patch+json")

    def delete(self, kind: str, name: str, namespace: str = "default") -> None:
        """DELETE; an object that does not exist is an error (404)."""
        self._send("DELETE", path_of(kind, namespace, name))

    def get(self, kind: str, name: str, namespace: str = "default") -> Object:
        return self._send("GET", path_of(kind, namespace, name))

    def token(self, account: str, namespace: str, **spec: Object) -> str:
        """Return a new token of a ServiceAccount, requested as a kubelet does."""
        wanted = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = path_of("ServiceAccount", namespace, account)
        answer = self._send("POST", f"{path}/token", wanted)
        return str(answer["status"]["token"])

    def list(self, kind: str, namespace: str | None = None) -> Object:
        """GET a list as the server returns it, by default of all namespaces."""
        return self._send("GET", path_of(kind, namespace))

    def clear(self) -> None:
        """Delete all Services (except default/kubernetes), EndpointSlices and Nodes."""
        rows: list[tuple[str, str, str]] = []
        for kind in ("Service", "EndpointSlice", "Node"):
            for obj in self.list(kind)["items"]:
                meta = obj["metadata"]
                space = meta.get("namespace", "default")
                owner = meta.get("labels", {}).get("kubernetes.io/service-name", meta["name"])
                if (space, owner) != ("default", "kubernetes"):
                    rows.append((kind, meta["name"], space))
        self._spread(lambda kube, row: kube.delete(*row), rows, 4)

    def not_ready(self) -> str | None:
        """Return why the server can't be used yet, or None.

        /readyz succeeds before the `default` namespace exists, and before the ServiceCIDR that the
        allocator of cluster IPs needs: creating a Service fails until then.
        """
        try:
            status, body = self.request("GET", "/readyz")
            if status != 200:
                return body.decode(errors="replace")
            self.get("Namespace", "default")
            self.get("Service", "kubernetes")
            cidr = self.get("ServiceCIDR", "kubernetes")
        except (OSError, http.client.HTTPException, KubeError) as error:
            return str(error)
        conditions = cidr.get("status", {}).get("conditions", ())
        ready = any(row["type"] == "Ready" and row["status"] == "True" for row in conditions)
        return None if ready else "the ServiceCIDR is not ready"

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Return status and body of one request over the kept connection.

        The server closes one that has been idle for 90 s, perhaps when the request is on its way:
        without an answer it is sent again over another.
        """
        before = self._kept
        connection = self._connection()
        try:
            connection.request(method, path, body, self._headers() | dict(headers or {}))
            response = connection.getresponse()
            return response.status, response.read()
        except ConnectionError:
            self.close()
            if connection is not before:
                raise
        except BaseException:
            self.close()
            raise
        return self.request(method, path, body, headers)

    def _send(self, method: str, path: str, body: Object | None = None, kind: str = "application/json") -> Object:
        data = None if body is None else json.dumps(body).encode()
        status, answer = self.request(method, path, data, {"Content-Type": kind})
        if not 200 <= status < 300:
            raise KubeError(status, f"{method} {path}", answer)
        result: Object = json.loads(answer)
        return result

    def _spread(self, do: Callable[["Kube", Row], object], rows: Sequence[Row], workers: int) -> None:
        """Do all rows over several connections at once; raise the first error."""

        def work(part: Sequence[Row]) -> None:
            with Kube(self._url, self._token, self.target.ca, netns=self.target.netns) as kube:
                for row in part:
                    do(kube, row)

        with ThreadPoolExecutor(workers, thread_name_prefix="kube") as pool:
            list(pool.map(work, [rows[n::workers] for n in range(workers)]))

    def _connection(self) -> Connection:
        """Return the kept connection, or a new one if the server has closed it meanwhile."""
        if self._kept is not None and self._kept.sock is not None:
            if not select.select([self._kept.sock], [], [], 0)[0]:
                return self._kept
            self.close()  # readable between two requests: the server has closed it
        self._kept = Connection(self.target, PATIENCE)
        return self._kept

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}


def path_of(kind: str, namespace: str | None = None, name: str | None = None) -> str:
    """Return the URL path of a kind's list (in all namespaces for None) or of one object."""
    _, group, resource, namespaced = _KINDS[kind]
    space = f"/namespaces/{quote(namespace)}" if namespaced and namespace else ""
    return f"{group}{space}/{resource}" + (f"/{quote(name)}" if name else "")


def _path_of(obj: Object, named: bool = True) -> str:
    meta = obj["metadata"]
    return path_of(obj["kind"], meta.get("namespace", "default"), meta["name"] if named else None)
