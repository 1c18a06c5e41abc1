# SPDX-License-Identifier: Apache-2.0
"""Reads the objects of one Service from the API server, once: the Service, its EndpointSlices and
this node's Node.
"""

import contextlib
from dataclasses import replace
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from kbpf.errors import NotFoundError, SourceError
from kbpf.model.objects import EndpointSlice, Node, Service
from kbpf.source.api.credentials import MAX_PAGES_BYTES, Cluster
from kbpf.source.api.resource import PAGE_TIMEOUT_S, SERVICES, SLICES, Resource, list_once, own_node_resource
from kbpf.source.api.transport import ApiConnection
from kbpf.source.decode import decode, wire

T = TypeVar("T")


class ServiceObjects(NamedTuple):
    """`node` has only a name if the API server has no such Node. `errors`: a line for each object
    that cannot be read, which is left out.
    """

    service: Service
    slices: tuple[EndpointSlice, ...]
    node: Node
    errors: tuple[str, ...]


def read(cluster: Cluster, namespace: str, name: str, node_name: str) -> ServiceObjects:
    """Raises SourceError if the server cannot be asked, and NotFoundError if it has no such
    Service, or kbpf does not serve it (headless, ExternalName, or for another proxy).
    """
    errors: list[str] = []
    with contextlib.closing(ApiConnection(cluster, response_timeout=PAGE_TIMEOUT_S)) as connection:

        def objects(resource: Resource, kind: type[T]) -> list[T]:
            found: list[T] = []

            def handle(raw: msgspec.Raw) -> None:
                item = decode.decode_object(resource.kind, raw)
                if item.error:
                    errors.append(f"{item.key}: {item.error}")
                elif isinstance(item.object, kind):
                    found.append(item.object)

            list_once(connection, cluster, resource, handle)
            return found

        folder = f"/namespaces/{quote(namespace, safe='')}/"
        path = SERVICES.path.replace("/services", f"{folder}services")
        services = objects(replace(SERVICES, path=path, field_selector=f"metadata.name={name}"), Service)
        if not services:
            raise NotFoundError(
                f"no Service {namespace}/{name}, or one that kbpf does not serve",
                cluster.url,
                "headless and ExternalName Services, and those for another proxy, are not served",
            )
        path = SLICES.path.replace("/endpointslices", f"{folder}endpointslices")
        selector = f"kubernetes.io/service-name={name}"
        slices = objects(replace(SLICES, path=path, label_selector=selector), EndpointSlice)
        nodes = objects(own_node_resource(node_name), Node)
    return ServiceObjects(services[0], tuple(slices), (*nodes, Node(node_name))[0], tuple(errors))


def find_node_of_pod(cluster: Cluster, namespace: str, name: str) -> str:
    """The node of a Pod; "" if there is no such Pod, or it is on none. Raises SourceError."""
    path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"
    with contextlib.closing(ApiConnection(cluster, response_timeout=PAGE_TIMEOUT_S)) as connection:
        response = connection.request(path)
        body = response.read(MAX_PAGES_BYTES, PAGE_TIMEOUT_S, "a Pod")
    if response.status != 200:
        return ""
    try:
        spec = msgspec.json.decode(body, type=wire.Pod).spec
        return (spec and spec.node_name) or ""
    except msgspec.MsgspecError as error:
        raise SourceError("the response is not a Pod", cluster.url) from error
