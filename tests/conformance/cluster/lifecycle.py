# SPDX-License-Identifier: Apache-2.0
"""Creates a cluster and removes it, with everything that it left on the machine."""

import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.conformance import versions
from tests.conformance.cluster import (
    cnis,
    control_plane,
    images,
    machines,
    network,
    nodes,
    proxies,
)
from tests.conformance.cluster.layout import (
    CLIENT,
    CLIENT_HOST,
    CLUSTERS,
    CONTROL_PLANE,
    CONTROL_PLANE_HOST,
    FILES,
    FIRST_NODE_HOST,
    Cluster,
    Failed,
    Machine,
    State,
    folder_of,
    wait_for,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def say(line: str) -> None:
    print(line, flush=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt, so that what was created is removed."""

    def interrupt(*_: object) -> None:
        for each in SIGNALS:  # the removal itself is not interrupted
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def cluster(
    version: str,
    node_count: int,
    proxy: str,
    *,
    cni: str = cnis.DEFAULT,
    ipv4_nodes: bool = False,
    logs: Path,
) -> Iterator[Cluster]:
    """A cluster that exists during the block, however it ends."""
    remove_abandoned()
    name = str(os.getpid())
    try:
        yield up(name, version, node_count, proxy, cni=cni, ipv4_nodes=ipv4_nodes)
    finally:
        if folder_of(name).exists():  # not if the build failed
            down(name, logs)


def up(
    name: str,
    version: str,
    node_count: int,
    proxy: str,
    *,
    cni: str = cnis.DEFAULT,
    ipv4_nodes: bool = False,
) -> Cluster:
    """Builds what is missing, and returns a cluster that serves its DNS."""
    if (folder_of(name) / "state.json").exists():
        raise Failed(f"cluster {name} exists already: remove it with down")
    built = versions.programs(versions.VERSIONS[version], cnis.programs(cni))
    archives = images.archives(built, versions.VERSIONS[version])
    created = Cluster(name, State(version, ipv4_nodes, _machines(node_count), cni=cni))
    created.programs.mkdir(parents=True)
    created.save()
    for program, path in built.items():
        (created.programs / program).symlink_to(path)
    started = time.monotonic()
    _start(created, archives, proxy)
    say(f"{node_count} nodes of Kubernetes {version} serve after {_since(started)} s")
    return created


def _machines(node_count: int) -> dict[str, Machine]:
    listed = [
        Machine(CONTROL_PLANE, "control-plane", CONTROL_PLANE_HOST),
        Machine(CLIENT, "client", CLIENT_HOST),
        *(Machine(f"node{index}", "node", FIRST_NODE_HOST + index, index) for index in range(1, node_count + 1)),
    ]
    return {machine.name: machine for machine in listed}


def _start(created: Cluster, archives: Sequence[Path], proxy: str) -> None:
    network.make_fabric(created)
    for machine in created.machines.values():
        network.connect(created, machine)
    control_plane.make_pki(created)
    control_plane.make_users(created)
    for machine in created.machines.values():
        if machine.kind != "client":
            machines.start_machine(created, machine)
    for node in created.nodes:
        nodes.start_containerd(created, node)
    control_plane.start(created)
    created.apply(*(nodes.node_object(created, node) for node in created.nodes))
    cnis.start(created)
    for node in created.nodes:
        nodes.import_images(created, node, archives)
    for node in created.nodes:
        nodes.start_kubelet(created, node)
    if proxy:
        proxies.start(created, proxy)
    wait_for("all nodes are ready", lambda: nodes.ready_nodes(created) == len(created.nodes), step=1)
    control_plane.start_load_balancer(created)
    created.kubectl("apply", "-f", str(FILES / "coredns.yaml"))
    if proxy:
        proxies.wait_until_serving(created)


def _since(started: float) -> int:
    return round(time.monotonic() - started)


def down(name: str, logs: Path) -> None:
    """Removes everything of a cluster, complete or not. The services' logs are moved to `logs`."""
    machines.remove_cgroups(name)
    network.remove_all(name)
    for machine in sorted((folder_of(name) / "m").glob("*/log")):
        target = logs / machine.parent.name
        shutil.rmtree(target, ignore_errors=True)
        ignored = shutil.ignore_patterns("pods", "containers")
        shutil.copytree(machine, target, symlinks=True, ignore=ignored)
    shutil.rmtree(folder_of(name))
    say(f"cluster {name} removed; its logs are in {logs}")


def remove_abandoned() -> None:
    """Removes the clusters of runs that were killed: a run's cluster has its process id as name."""
    CLUSTERS.mkdir(parents=True, exist_ok=True)
    with (CLUSTERS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may do the same now
        for folder in CLUSTERS.glob("[0-9]*"):
            if not Path(f"/proc/{folder.name}").exists():
                say(f"removing cluster {folder.name}, whose run was killed")
                down(folder.name, CLUSTERS / "abandoned")
