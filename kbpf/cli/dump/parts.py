# SPDX-License-Identifier: Apache-2.0
"""What `kbpf sysdump` collects: a row for each file of the archive."""

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
from kbpf.kernel.system import pods, sysctl
from kbpf.model.config import Config
from kbpf.source.api.kubeconfig import SERVICE_ACCOUNT

PROC: Final = Path("/proc")
LOG_NAMES: Final = ("kbpf", "kube-proxy")
"""Beginnings of the names of Pods of the agent, whatever their DaemonSet is called."""
SYSTEM_NAMESPACE: Final = "kube-system"
MAX_LOGS: Final = 8
MAX_ROWS: Final = 20_000
SECRET_SYSCTLS: Final = ("stable_secret", "tcp_fastopen_key")
NETWORK_MODULE: Final = "kbpf.kernel.net.dump"
RULES_MODULE: Final = "kbpf.kernel.netfilter.dump"
OBJECTS_MODULE: Final = "kbpf.cli.dump.objects"

PART_SHARE: Final = 0.25
OBJECTS_SHARE: Final = 0.75
"""How much of --time-limit a part may take."""
MAX_PART_BYTES: Final = 16 << 20


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
    yield from _network_parts()
    yield from _rule_parts()
    yield from _node_parts(subject)


def _kbpf(path: str, *arguments: str) -> Part:
    words = arguments[: next((i for i, a in enumerate(arguments) if a.startswith("-")), None)]
    return Part(path, f"kbpf {' '.join(words or arguments)}", collect.run_kbpf(*arguments))


def _kbpf_parts(subject: Subject) -> Iterator[Part]:
    yield _kbpf("version.txt", "--version")
    config = ("--config", str(subject.config_file)) if subject.config_file else ()
    yield _kbpf("check.json", "check", "-o", "json", *config, *subject.options[:2])
    yield _kbpf("inspect/status.txt", "inspect", "status", *subject.options)
    yield _kbpf("page.html", "page", *subject.options)
    for view in inspect.VIEWS:
        if any(default is Parameter.empty for _, default in view.filters.values()):
            continue  # for one Service only
        limit = ("--limit", str(MAX_ROWS)) if view.is_list else ()
        yield _kbpf(
            f"inspect/{view.name}.json",
            "inspect", view.name, "-o", "json", *limit, *subject.options,
        )  # fmt: skip
    if subject.config_file is not None:
        yield Part(
            "config/file.yaml", str(subject.config_file), collect.read_files(subject.config_file)
        )
        yield _kbpf(
            "config/settings.yaml",
            "run", "--config", str(subject.config_file), "--write-config-to", "/dev/stdout",
        )  # fmt: skip
    variables = "".join(f"{k}={v}\n" for k, v in sorted(os.environ.items()) if k[:5] == "KBPF_")
    yield Part(
        "config/environment.txt", "variables KBPF_*",
        lambda limit: Collected(os.fsencode(variables)[: limit.max_bytes]),
    )  # fmt: skip


def _http_parts(subject: Subject) -> Iterator[Part]:
    serving = subject.config.serving
    for addresses, paths in (
        (serving.healthz, ("/healthz", "/livez", "/readyz")),
        (serving.metrics, ("/metrics", "/configz", "/flagz", "/statusz", "/proxyMode")),
    ):
        address = addresses.partition(",")[0]
        for path in paths:
            yield Part(f"http{path}.txt", f"http://{address}{path}", collect.get(address, path))


def _log_parts(subject: Subject) -> Iterator[Part]:
    logs = [*subject.logs, *find_pod_logs(subject.pid)]
    for path in logs[:MAX_LOGS]:
        name = "_".join(path.parts[-3:]).lstrip("/")
        yield Part(f"logs/{name}", str(path), collect.read_tail(path))
    if len(logs) > MAX_LOGS:
        yield Part(
            "logs/omitted.txt", str(pods.LOG_FOLDER),
            lambda limit: Collected(b"", f"{len(logs) - MAX_LOGS} more files"),
        )  # fmt: skip
    if not logs:
        yield Part("logs/pods.txt", str(pods.LOG_FOLDER), lambda limit: Collected(
            b"", "no log of a Pod of kbpf is visible here; if it logs elsewhere, give --log FILE"
        ))  # fmt: skip
    journal = ("journalctl", "--unit=kbpf*", "--no-pager", "--lines=10000", "--output=short-iso")
    yield _command("logs/journal.txt", *journal)
    yield _command("logs/kernel.txt", "dmesg", "--time-format", "iso")


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
    name = subject.config.node_name
    yield Part(
        "objects/cluster.yaml", "the objects that the agent reads", _read_objects(*subject.origin),
        OBJECTS_SHARE, subject.max_object_bytes,
    )  # fmt: skip
    yield _kbpf(
        "simulate.json", "simulate", "cluster", "-o", "json", "--node", name, *subject.origin
    )
    yield _kbpf(
        "verify.json",
        "verify", "-o", "json", "--limit", str(MAX_ROWS), "--hostname-override", name,
        *subject.options, *subject.origin,
    )  # fmt: skip


def _read_objects(*origin: str) -> Collector:
    run = collect.run_module(OBJECTS_MODULE, *origin)

    def read(limit: Limit) -> Collected:
        data, error = run(limit)
        return Collected(collect.whole_documents(data), error)

    return read


def _command(path: str, *command: str) -> Part:
    return Part(path, " ".join(command), collect.run_command(*command))


def _network_parts() -> Iterator[Part]:
    """From iproute2 if it is installed, else the same from the kernel as JSON."""
    for name, kind, command in (
        ("links", "links", ("ip", "-d", "-s", "link", "show")),
        ("addresses", "addresses", ("ip", "address", "show")),
        ("rules-4", "rules", ("ip", "-4", "rule", "show")),
        ("rules-6", "rules", ("ip", "-6", "rule", "show")),
        ("routes-4", "routes", ("ip", "-4", "route", "show", "table", "all")),
        ("routes-6", "routes", ("ip", "-6", "route", "show", "table", "all")),
        ("neighbours", "neighbours", ("ip", "neighbour", "show")),
        ("qdiscs", "qdiscs", ("tc", "-s", "qdisc", "show")),
    ):
        family = (name[-1],) if name[-1] in "46" else ()
        otherwise = collect.run_module(NETWORK_MODULE, kind, *family)
        yield Part(
            f"network/{name}.txt", " ".join(command),
            collect.first_installed(command, otherwise=otherwise),
        )  # fmt: skip
    yield Part(
        "network/filters.txt", "filters of all devices",
        collect.run_module(NETWORK_MODULE, "filters"),
    )  # fmt: skip
    yield _command("network/sockets.txt", "ss", "-s")
    for name in ("prog", "map", "link", "net", "cgroup"):
        verb = ("tree",) if name == "cgroup" else ("show",)
        yield _command(f"bpftool/{name}.txt", "bpftool", name, *verb)
    statistics = ("snmp", "snmp6", "netstat", "sockstat", "softnet_stat", "stat/nf_conntrack",
                  "ip_vs", "ip_vs_stats", "fib_trie")  # fmt: skip
    for name in statistics:
        yield _file(f"network/proc/{name.replace('/', '-')}.txt", PROC / "net" / name)


def _rule_parts() -> Iterator[Part]:
    ruleset = ("nft", "list", "ruleset")
    yield Part(
        "rules/nft.txt", " ".join(ruleset),
        collect.first_installed(ruleset, otherwise=collect.run_module(RULES_MODULE)),
    )  # fmt: skip
    for name in ("iptables-save", "ip6tables-save", "iptables-legacy-save",
                 "ip6tables-legacy-save"):  # fmt: skip
        yield _command(f"rules/{name}.txt", name, "-c")
    yield _command("rules/ipset.txt", "ipset", "list")
    yield _command("rules/ipvs.txt", "ipvsadm", "-Ln", "--stats")


def _file(path: str, *files: Path) -> Part:
    return Part(path, " ".join(map(str, files)), collect.read_files(*files))


def _node_parts(subject: Subject) -> Iterator[Part]:
    uname = " ".join(os.uname()) + "\n"
    yield Part("node/uname.txt", "uname -a", lambda limit: Collected(uname.encode()))
    yield _file("node/os-release.txt", Path("/etc/os-release"))
    for name in ("cmdline", "meminfo", "loadavg", "uptime", "modules", "self/mountinfo"):
        yield _file(f"node/{name.replace('/', '-')}.txt", PROC / name)
    yield Part("node/sysctls.txt", "/proc/sys", collect.read_tree(
        sysctl.ROOT, lambda name: name.endswith(SECRET_SYSCTLS), ("net", "kernel", "vm", "user")
    ))  # fmt: skip
    if subject.pid is not None:
        names = ("status", "limits", "cgroup", "oom_score_adj")
        agent = PROC / str(subject.pid)
        yield _file("node/agent.txt", *(agent / name for name in names))
