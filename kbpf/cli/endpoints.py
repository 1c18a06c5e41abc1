# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect endpoints`: the endpoints of a Service, and why clients of this node reach them or
not. It asks the API server, and decides as the agent does.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kbpf.cli import render
from kbpf.cli.options import DEFAULT, Output, OutputOption, PinDir
from kbpf.errors import KbpfError
from kbpf.model.inspection import Part
from kbpf.views import endpoints as view

if TYPE_CHECKING:
    from kbpf.source.api.one_service import ServiceObjects

Name = Annotated[
    str, typer.Argument(metavar="NAMESPACE/NAME", help="The Service; without a namespace, default.")
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig", envvar="KBPF_KUBECONFIG",
        help="How to reach the API server; without it, as this Pod's service account.",
    ),
]  # fmt: skip
NodeName = Annotated[
    str,
    typer.Option(
        "--hostname-override", envvar="KBPF_HOSTNAME_OVERRIDE",
        help="The node from which clients connect; by default that of the agent, or this machine.",
    ),
]  # fmt: skip


def endpoints(
    name: Name, output: OutputOption = Output.TABLE, kubeconfig: Kubeconfig = None,
    node: NodeName = "", pin_dir: PinDir = DEFAULT.pin_dir,
) -> None:  # fmt: skip
    """List the endpoints of a Service: Pod, node, zone, state, and whether and why clients of this
    node reach it. Asks the API server; everything else that `inspect` shows is read from this node.
    """
    from kbpf.source.api import one_service
    from kbpf.source.api.credentials import Cluster
    from kbpf.source.api.kubeconfig import find_access

    namespace, _, bare = name.rpartition("/")
    cluster = Cluster(find_access(kubeconfig))
    objects = one_service.read(cluster, namespace or "default", bare, node or _own_name(pin_dir))
    page = view.build_page(list(build_rows(objects)), objects.errors)
    sys.stdout.writelines(render.render_page(page, output))
    for note in filter(None, (page.empty, *page.notes)):
        print(f"kbpf: {note}", file=sys.stderr)


def _own_name(pin_dir: Path) -> str:
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
    pods = {(slice_.name, index): pod for slice_ in slices for index, pod in enumerate(slice_.pods)}
    for port in service.ports:
        for family in sorted({slice_.family for slice_ in slices}):
            selection = select_endpoints(slices, port, service, objects.node, family)
            seen: dict[tuple[str, int], int] = {}
            for line in selection.explain():
                place = line.slice_name, line.port
                index = seen.get(place, 0)
                seen[place] = index + 1
                yield view.make_row(
                    port.name, line.port, line.endpoint, pods.get((line.slice_name, index), ""),
                    (line.cluster, line.local), str(line.reason), line.text, line.slice_name,
                )  # fmt: skip
