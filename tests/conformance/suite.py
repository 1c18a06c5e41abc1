# SPDX-License-Identifier: Apache-2.0
"""Runs Kubernetes' e2e tests on a cluster: which of them, by ginkgo, and what its report says."""

import os
import re
import shlex
import signal
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance.cluster.layout import Cluster, Failed
from tests.conformance.report import FAIL, PASS, SKIP, Row

LISTS = Path(__file__).parent / "lists"
ALL, SHORT = LISTS / "all.txt", LISTS / "short.txt"
CLEAN_UP_SECONDS = 60
MESSAGE_LENGTH = 300


@dataclass(slots=True)
class Selection:
    """Regular expressions of tests' full names, and why a test is left out."""

    run: list[str] = field(default_factory=list)
    skip: dict[str, str] = field(default_factory=dict)

    def includes(self, name: str) -> bool:
        return any(re.search(each, name) for each in self.run) and not self.reason(name)

    def reason(self, name: str) -> str:
        """Why the test is left out; "" if it is not."""
        return next((why for each, why in self.skip.items() if re.search(each, name)), "")


def read_list(path: Path) -> Selection:
    """A list has lines `run REGEX` and `skip REGEX`. The reason of a `skip` is the indented text
    below it.
    """
    selection = Selection()
    last = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        kind, _, rest = line.partition(" ")
        if not line or line.startswith("#"):
            continue
        if not kind and last:
            selection.skip[last] = f"{selection.skip[last]} {rest.strip()}".strip()
        elif kind == "run" and rest:
            selection.run.append(rest)
            last = ""
        elif kind == "skip" and rest:
            selection.skip[rest] = ""
            last = rest
        else:
            raise Failed(f"{path}:{number}: not a run line, a skip line or the reason of one")
    if unexplained := [each for each, why in selection.skip.items() if not why]:
        raise Failed(f"{path}: no reason for: {', '.join(unexplained)}")
    return selection


def run(
    cluster: Cluster,
    selection: Selection,
    folder: Path,
    *,
    procs: int,
    timeout: str = "3h",
    dry_run: bool = False,
    keep_namespaces: bool = False,
) -> list[Row]:
    """Runs the selected tests, `procs` at once. The log and report are in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = [f"--focus={each}" for each in selection.run]
    flags += [f"--skip={each}" for each in selection.skip]
    command = cluster.on_client(
        str(cluster.programs / "ginkgo"),
        "run",
        f"--procs={1 if dry_run else procs}",
        f"--timeout={timeout}",
        "--no-color",
        "--silence-skips",
        "--poll-progress-after=120s",
        "--poll-progress-interval=60s",
        "--grace-period=60s",
        *(["--dry-run"] if dry_run else []),
        *flags,
        "--junit-report=junit.xml",
        f"--output-dir={folder}",
        *_test_program(cluster, keep_namespaces),
    )
    (folder / "command.txt").write_text(f"{shlex.join(command)}\n")
    log = folder / "e2e.log"
    with log.open("wb") as output:
        _run_to_its_end(command, output.fileno())
    report = folder / "junit.xml"
    if not report.exists():
        raise Failed(f"the tests made no report; {log} ends so:\n{log.read_text()[-3000:]}")
    return rows(report.read_text())


def _test_program(cluster: Cluster, keep_namespaces: bool) -> list[str]:
    return [
        str(cluster.programs / "e2e.test"),
        "--",
        f"--kubeconfig={cluster.kubeconfig('admin')}",
        f"--kubectl-path={cluster.programs / 'kubectl'}",
        "--provider=skeleton",
        f"--num-nodes={len(cluster.nodes)}",
        "--report-dir=",
        "--disable-log-dump=true",
        "--dns-domain=cluster.local",
        f"--delete-namespace-on-failure={str(not keep_namespaces).lower()}",
        "--allowed-not-ready-nodes=0",
        "--prepull-images=false",
    ]


def _run_to_its_end(command: Sequence[str], output: int) -> None:
    """If we are interrupted, the tests get a minute to remove what they created."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd="/",
        start_new_session=True,
    )
    try:
        process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(CLEAN_UP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise


def rows(report: str) -> list[Row]:
    """The tests of a JUnit report that were selected, by name, and failures of the suite itself."""
    found = []
    for case in ET.fromstring(report).iter("testcase"):
        name = case.get("name", "")
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        if not name.startswith("[It]") and problem is None:
            continue
        skipped = case.find("skipped")
        if skipped is not None and not _message(skipped).removeprefix("skipped").strip(" -"):
            continue  # not selected
        if problem is not None:
            result, message = FAIL, _message(problem)
        elif skipped is not None:
            result, message = SKIP, _message(skipped).removeprefix("skipped - ")
        else:
            result, message = PASS, ""
        found.append(Row(result, _plain(name), float(case.get("time", 0)), message))
    return sorted(found, key=lambda row: row.name)


def _plain(name: str) -> str:
    """Without the kind of node, and without the labels, which are repeated at the end."""
    return re.sub(r" \[sig-[^\[\]]*\]$", "", name.removeprefix("[It] "))


def _message(element: ET.Element) -> str:
    return " ".join((element.get("message") or "").split())[:MESSAGE_LENGTH]
