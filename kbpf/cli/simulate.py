# SPDX-License-Identifier: Apache-2.0
"""`kbpf diff` and `kbpf simulate`: what would change, decided by the agent's own policy. Both need
neither a kernel with BPF nor root.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final

import typer

from kbpf.cli import render
from kbpf.cli.endpoints import Kubeconfig
from kbpf.cli.options import Output, OutputOption
from kbpf.cli.origin import CLUSTER, RunConfigFile, read_config, read_world
from kbpf.errors import KbpfError, NotFoundError, describe_unexpected_error
from kbpf.model.config import Config
from kbpf.model.objects import ServiceName, Weights
from kbpf.policy.what_if import Distribution, Scenario, apply_scenario
from kbpf.policy.worlds import Difference, World, WorldChange, collect_world, list_nodes
from kbpf.views import differences as view

MAX_NODES: Final = 100
"""Without --node, this many Nodes are computed, in the order of their names."""

DIFFERENT: Final = 1
TROUBLE: Final = 2

WorldArgument = Annotated[
    str,
    typer.Argument(
        metavar="WORLD",
        help="A folder of YAML, or `cluster`: the API server of --kubeconfig or --config.",
    ),
]
Nodes = Annotated[
    list[str] | None,
    typer.Option(
        "--node", metavar="NAME",
        help=f"For this node; may be repeated. Default: all, at most {MAX_NODES}.",
    ),
]  # fmt: skip
ServiceFilter = Annotated[
    str,
    typer.Option(
        "--service", metavar="NAMESPACE/NAME",
        help="Only this Service; without a namespace, default.",
    ),
]  # fmt: skip
ZonesDown = Annotated[
    list[str] | None,
    typer.Option("--zone-down", metavar="ZONE", help="The Nodes and endpoints of a zone are gone."),
]
NodesDown = Annotated[
    list[str] | None,
    typer.Option("--node-down", metavar="NODE", help="A Node and its endpoints are gone."),
]
Drained = Annotated[
    list[str] | None,
    typer.Option("--drain", metavar="NODE", help="The endpoints of a node terminate, and serve."),
]
WeightRules = Annotated[
    list[str] | None,
    typer.Option(
        "--weight", metavar="NAME=N",
        help="A weight, as in the annotation kbpf.io/weights: of a Pod, an address, node:NODE, "
        "zone:ZONE or *.",
    ),
]  # fmt: skip
DistributionOption = Annotated[
    Distribution | None,
    typer.Option(
        "--traffic-distribution",
        help="Hints as the EndpointSlice controller sets them for spec.trafficDistribution.",
    ),
]
Everything = Annotated[
    bool, typer.Option("--all", help="Also show backends whose share does not change.")
]


def diff(
    before: WorldArgument, after: WorldArgument, nodes: Nodes = None, service: ServiceFilter = "",
    output: OutputOption = Output.TABLE, kubeconfig: Kubeconfig = None,
    config: RunConfigFile = None,
) -> None:  # fmt: skip
    """Show what changes for clients on each node from one state of a cluster to another: frontends,
    and the share of each backend. Exits with 0 if nothing does, 1 if something does, and 2 if that
    cannot be said.
    """
    try:
        settings = read_config(config, kubeconfig)
        notes: list[str] = []
        old = collect_world(read_world(before, settings, notes))
        new = collect_world(read_world(after, settings, notes))
        change = WorldChange(old, new, settings)
        names = _choose_nodes(nodes, new, old, settings, notes)
        rows = _compute_rows(change, names, _parse_service(service), False)
    except (KbpfError, OSError) as error:
        text = describe_unexpected_error(error) if isinstance(error, OSError) else str(error)
        print(f"kbpf: {text}", file=sys.stderr)
        raise typer.Exit(TROUBLE) from None
    render.show(view.build_page(rows, notes, ""), output)
    raise typer.Exit(DIFFERENT if rows else 0)


def simulate(
    world: WorldArgument = CLUSTER, zones_down: ZonesDown = None, nodes_down: NodesDown = None,
    drained: Drained = None, weights: WeightRules = None, distribution: DistributionOption = None,
    everything: Everything = False, nodes: Nodes = None, service: ServiceFilter = "",
    output: OutputOption = Output.TABLE, kubeconfig: Kubeconfig = None,
    config: RunConfigFile = None,
) -> None:  # fmt: skip
    """Show which share of connections each backend would get on each node, if a zone were gone, a
    node drained, or weights or traffic distribution were different. Without such an option: which
    share it gets. Other Pods stay where they are.
    """
    settings = read_config(config, kubeconfig)
    selected = _parse_service(service)
    rules, default_weight = _parse_weights(weights or [])
    scenario = Scenario(
        tuple(zones_down or ()), tuple(nodes_down or ()), tuple(drained or ()), rules,
        default_weight, distribution, selected,
    )  # fmt: skip
    notes: list[str] = []
    before = collect_world(read_world(world, settings, notes))
    outcome = apply_scenario(before, scenario)
    with_unchanged = everything or scenario[:-1] == Scenario()[:-1]
    change = WorldChange(before, outcome.world, settings, outcome.causes)
    names = _choose_nodes(nodes, outcome.world, before, settings, notes)
    rows = _compute_rows(change, names, selected, with_unchanged)
    render.show(view.build_page(rows, notes, "No differences found."), output)


def _parse_service(text: str) -> ServiceName | None:
    namespace, _, name = text.rpartition("/")
    return ServiceName(namespace or "default", name) if text else None


def _parse_weights(texts: Sequence[str]) -> tuple[Weights | None, int | None]:
    """The rules, and the weight of all others; None without."""
    from kbpf.source.decode.annotations import parse_weights

    if not texts:
        return None, None
    problems: list[str] = []
    rules = parse_weights(", ".join(texts), problems)
    if problems or rules is None:
        what = problems[0].partition(": ")[2] if problems else "no weight"
        raise typer.BadParameter(what, param_hint="--weight")
    has_default = any(part.strip().startswith("*") for text in texts for part in text.split(","))
    return rules, rules.default if has_default else None


def _choose_nodes(
    wanted: Sequence[str] | None, after: World, before: World, config: Config, notes: list[str]
) -> list[str]:
    """The names of the nodes to compute. Raises NotFoundError."""
    from kbpf.source.api.credentials import default_node_name

    names, gone = list(list_nodes(after)), list_nodes(before).keys() - list_nodes(after).keys()
    if gone and not names:
        raise NotFoundError(
            "no Node would be left", "", f"all would be gone: {_join(sorted(gone))}"
        )
    if wanted:
        for name in wanted:
            if names and name not in names:
                where = "is gone" if name in gone else "does not exist"
                raise NotFoundError(f"the Node {name} {where}", "", f"there are {_join(names)}")
        return list(wanted)
    if not names:
        name = config.node_name or default_node_name()
        notes.append(f"there are no Nodes: computed for {name}, in no zone")
        return [name]
    if gone:
        notes.append(f"not computed, since they are gone: {_join(sorted(gone))}")
    if len(names) > MAX_NODES:
        notes.append(f"computed for {MAX_NODES} of {len(names)} Nodes; choose others with --node")
    return names[:MAX_NODES]


def _join(names: Sequence[str]) -> str:
    shown = ", ".join(names[: view.MAX_NODES_SHOWN])
    more = len(names) - view.MAX_NODES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _compute_rows(
    change: WorldChange, nodes: Sequence[str], service: ServiceName | None, with_unchanged: bool
) -> list[view.DifferenceRow]:
    """A row for each difference, with all nodes that have it."""
    nodes_by_difference: dict[Difference, list[str]] = {}
    for node in nodes:
        for difference in change.compute(node, with_unchanged):
            if service is None or (difference.port and difference.port.service == service):
                nodes_by_difference.setdefault(difference, []).append(node)
    return list(_make_rows(nodes_by_difference, len(nodes)))


def _make_rows(
    nodes_by_difference: Mapping[Difference, Sequence[str]], node_count: int
) -> Iterable[view.DifferenceRow]:
    # The sort is stable: differences of one port stay in the order in which they were found.
    ordered = sorted(nodes_by_difference.items(), key=lambda item: item[0].port or ())
    for difference, nodes in ordered:
        yield view.make_row(
            difference.port,
            (str(difference.subject), difference.name, difference.set),
            (difference.before, difference.after),
            (difference.share_before, difference.share_after),
            (difference.pod, difference.node, difference.zone),
            difference.reason,
            (tuple(nodes), len(nodes) == node_count),
        )
