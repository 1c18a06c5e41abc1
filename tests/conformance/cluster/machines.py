# SPDX-License-Identifier: Apache-2.0
"""Simulated machines: a first process with its own network, mount, PID, UTS and IPC namespaces and
a cgroup in every hierarchy. Killing that process ends everything in it.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from kbpf.kernel.system import cgroups
from tests.conformance.cluster.layout import (
    FILES,
    GATEWAY_HOST,
    NODE_NETWORKS,
    PREFIX,
    Cluster,
    Failed,
    Machine,
    Process,
    process,
    write,
)

CGROUPS = Path("/sys/fs/cgroup")
FOLDERS = ("log/pods", "log/containers", "kubelet", "containerd", "cni-conf", "proxy")
START_SECONDS, REMOVE_SECONDS = 180, 180


def cgroup_roots() -> list[Path]:
    """The roots of the cgroup hierarchies: one (v2), or those of v1 and v2 (hybrid)."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [path for path in sorted(CGROUPS.iterdir()) if path.is_dir() and not path.is_symlink()]


def cgroup2(cluster: Cluster, machine: str) -> Path:
    """The machine's folder in the v2 hierarchy: everything that runs on the machine is below it."""
    roots = [root for root in cgroup_roots() if (root / "cgroup.controllers").exists()]
    return roots[0] / cluster.global_name(machine)


def make_cgroup(name: str) -> None:
    """Makes the machine's cgroup, and a child for its own processes."""
    for root in cgroup_roots():
        for folder in (root / name, root / name / "system"):
            folder.mkdir(exist_ok=True)
            if root.name == "cpuset":  # of v1: empty at first, and then no process can join
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (folder / file).write_text((folder.parent / file).read_text())


def remove_cgroups(cluster_name: str) -> None:
    """Kills all processes of a cluster, and removes its cgroups."""
    folders = [path for root in cgroup_roots() for path in root.glob(f"{PREFIX}{cluster_name}-*")]
    deadline = time.monotonic() + REMOVE_SECONDS
    while left := [folder for folder in folders if folder.exists()]:
        if time.monotonic() > deadline:
            raise Failed(f"processes do not exit: cannot remove {', '.join(map(str, left))}")
        for folder in left:
            # Again and again: a process that was being started may join only now.
            if (folder / "cgroup.controllers").exists():
                cgroups.kill(folder)
            for path, _, _ in os.walk(folder, topdown=False):
                with contextlib.suppress(OSError):  # the processes may still be exiting
                    os.rmdir(path)
        time.sleep(0.05)


def start_machine(cluster: Cluster, machine: Machine) -> None:
    """Starts the machine's first process, files/node-init, which prepares its file system."""
    folder = cluster.files(machine.name)
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    write(folder / "hosts", _hosts(cluster))
    write(folder / "resolv.conf", f"nameserver {NODE_NETWORKS[0][GATEWAY_HOST]}\n")
    name = cluster.global_name(machine.name)
    make_cgroup(name)
    command = [
        *(str(FILES / "cgroup-exec"), f"/{name}/system"),
        *("nsenter", f"--net={cluster.netns(machine.name)}"),
        *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=SIGKILL"),
        *("--mount-proc", str(FILES / "node-init"), machine.name, str(folder)),
        str(cgroup2(cluster, machine.name)),
    ]
    (folder / "ready").unlink(missing_ok=True)  # of an earlier boot
    outer = spawn(command, folder / "log" / "start.log")
    deadline = time.monotonic() + START_SECONDS
    while not (folder / "ready").exists():
        if outer.poll() is not None or time.monotonic() > deadline:
            log = "".join(path.read_text() for path in (folder / "log").glob("*.log"))
            raise Failed(f"machine {machine.name} did not start:\n{log}")
        time.sleep(0.05)
    machine.init = children(outer.pid)[0]
    cluster.save()


def _hosts(cluster: Cluster) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    for machine in cluster.machines.values():
        if machine.kind != "client":
            lines += [f"{address} {machine.name}" for address in machine.addresses]
    return "\n".join(lines) + "\n"


def inside(cluster: Cluster, machine: Machine) -> list[str]:
    """The beginning of a command line that runs a command on a machine."""
    if machine.init is None or not machine.init.is_alive:
        raise Failed(f"machine {machine.name} is not running")
    return [
        *(str(FILES / "cgroup-exec"), f"/{cluster.global_name(machine.name)}/system"),
        *("nsenter", "-t", str(machine.init.pid), "-n", "-m", "-u", "-i", "-p", "--wd=/"),
    ]


def start_service(
    cluster: Cluster,
    machine: Machine,
    service: str,
    command: Sequence[str],
    env: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a process on a machine; its log is below log/."""
    log = cluster.files(machine.name, "log", f"{service}.log")
    started = spawn([*inside(cluster, machine), *command], log, env)
    machine.services[service] = process(started.pid)
    cluster.save()
    return started


def spawn(
    command: Sequence[str],
    log: Path,
    env: dict[str, str] | None = None,
    folder: Path = Path("/"),
) -> subprocess.Popen[bytes]:
    """Starts a process that outlives this one."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
            env={**os.environ, **(env or {})},
        )


def stop_service(cluster: Cluster, machine: Machine, service: str, seconds: float = 30) -> None:
    """Sends SIGTERM, and SIGKILL after `seconds`. nsenter's child is the service."""
    parent = machine.services.pop(service, None)
    cluster.save()
    if parent is None:
        return
    processes = [*children(parent.pid), parent] if parent.is_alive else []
    for each in processes:
        kill(each, signal.SIGTERM)
    if not wait_until_gone(processes, seconds):
        for each in processes:
            kill(each, signal.SIGKILL)
        wait_until_gone(processes, seconds)


def children(pid: int) -> list[Process]:
    """All descendants of a process."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, path.read_text().split()):
                found += [process(child), *children(child)]
    return found


def kill(victim: Process | None, how: signal.Signals) -> None:
    if victim is not None and victim.is_alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, how)


def wait_until_gone(processes: Sequence[Process], seconds: float) -> bool:
    """Whether all of them have ended. Ours are reaped, others become children of init."""
    deadline = time.monotonic() + seconds
    while True:
        for each in processes:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(each.pid, os.WNOHANG)
        if not any(each.is_alive for each in processes):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
