# SPDX-License-Identifier: Apache-2.0
"""`kbpf diff` and `kbpf simulate`: what would change, decided by the agent's own policy. Both need
neither a kernel with BPF nor root.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Final

import msgspec
import typer

from kbpf.cli import render
from kbpf.cli.differences import EMPTY, Found, World, WorldChange, collect_world, list_nodes
from kbpf.cli.endpoints import Kubeconfig
from kbpf.cli.options import Output, OutputOption
from kbpf.cli.origin import CLUSTER, RunConfigFile, read_config, read_world
from kbpf.errors import KbpfError, NotFoundError, closest_name, describe_unexpected_error
from kbpf.model.config import Config
from kbpf.model.objects import Service, ServiceName
from kbpf.views import differences as view
from kbpf.views.page import NO_RESOURCES

MAX_NODES: Final = 100
"""Without --node, this many Nodes are computed, in the order of their names."""

DIFFERENT: Final = 1
TROUBLE: Final = 2

WorldArgument = Annotated[
    str,
    typer.Argument(metavar="WORLD", help="A folder of YAML, or `cluster`: the API server of --kubeconfig or --config."),
]
Nodes = Annotated[
    list[str] | None,
    typer.Option("--node", metavar="NAME", help=f"For this node; may be repeated. Default: all, at most {MAX_NODES}."),
]
ServiceFilter = Annotated[
    str, typer.Option("--service", metavar="NAMESPACE/NAME", help="Only this Service; without a namespace, default.")
]


def diff(
    before: WorldArgument,
    after: WorldArgument,
    nodes: Nodes = None,
    service: ServiceFilter = "",
    output: OutputOption = Output.TABLE,
    kubeconfig: Kubeconfig = None,
    config: RunConfigFile = None,
) -> None:
    """Show what changes for clients on each node from one state of a cluster to another: frontends,
    and the share of each backend. Exits with 0 if nothing does, 1 if something does, and 2 if that
    cannot be said.
    """
    try:
        settings = read_config(config, kubeconfig)
        notes: list[str] = []
        old = collect_world(read_world(before, settings, notes))
        new = collect_world(read_world(after, settings, notes))
        rows = _compare(old, new, settings, nodes, service, notes)
    except (KbpfError, OSError) as error:
        text = describe_unexpected_error(error) if isinstance(error, OSError) else str(error)
        print(f"kbpf: {text}", file=sys.stderr)
        raise typer.Exit(TROUBLE) from None
    render.show(view.build_page(rows, notes), output)
    raise typer.Exit(DIFFERENT if rows else 0)


def simulate(
    world: WorldArgument = CLUSTER,
    nodes: Nodes = None,
    service: ServiceFilter = "",
    output: OutputOption = Output.TABLE,
    kubeconfig: Kubeconfig = None,
    config: RunConfigFile = None,
) -> None:
    """Show which share of connections each backend would get on each node, and which sets of
    backends are empty.
    """
    settings = read_config(config, kubeconfig)
    notes: list[str] = []
    objects = collect_world(read_world(world, settings, notes))
    rows = _compare({}, objects, settings, nodes, service, notes)
    chosen = [row for row in rows if row.what == "backend" or (row.after or "").startswith(EMPTY)]
    page = view.build_page(chosen, notes, view.SHARE_COLUMNS)
    render.show(replace(page, empty="" if chosen else NO_RESOURCES), output)


def _compare(
    before: World, after: World, config: Config, nodes: Sequence[str] | None, service: str, notes: list[str]
) -> list[view.DifferenceRow]:
    """A row for each difference, with all nodes that have it. Raises NotFoundError."""
    selected = _find_service(service, {**before, **after})
    names = _choose_nodes(nodes, after, before, config, notes)
    change = WorldChange(before, after, config)
    nodes_by_difference: dict[Found, list[str]] = {}
    for node in names:
        for found in change.compute(node):
            port, _ = found
            if selected is None or (port and port.service == selected):
                nodes_by_difference.setdefault(found, []).append(node)
    # The sort is stable: differences of one port stay in the order in which they were found.
    ordered = sorted(nodes_by_difference.items(), key=lambda item: item[0][0] or ())
    return [
        msgspec.structs.replace(row, nodes=tuple(where), all_nodes=len(where) == len(names))
        for (_, row), where in ordered
    ]


def _find_service(text: str, world: World) -> ServiceName | None:
    """Raises NotFoundError."""
    if not text:
        return None
    namespace, _, name = text.rpartition("/")
    service = ServiceName(namespace or "default", name)
    known = [obj.key for obj in world.values() if isinstance(obj, Service)]
    if service not in known:
        nearest = closest_name(str(service), map(str, known))
        hint = f"is {nearest} meant?" if nearest else ""
        raise NotFoundError(f"no Service {service}", "", hint)
    return service


def _choose_nodes(
    wanted: Sequence[str] | None, after: World, before: World, config: Config, notes: list[str]
) -> list[str]:
    """The names of the nodes to compute. Raises NotFoundError."""
    from kbpf.source.api.credentials import default_node_name

    names, gone = list(list_nodes(after)), list_nodes(before).keys() - list_nodes(after).keys()
    if gone and not names:
        raise NotFoundError("no Node would be left", "", f"all would be gone: {view.join_nodes(sorted(gone))}")
    if wanted:
        for name in wanted:
            if names and name not in names:
                where = "is gone" if name in gone else "does not exist"
                raise NotFoundError(f"the Node {name} {where}", "", f"there are {view.join_nodes(names)}")
        return list(wanted)
    if not names:
        name = config.node_name or default_node_name()
        notes.append(f"there are no Nodes: computed for {name}, in no zone")
        return [name]
    if gone:
        notes.append(f"not computed, since they are gone: {view.join_nodes(sorted(gone))}")
    if len(names) > MAX_NODES:
        notes.append(f"computed for {MAX_NODES} of {len(names)} Nodes; choose others with --node")
    return names[:MAX_NODES]
