# SPDX-License-Identifier: Apache-2.0
"""The pod network: a CNI of tests/support/cni, with its plugins, and its daemon on each node."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.cluster.layout import Cluster, Failed, Machine, wait_for, write
from tests.conformance.cluster.machines import start_service
from tests.support.cni.networks import CNIS, Cni

DEFAULT = "ptp"


@dataclass(frozen=True, slots=True)
class _Node:
    """A machine, as a CNI sees it (tests.support.cni.networks.Node)."""

    name: str
    number: int
    netns: str
    ip: str
    ip6: str
    folder: Path


def cni(cluster: Cluster) -> Cni:
    return CNIS[cluster.state.cni]


def programs(name: str) -> tuple[str, ...]:
    """The plugins and the daemon of a CNI."""
    daemon = (CNIS[name].daemon,) if CNIS[name].daemon else ()
    return ("loopback", *CNIS[name].programs, *daemon)


def start(cluster: Cluster) -> None:
    """Writes the configuration of containerd's plugins, once each node's daemon is ready."""
    network = cni(cluster)
    nodes = {machine.name: _node(cluster, machine) for machine in cluster.nodes}
    others = {name: [o for o in nodes.values() if o.name != name] for name in nodes}
    daemons: dict[str, subprocess.Popen[bytes]] = {}

    def is_ready(node: _Node) -> bool:
        if node.name in daemons and daemons[node.name].poll() is not None:
            log = cluster.files(node.name, "log", f"{network.daemon}.log")
            last = log.read_text(errors="replace").splitlines()[-1:]
            raise Failed(f"{network.daemon} on {node.name} has ended: {last}")
        return network.is_ready(node, others[node.name])

    for machine in cluster.nodes:
        node = nodes[machine.name]
        network.prepare(node, others[node.name])
        if network.daemon:
            command = [
                str(cluster.programs / network.daemon),
                *network.command(node, cluster.kubeconfig("admin")),
            ]
            environment = network.environment(node)
            daemons[node.name] = start_service(cluster, machine, network.daemon, command, environment)
    for name, node in nodes.items():
        wait_for(
            f"{network.name} is ready on {name}",
            lambda node=node: is_ready(node),
        )
        path = cluster.files(name, "cni-conf", "10-conformance.conflist")
        write(path, network.conf(node))


def _node(cluster: Cluster, machine: Machine) -> _Node:
    return _Node(
        machine.name,
        machine.index,
        cluster.global_name(machine.name),
        *machine.addresses,
        cluster.files(machine.name),
    )
