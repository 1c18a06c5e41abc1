# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of the documents verbatim, except those that other tests run
(tests/values/project/test_docs.py lists them): README.md, configuration.md, kernels.md and
troubleshoot.md, and the inline commands of all pages.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.support.cluster import kubeadm
from tests.support.cluster.daemonset import PodCluster
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, port, service, slice_port
from tests.support.lab.lab import PATIENCE, Agent, Lab, inside, until
from tests.support.runtime import docs
from tests.support.runtime.shell import Shell
from tests.support.table import pairs

SAID = sorted({span for page in docs.PAGES for span in docs.spans(page)})
BIN = Path(sys.executable).parent
Done = subprocess.CompletedProcess[str]


# ---- on a node -----------------------------------------------------------------------------------


class Bench:
    """A node without a cluster, with a shell on it. kbpf's environment variables replace the
    default paths of a document by folders of this test.
    """

    def __init__(self, lab: Lab) -> None:
        self.agent = Agent(lab.nodes[0])
        self.objects = lab.folder / "services.d"
        self.objects.mkdir()
        ends = [endpoint("10.244.1.2", node="node-1")]
        for obj in (
            service("kube-dns", port(53, protocol="UDP"), cluster_ip="10.96.0.10", namespace="kube-system"),
            endpoint_slice("kube-dns", *ends, ports=[slice_port(53, protocol="UDP")], namespace="kube-system"),
        ):
            (self.objects / f"{obj['kind']}.yaml").write_text(yaml.safe_dump(obj))
        self.conf = lab.folder / "config.conf"
        self.conf.write_text(kubeadm.config("10.244.0.0/16"))
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "KBPF_PIN_DIR": str(self.agent.pin_dir),
            "KBPF_CGROUP": str(self.agent.node.cgroup),
            "KBPF_STATE_DIR": str(self.agent.state_dir),
            "KBPF_HOSTNAME_OVERRIDE": self.agent.node.name,
        }

    def here(self, command: str) -> str:
        """The command, with folders of this test in place of paths that it must not write to."""
        for before, after in {
            "/etc/kbpf/services.d": self.objects,
            "/var/lib/kube-proxy/config.conf": self.conf,
            "build/artifacts": self.conf.parent / "artifacts",
            "page.html": self.conf.parent / "page.html",
        }.items():
            command = command.replace(before, str(after))
        return command

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._inside(command),
            env=self.environment,
            cwd=docs.ROOT,
            text=True,
            capture_output=True,
            check=False,
            timeout=2 * PATIENCE,
        )

    def start(self, command: str) -> "subprocess.Popen[bytes]":
        self.agent.begin()
        with self.agent.log.open("ab") as log:
            return subprocess.Popen(self._inside(f"exec {command}"), env=self.environment, stderr=log, cwd=docs.ROOT)

    def _inside(self, command: str) -> list[str]:
        node = self.agent.node
        words = ("bash", "-c", self.here(command))
        return inside(node.netns, node.cgroup / "host", *words)


def is_health(command: str) -> bool:
    """Whether the command fails while the agent is not healthy: until all devices have their
    programs, and if a busy machine has stopped the agent for ten seconds.
    """
    return "inspect status" in command


def healthy_at_last(run: Callable[[], Done]) -> Done:
    """Waits until this command, which reports the agent's health, succeeds."""
    return until("the agent is healthy", lambda: (done := run()).returncode == 0 and done, state=run)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Lab(1, "db", apart=True) as lab:
        made = Bench(lab)
        try:
            yield made
        finally:
            made.agent.remove_pins()


def test_readme_without_a_cluster(bench: Bench):
    """README.md: run a node with a folder of objects, inspect it, and clean up."""
    before, after = docs.section("README.md", "## Without a cluster")
    path, make_folder, check, run = docs.commands(before)
    *looks, cleanup = docs.commands(after)
    assert bench.run(make_folder).returncode == 0
    assert bench.run(f"{path}\n{check}").returncode == 0
    agent = bench.start(run.partition("#")[0])
    try:
        compiling = 2 * PATIENCE  # the default cache folder is empty
        until("the agent is synced", lambda: (bench.agent.own_status() or {}).get("synced"), compiling)
        healthy_at_last(lambda: bench.run("kbpf inspect status"))
        said = {}
        for look in looks:
            done = healthy_at_last(partial(bench.run, look)) if is_health(look) else bench.run(look)
            assert done.returncode == 0, (look, done.stderr)
            said[look] = done.stdout
        assert all("kube-dns" in said[look] for look in looks[:2]), said
        assert bench.run(cleanup).returncode == 1, "the agent runs"
    finally:
        agent.terminate()
        agent.wait(PATIENCE)
    assert bench.run(cleanup).returncode == 0
    assert not bench.agent.pin_dir.exists()


def test_make_demo():
    """README.md: the two `make` commands; `make test` is only compared with .ci/run."""
    (block,) = docs.section("README.md", "## Try it: two commands")
    demo, test = docs.commands(block)
    done = subprocess.run(["bash", "-c", demo], cwd=docs.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in ("backend-1", "backend-3", "backend-4 refuses"))
    assert " 0 unexpected failures, " in done.stdout
    assert test.split("#")[0].strip() == "make test"
    assert "make test" in (docs.ROOT / ".ci" / "run").read_text()


RUN = sorted(
    {
        *(each for each in SAID if each.startswith("kbpf run ") and ":" not in each),
        *(line for block in docs.blocks("docs/configuration.md") for line in docs.commands(block)),
    }
)


@pytest.mark.parametrize("command", RUN)
def test_documented_kbpf_run_flags_are_accepted(bench: Bench, command: str):
    """Flags and files are accepted. What `kbpf run` does with them is covered by other tests."""
    if "--help" in command:
        done = bench.run(command)
        assert "--kubeconfig" in done.stdout
        return
    written = bench.conf.parent / "written"
    written.unlink(missing_ok=True)
    text = command.replace("FILE", str(written if "--write" in command else bench.conf))
    if "--write" not in text:
        text += f" --write-config-to {written}"
    done = bench.run(text)
    assert done.returncode == 0, done.stderr
    assert "kind: KbpfConfiguration" in written.read_text()


# ---- in a cluster --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(programs: None, kubectl: Path) -> Iterator[PodCluster]:
    with PodCluster(kubectl, 2, "dc") as made:
        healthy_at_last(lambda: made.pod_agents[0].exec("kbpf", "inspect", "status"))
        yield made


@pytest.fixture(scope="module")
def shell(cluster: PodCluster, kubectl: Path, tmp_path_factory) -> Shell:
    return Shell(cluster, tmp_path_factory.mktemp("clone"), kubectl)


def type_in(shell: Shell, command: str) -> str:
    """The output of a command, which must succeed. It watches for a second only."""
    command = re.sub(r"--for \d+[sm]", "--for 1s", command)
    if is_health(command):
        return healthy_at_last(partial(shell.run, command)).stdout
    return shell(command)


TYPED = [
    *(each for block in docs.blocks("docs/troubleshoot.md") for each in docs.commands(block)),
    *(
        f"kubectl -n kube-system exec ds/kube-proxy -- {line}"
        for block in docs.blocks("docs/kernels.md")
        for line in docs.commands(block)
    ),
]
SYSDUMP = [each for each in TYPED if "sysdump" in each]


@pytest.mark.parametrize("command", [each for each in TYPED if each not in SYSDUMP])
def test_documented_diagnostic_commands_succeed(shell: Shell, command: str):
    """troubleshoot.md, kernels.md: each command succeeds on a healthy node."""
    assert type_in(shell, command)


def test_a_sysdump_from_a_pod_is_complete_where_a_pod_can_be(shell: Shell):
    """The documented command. The image has no iproute2 and no nft; kubelet writes no logs here."""
    (command,) = SYSDUMP
    shell(command.replace("sysdump", "sysdump --time-limit 7m", 1))
    index = json.loads(shell(f"tar xzOf {command.partition('>')[2]} --wildcards '*/index.json'"))
    errors = {item["path"]: item["error"] for item in index["items"]}
    needed = [
        path
        for path in errors
        if path.startswith(("inspect/", "http/", "config/", "network/", "rules/nft", "check"))
        and not path.startswith(("network/sockets", "network/proc/"))
    ]
    assert len(needed) > 25
    failed = {path: errors[path] for path in (*needed, "objects/cluster.yaml", "simulate.json")}
    assert {path: error for path, error in failed.items() if error} == {}


NOT_HERE = dict(
    pairs("""\
kubectl -n kube-system logs → needs a kubelet
kubectl debug node/NODE --profile=sysadmin --image=registry.k8s.io/kube-proxy:v1.37.1 -- \
kube-proxy --cleanup → needs a kubelet; what it runs: tests/lab/cluster/test_takeover_cleanup.py
kubectl delete -k → of the overlays: tests/lab/cluster/test_install_doc.py
kubectl -n kube-system rollout status ds kbpf-cleanup → of its DaemonSet: test_daemonset.py
kbpf compile --cache-dir build/artifacts → takes long: tests/programs/node/commands/test_check_and_cleanup.py
kbpf ... → any
kbpf inspect ... → any
kbpf cleanup → ends what others look at: test_readme_without_a_cluster
kbpf cleanup --keep-connections → tests/lab/cluster/test_takeover.py
kbpf inspect → a group: its commands are here
kbpf diff → of two states: tests/lab/agent/test_cluster_objects.py
kbpf diff cluster objects/ → tests/lab/agent/test_cluster_objects.py
kbpf sysdump → writes a file; the block in troubleshoot.md is run
kbpf monitor → does not end: tests/programs/sockets/test_monitor.py
kbpf top → does not end
kbpf top --by clients → does not end
kbpf simulate → without what to simulate: tests/values/cli/test_simulate.py
kbpf trace → without from and to
kbpf inspect endpoints → without a Service
kbpf inspect service → without a Service
kbpf demo → not in a pod: tests/lab/cluster/test_demo.py
kbpf --install-completion → changes the user's shell
kbpf --show-completion → asks which shell calls it: tests/values/cli/test_completion.py
kubectl exec → a name
kubectl -n kube-system rollout undo ds kube-proxy → ends kbpf
""")
)
"""Command → why it is not run here."""
KUBECTL = [each for each in SAID if re.match(r"kubectl (?!kbpf)", each)]  # not of the plugin
KBPF = [each for each in SAID if re.match(r"kbpf (?!run)", each) and ":" not in each]


@pytest.mark.parametrize("command", [each for each in [*KUBECTL, *KBPF] if each not in NOT_HERE])
def test_inline_commands_succeed(shell: Shell, command: str):
    """Inline commands of all pages, with placeholders replaced; kbpf's own run in the pod."""
    for before, after in {
        "FROM TO": "host 10.96.0.1:443",
        "NAMESPACE": "default",
        "NAME": "kubernetes",
        "IMAGE": "kbpf:0.1.0",
        "KIND": "ServiceList",
        "COMMAND": "check",
        "FILE": "/var/lib/kube-proxy/config.conf",
    }.items():
        command = re.sub(rf"\b{before}\b", after, command)
    if command.startswith("kbpf"):
        command = f"kubectl -n kube-system exec ds/kube-proxy -- {command}"
    type_in(shell, command)


def test_excluded_commands_exist_in_the_documents():
    assert {*NOT_HERE} <= {*KUBECTL, *KBPF}


# ---- developers' commands ------------------------------------------------------------------------


MAKE = [each for each in SAID if each.startswith("make ")]


@pytest.mark.parametrize("command", MAKE)
def test_documented_make_targets_exist(command: str):
    """The targets exist, and so do the files that they would run."""
    done = subprocess.run(
        ["bash", "-c", command.replace("make", "make -n", 1)],
        cwd=docs.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [each for each in SAID if each.startswith("python -m ")])
def test_documented_python_modules_exist(command: str):
    """The modules exist and have these options; running them would take minutes."""
    module, *words = command.split()[2:]
    if module == "benchmarks":
        code = "import importlib, sys; importlib.import_module(sys.argv[1]).run"
        arguments = [sys.executable, "-c", code, ".".join((module, *words))]
    else:
        arguments = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(arguments, cwd=docs.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if module != "benchmarks":
        unknown = [word for word in words if word not in done.stdout and not (docs.ROOT / word).exists()]
        assert not unknown
