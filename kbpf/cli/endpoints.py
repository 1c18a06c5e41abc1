# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect endpoints`: the endpoints of a Service, and why clients of this node reach them or
not. It asks the API server, and decides as the agent does.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kbpf.cli import options, render
from kbpf.cli.options import DEFAULT, Output, OutputOption, PinDir, Watch
from kbpf.errors import KbpfError
from kbpf.model.address import format_addr
from kbpf.model.inspection import Part, describe_conditions
from kbpf.views import endpoints as view
from kbpf.views.page import Page

if TYPE_CHECKING:
    from kbpf.source.api.one_service import ServiceObjects

Name = Annotated[str, typer.Argument(metavar="NAMESPACE/NAME", help="The Service; without a namespace, default.")]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig",
        envvar="KBPF_KUBECONFIG",
        help="How to reach the API server; without it, as this Pod's service account.",
    ),
]
NodeName = Annotated[
    str,
    typer.Option(
        "--hostname-override",
        metavar="NAME",
        envvar="KBPF_HOSTNAME_OVERRIDE",
        help="The node that this is about; by default that of the agent, or this machine.",
    ),
]


def endpoints(
    name: Name,
    namespace: options.Namespace = "",
    no_headers: options.NoHeaders = False,
    sort_by: options.SortBy = "",
    limit: options.Limit = 0,
    output: OutputOption = Output.TABLE,
    repeat: Watch = False,
    kubeconfig: Kubeconfig = None,
    node: NodeName = "",
    pin_dir: PinDir = DEFAULT.pin_dir,
) -> None:
    """List the endpoints of a Service: Pod, node, zone, state, and whether and why clients of this
    node reach it. Asks the API server; everything else that `inspect` shows is read from this node.
    """
    from kbpf.source.api import one_service
    from kbpf.source.api.credentials import Cluster
    from kbpf.source.api.kubeconfig import find_access

    service = options.split_name(name, namespace)
    cluster = Cluster(find_access(kubeconfig))
    node = node or own_node_name(pin_dir)
    selection = options.Selection("", sort_by, limit)

    def read() -> Page:
        objects = one_service.read(cluster, service[0] or "default", service[1], node)
        return selection.apply(view.build_page(list(build_rows(objects)), objects.errors))

    render.show_or_watch(read, output, repeat, not no_headers)


def own_node_name(pin_dir: Path) -> str:
    """The name under which the agent knows this node."""
    from kbpf.dataplane.bpf.inspect import snapshot
    from kbpf.source.api.credentials import default_node_name

    try:
        status = snapshot.read(pin_dir, Part.STATUS).status
    except KbpfError:
        status = None
    return status.node if status is not None and status.node else default_node_name()


def build_rows(objects: "ServiceObjects") -> Iterator[view.EndpointRow]:
    """A row for each endpoint of each slice, by Service port and family."""
    from kbpf.policy.endpoints import select_endpoints

    service, slices = objects.service, objects.slices
    for port in service.ports:
        for family in sorted({slice_.family for slice_ in slices}):
            selection = select_endpoints(slices, port, service, objects.node, family)
            for line in selection.explain():
                end = line.endpoint
                yield view.EndpointRow(
                    port.name,
                    format_addr(end.address),
                    line.port,
                    line.pod,
                    end.node,
                    end.zone,
                    describe_conditions(end.ready, end.serving, end.terminating),
                    line.cluster,
                    line.local,
                    str(line.reason),
                    line.text,
                    line.slice_name,
                )
