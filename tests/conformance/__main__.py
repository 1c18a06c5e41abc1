# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' own network tests against a Service proxy, on nodes simulated on this machine.

Without a command: builds what is missing, creates a cluster, runs the tests, prints a table and
removes everything. The commands are its steps, on a cluster that `up` creates. Two more are

  kubectl ARGUMENTS...           run kubectl as admin
  node-exec MACHINE COMMAND...   run a command on node1, ..., cp or client
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from tests.conformance import report, suite
from tests.conformance.cluster import cnis, lifecycle, proxies
from tests.conformance.cluster.layout import CLIENT, Cluster, Failed
from tests.conformance.cluster.machines import inside
from tests.conformance.versions import NEWEST, VERSIONS
from tests.support.build.go_build import BuildError
from tests.support.cni.networks import CNIS

BUILD = report.ROOT / "build" / "conformance"
NODES, SHORT_NODES = 6, 2
DEVELOPER = "dev"
"""The name of the cluster that `up` creates."""


def main() -> int:
    """Returns the exit code: 0 if all tests passed."""
    arguments = sys.argv[1:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "run")
    try:
        if arguments[0] == "kubectl":
            return _replace_by(Cluster.load(DEVELOPER).kubectl_command(*arguments[1:]))
        if arguments[0] == "node-exec":
            return _replace_by(_on_machine(*arguments[1:]))
        given = _parser().parse_args(arguments)
        with lifecycle.interruptible():
            return int(given.act(given) or 0)
    except (Failed, BuildError) as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("conformance: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    for name, text in (
        ("run", "everything; the default"),
        ("up", "create a cluster that stays"),
        ("test", "run tests on it"),
        ("proxy", "exchange its proxy"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(act=globals()[f"_{name}"])
        if name != "test":
            names = ", ".join(proxies.NAMES)
            command.add_argument(
                "--proxy", default=proxies.KBPF, metavar="PROXY", help=f"of {names}, or a shell command"
            )
        if name in ("run", "up"):
            command.add_argument("--nodes", type=int, help=f"default {NODES}")
            command.add_argument("--version", choices=VERSIONS, default=NEWEST)
            command.add_argument(
                "--cni", choices=CNIS, default=cnis.DEFAULT, help=f"the pod network, default {cnis.DEFAULT}"
            )
            command.add_argument("--ipv4-nodes", action="store_true", help="nodes report only their IPv4 address")
        if name in ("run", "test"):
            _add_selection(command)
    for name, text in (
        ("status", "its machines and processes"),
        ("down", "remove it"),
        ("report", "write docs/conformance.md from the recorded results"),
    ):
        commands.add_parser(name, help=text).set_defaults(act=globals()[f"_{name}"])
    return parser


def _add_selection(command: argparse.ArgumentParser) -> None:
    command.add_argument("--focus", help="regular expression of tests' names; else lists/all.txt")
    command.add_argument("--short", action="store_true", help="lists/short.txt, on two nodes")
    command.add_argument("--procs", type=int, default=8, help="tests at once (default 8)")
    command.add_argument("--dry-run", action="store_true", help="only list the tests")
    command.add_argument("--keep-namespaces", action="store_true", help="of tests that fail")
    command.add_argument("--record", action="store_true", help="store the results in tests/conformance/results")


def _run(given: argparse.Namespace) -> int:
    folder = _new_folder()
    nodes = given.nodes or (SHORT_NODES if given.short else NODES)
    with lifecycle.cluster(
        given.version, nodes, given.proxy, cni=given.cni, ipv4_nodes=given.ipv4_nodes, logs=folder / "logs"
    ) as cluster:
        return _test_on(cluster, given, folder)


def _up(given: argparse.Namespace) -> None:
    nodes = given.nodes or NODES
    lifecycle.up(DEVELOPER, given.version, nodes, given.proxy, cni=given.cni, ipv4_nodes=given.ipv4_nodes)


def _test(given: argparse.Namespace) -> int:
    return _test_on(Cluster.load(DEVELOPER), given, _new_folder())


def _new_folder() -> Path:
    return BUILD / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _test_on(cluster: Cluster, given: argparse.Namespace, folder: Path) -> int:
    """Prints the table, and returns the exit code."""
    state = cluster.state
    if given.record and state.cni != cnis.DEFAULT:
        raise Failed(f"only results with --cni {cnis.DEFAULT} are recorded")
    selection = suite.read_list(suite.SHORT if given.short else suite.ALL)
    if given.focus:
        selection = suite.Selection([given.focus])
    rows = suite.run(
        cluster, selection, folder, procs=given.procs, dry_run=given.dry_run, keep_namespaces=given.keep_namespaces
    )
    if given.dry_run:
        print(*(row.name for row in rows), f"{len(rows)} tests", sep="\n")
        return 0
    run = report.Run(state.version, state.proxy, str(len(cluster.nodes)), tuple(rows))
    print(run.table(), flush=True)
    (folder / "table.txt").write_text(run.table())
    print(f"the log and the report are in {folder}", flush=True)
    if given.record:
        print(f"recorded as {report.record(run)}", flush=True)
    return int(not run.passes)


def _proxy(given: argparse.Namespace) -> None:
    cluster = Cluster.load(DEVELOPER)
    proxies.stop(cluster)
    proxies.start(cluster, given.proxy)
    proxies.wait_until_serving(cluster)


def _status(_: argparse.Namespace) -> None:
    cluster = Cluster.load(DEVELOPER)
    state = cluster.state
    print(f"Kubernetes {state.version}; proxy {state.proxy}; CNI {state.cni}")
    for machine in cluster.machines.values():
        services = [
            f"{name} {'runs' if process.is_alive else 'has ended'}" for name, process in machine.services.items()
        ]
        print(f"{machine.name:8} {machine.addresses[0]:15} {', '.join(services)}")


def _on_machine(name: str = "", *command: str) -> list[str]:
    cluster = Cluster.load(DEVELOPER)
    if name not in cluster.machines or not command:
        machines = ", ".join(cluster.machines)
        raise Failed(f"node-exec MACHINE COMMAND...: the machines are {machines}")
    if name == CLIENT:
        return cluster.on_client(*command)
    return [*inside(cluster, cluster.machines[name]), *command]


def _replace_by(command: list[str]) -> NoReturn:
    """Runs a command in place of this process."""
    os.execvp(command[0], command)


def _down(_: argparse.Namespace) -> None:
    Cluster.load(DEVELOPER)
    lifecycle.down(DEVELOPER, BUILD / "logs")


def _report(_: argparse.Namespace) -> None:
    text = report.page(report.DOCUMENT.read_text(), report.recorded())
    report.DOCUMENT.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
