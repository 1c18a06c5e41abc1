# SPDX-License-Identifier: Apache-2.0
"""What `kbpf sysdump` collects: a row for each file of the archive. Nearly all are commands."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.cli import inspect
from kbpf.cli.dump import collect
from kbpf.cli.dump.collect import Collected, Collector, Limit
from kbpf.kernel.system import pods
from kbpf.kernel.system.children import python_command
from kbpf.model.config import Config
from kbpf.source.api.kubeconfig import SERVICE_ACCOUNT

PROC: Final = Path("/proc")
LOG_NAMES: Final = ("kbpf", "kube-proxy")
"""Beginnings of the names of Pods of the agent, whatever their DaemonSet is called."""
SYSTEM_NAMESPACE: Final = "kube-system"
MAX_LOGS: Final = 8
MAX_ROWS: Final = 20_000
NETWORK_MODULE: Final = "kbpf.kernel.net.dump"
RULES_MODULE: Final = "kbpf.kernel.netfilter.dump"
OBJECTS_MODULE: Final = "kbpf.cli.dump.objects"
FETCH_MODULE: Final = "kbpf.cli.dump.fetch"

PART_SHARE: Final = 0.25
OBJECTS_SHARE: Final = 0.75
"""How much of --time-limit a part may take."""
MAX_PART_BYTES: Final = 16 << 20

COMMANDS: Final = {
    "network/sockets.txt": "ss -s",
    "bpftool/prog.txt": "bpftool prog show",
    "bpftool/map.txt": "bpftool map show",
    "bpftool/link.txt": "bpftool link show",
    "bpftool/net.txt": "bpftool net show",
    "bpftool/cgroup.txt": "bpftool cgroup tree",
    "network/proc/snmp.txt": "cat /proc/net/snmp",
    "network/proc/snmp6.txt": "cat /proc/net/snmp6",
    "network/proc/netstat.txt": "cat /proc/net/netstat",
    "network/proc/sockstat.txt": "cat /proc/net/sockstat",
    "network/proc/softnet_stat.txt": "cat /proc/net/softnet_stat",
    "network/proc/stat-nf_conntrack.txt": "cat /proc/net/stat/nf_conntrack",
    "network/proc/ip_vs.txt": "cat /proc/net/ip_vs",
    "network/proc/ip_vs_stats.txt": "cat /proc/net/ip_vs_stats",
    "network/proc/fib_trie.txt": "cat /proc/net/fib_trie",
    "rules/iptables-save.txt": "iptables-save -c",
    "rules/ip6tables-save.txt": "ip6tables-save -c",
    "rules/iptables-legacy-save.txt": "iptables-legacy-save -c",
    "rules/ip6tables-legacy-save.txt": "ip6tables-legacy-save -c",
    "rules/ipset.txt": "ipset list",
    "rules/ipvs.txt": "ipvsadm -Ln --stats",
    "node/uname.txt": "uname -a",
    "node/os-release.txt": "cat /etc/os-release",
    "node/cmdline.txt": "cat /proc/cmdline",
    "node/meminfo.txt": "cat /proc/meminfo",
    "node/loadavg.txt": "cat /proc/loadavg",
    "node/uptime.txt": "cat /proc/uptime",
    "node/modules.txt": "cat /proc/modules",
    "node/self-mountinfo.txt": "cat /proc/self/mountinfo",
    "logs/kernel.txt": "dmesg --time-format iso",
}
"""Commands that need no option, by the file that gets their output."""

LISTINGS: Final = {
    "network/links.txt": ("ip -d -s link show", f"{NETWORK_MODULE} links"),
    "network/addresses.txt": ("ip address show", f"{NETWORK_MODULE} addresses"),
    "network/rules-4.txt": ("ip -4 rule show", f"{NETWORK_MODULE} rules 4"),
    "network/rules-6.txt": ("ip -6 rule show", f"{NETWORK_MODULE} rules 6"),
    "network/routes-4.txt": ("ip -4 route show table all", f"{NETWORK_MODULE} routes 4"),
    "network/routes-6.txt": ("ip -6 route show table all", f"{NETWORK_MODULE} routes 6"),
    "network/neighbours.txt": ("ip neighbour show", f"{NETWORK_MODULE} neighbours"),
    "network/qdiscs.txt": ("tc -s qdisc show", f"{NETWORK_MODULE} qdiscs"),
    "rules/nft.txt": ("nft list ruleset", RULES_MODULE),
}
"""Commands that the image does not have, and the modules that list the same without them."""


class Part(NamedTuple):
    """A file of the archive. `source`: where it comes from, in words for the index. `share`: of
    --time-limit.
    """

    path: str
    source: str
    collect: Collector
    share: float = PART_SHARE
    max_bytes: int = MAX_PART_BYTES


@dataclass(frozen=True, slots=True)
class Subject:
    """What is collected. `config`: the agent's settings, as far as they can be read. `options` and
    `origin`: options of commands that read pinned state, and of those that read the cluster.
    `max_object_bytes`: of all objects of the cluster. `pid`: of the agent, None if it is not known.
    `logs`: further log files.
    """

    config: Config
    config_file: Path | None
    options: tuple[str, ...]
    origin: tuple[str, ...]
    max_object_bytes: int
    pid: int | None = None
    logs: tuple[Path, ...] = ()


def list_parts(subject: Subject) -> Iterator[Part]:
    """All parts, the most important ones first: the time for all of them is limited."""
    yield from _kbpf_parts(subject)
    yield from _http_parts(subject)
    yield from _log_parts(subject)
    yield from _cluster_parts(subject)
    yield from _host_parts(subject.pid)


def _command(path: str, *command: str) -> Part:
    return Part(path, " ".join(command), collect.run_command(command))


NOT_SERVED: Final = "the agent does not listen there, by its configuration"
NO_LOGS: Final = "no log of a Pod of kbpf is visible here; if it logs elsewhere, give --log FILE"


def _nothing(error: str) -> Collector:
    return lambda _: Collected(b"", error)


def _kbpf(path: str, *arguments: str) -> Part:
    words = arguments[: next((i for i, a in enumerate(arguments) if a.startswith("-")), None)]
    source = f"kbpf {' '.join(words or arguments)}"
    return Part(path, source, collect.run_command(python_command("kbpf", *arguments)))


def _kbpf_parts(subject: Subject) -> Iterator[Part]:
    file, options = subject.config_file, subject.options
    config = ("--config", str(file)) if file else ()
    yield _kbpf("version.txt", "--version")
    yield _kbpf("check.json", "check", "-o", "json", *config, *options[:2])
    yield _kbpf("inspect/status.txt", "inspect", "status", *options)
    yield _kbpf("page.html", "page", *options)
    for view in inspect.VIEWS:
        if any(default is Parameter.empty for _, default in view.filters.values()):
            continue  # for one Service only
        limit = ("--limit", str(MAX_ROWS)) if view.is_list else ()
        path = f"inspect/{view.name}.json"
        yield _kbpf(path, "inspect", view.name, "-o", "json", *limit, *options)
    if file is not None:
        yield _command("config/file.yaml", "cat", str(file))
        yield _kbpf("config/settings.yaml", "run", *config, "--write-config-to", "/dev/stdout")
    variables = "".join(f"{k}={v}\n" for k, v in sorted(os.environ.items()) if k[:5] == "KBPF_")
    yield Part(
        "config/environment.txt", "variables KBPF_*", lambda limit: Collected(os.fsencode(variables)[: limit.max_bytes])
    )


def _http_parts(subject: Subject) -> Iterator[Part]:
    serving = subject.config.serving
    for addresses, paths in (
        (serving.healthz, ("/healthz", "/livez", "/readyz")),
        (serving.metrics, ("/metrics", "/configz", "/flagz", "/statusz", "/proxyMode")),
    ):
        host, _, port = addresses.partition(",")[0].rpartition(":")
        host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        for path in paths:
            url = f"http://{host}:{port}{path}" if port else path
            fetch = collect.run_command(python_command(FETCH_MODULE, url))
            yield Part(f"http{path}.txt", url, fetch if port else _nothing(NOT_SERVED))


def _log_parts(subject: Subject) -> Iterator[Part]:
    logs = [*subject.logs, *find_pod_logs(subject.pid)]
    for path in logs[:MAX_LOGS]:
        name = "_".join(path.parts[-3:]).lstrip("/")
        yield Part(f"logs/{name}", str(path), collect.read_tail(path))
    if len(logs) > MAX_LOGS:
        yield Part("logs/omitted.txt", str(pods.LOG_FOLDER), _nothing(f"{len(logs) - MAX_LOGS} more files"))
    if not logs:
        yield Part("logs/pods.txt", str(pods.LOG_FOLDER), _nothing(NO_LOGS))
    journal = ("journalctl", "--unit=kbpf*", "--no-pager", "--lines=10000", "--output=short-iso")
    yield _command("logs/journal.txt", *journal)


def find_pod_logs(pid: int | None) -> list[Path]:
    """The logs of Pods of the agent on this node, the newest first: of the Pod with this process,
    and of those with such a name in a namespace of the system. A Pod of a tenant may have any name.
    """
    uid, namespaces = _find_own_pod(pid)
    logs: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):  # not visible
        for folder in pods.LOG_FOLDER.iterdir():
            namespace, _, rest = folder.name.partition("_")
            name, _, folder_uid = rest.rpartition("_")
            is_system = namespace in namespaces and name.startswith(LOG_NAMES)
            if is_system or (uid and uid == folder_uid):
                for path in folder.glob("*/*.log"):
                    with contextlib.suppress(OSError):  # removed, or a link to nowhere
                        logs.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(logs, reverse=True)]


def _find_own_pod(pid: int | None) -> tuple[str, set[str]]:
    """The uid of the Pod that this process is in, "" if it is in none, and the namespaces in which
    the agent's Pods may be.
    """
    uid, namespaces = "", {SYSTEM_NAMESPACE}
    with contextlib.suppress(OSError, ValueError):
        namespaces.add((SERVICE_ACCOUNT / "namespace").read_text().strip())
    if pid is not None:
        with contextlib.suppress(OSError, ValueError):
            lines = (PROC / str(pid) / "cgroup").read_text().splitlines()
            paths = (line.rpartition(":")[2] for line in lines)
            uid = next(filter(None, map(pods.pod_uid, paths)), "")
    return uid, namespaces


def _cluster_parts(subject: Subject) -> Iterator[Part]:
    name, origin = subject.config.node_name, subject.origin
    run = collect.run_command(python_command(OBJECTS_MODULE, *origin))

    def read_objects(limit: Limit) -> Collected:
        data, error = run(limit)
        return Collected(collect.whole_documents(data), error)

    # A folder for `run --source`, `diff` and `simulate`.
    yield Part(
        "objects/cluster.yaml",
        "the objects that the agent reads",
        read_objects,
        OBJECTS_SHARE,
        subject.max_object_bytes,
    )
    yield _kbpf("simulate.json", "simulate", "cluster", "-o", "json", "--node", name, *origin)
    yield _kbpf(
        "verify.json",
        "verify",
        "-o",
        "json",
        "--limit",
        str(MAX_ROWS),
        "--hostname-override",
        name,
        *subject.options,
        *origin,
    )


def _host_parts(pid: int | None) -> Iterator[Part]:
    for path, (line, module) in LISTINGS.items():
        otherwise = python_command(*module.split())
        yield Part(path, line, collect.run_command(line.split(), otherwise))
    filters = collect.run_command(python_command(NETWORK_MODULE, "filters"))
    yield Part("network/filters.txt", "filters of all devices", filters)
    for path, line in COMMANDS.items():
        yield _command(path, *line.split())
    yield Part("node/sysctls.txt", "/proc/sys", collect.read_sysctls())
    if pid is not None:
        names = ("status", "limits", "cgroup", "oom_score_adj")
        files = [f"{PROC}/{pid}/{name}" for name in names]
        yield _command("node/agent.txt", "tail", "-n", "+1", *files)
