"""What the documents say to type, as it stands there, as far as no other test runs it
(tests/values/project/test_docs.py says which does): README.md, configuration.md, kernels.md and
troubleshoot.md, and the commands that stand in the text of any page.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.cluster import kubeadm
from tests.support.cluster.daemonset import PodCluster
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, port, service, slice_port
from tests.support.lab.lab import PATIENCE, Agent, Lab, inside, until
from tests.support.runtime import docs
from tests.support.runtime.shell import Shell

SAID = sorted({span for page in docs.PAGES for span in docs.spans(page)})
BIN = Path(sys.executable).parent


# ---- on a node -----------------------------------------------------------------------------------


class Bench:
    """A node without a cluster, with a shell on it: what a document calls by its default path is
    this test's own, by the environment variables that kbpf has for that.
    """

    def __init__(self, lab: Lab) -> None:
        self.agent = Agent(lab.nodes[0])
        self.objects = lab.folder / "services.d"
        self.objects.mkdir()
        ends = [endpoint("10.244.1.2", node="node-1")]
        for obj in (
            service("kube-dns", port(53, protocol="UDP"), cluster_ip="10.96.0.10",
                    namespace="kube-system"),
            endpoint_slice("kube-dns", *ends, ports=[slice_port(53, protocol="UDP")],
                           namespace="kube-system"),
        ):  # fmt: skip
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
        """The command, with paths of this machine that a test must not write to elsewhere."""
        for before, after in {
            "/etc/kbpf/services.d": self.objects,
            "/var/lib/kube-proxy/config.conf": self.conf,
            "build/artifacts": self.conf.parent / "artifacts",
        }.items():
            command = command.replace(before, str(after))
        return command

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """As typed on the node."""
        return subprocess.run(
            self._inside(command), env=self.environment, cwd=docs.ROOT, text=True,
            capture_output=True, check=False, timeout=2 * PATIENCE,
        )  # fmt: skip

    def start(self, command: str) -> "subprocess.Popen[bytes]":
        """One that does not end."""
        self.agent.begin()
        with self.agent.log.open("ab") as log:
            return subprocess.Popen(
                self._inside(f"exec {command}"), env=self.environment, stderr=log, cwd=docs.ROOT
            )

    def _inside(self, command: str) -> list[str]:
        node = self.agent.node
        words = ("bash", "-c", self.here(command))
        return inside(node.netns, node.cgroup / "host", *words)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Lab(1, "dc", apart=True) as lab:
        made = Bench(lab)
        try:
            yield made
        finally:
            made.agent.remove_pins()


def test_without_a_cluster(bench: Bench) -> None:
    """README.md: a node that takes its Services from a folder, looked at, and cleaned up."""
    before, after = docs.section("README.md", "## Without a cluster")
    check, run = docs.commands(before)
    *looks, cleanup = docs.commands(after)
    assert bench.run(check).returncode == 0
    agent = bench.start(run.partition("#")[0])
    try:
        compiling = 2 * PATIENCE  # into its default folder, which nothing else here has filled
        until("it serves", lambda: (bench.agent.own_status() or {}).get("synced"), compiling)
        until("it is well", lambda: bench.run("kbpf inspect status").returncode == 0)
        said = {}
        for look in looks:
            done = bench.run(look)
            assert done.returncode == 0, (look, done.stderr)
            said[look] = done.stdout
        assert all("kube-dns" in said[look] for look in looks[:2]), said
        assert bench.run(cleanup).returncode == 1, "the agent runs"
    finally:
        agent.terminate()
        agent.wait(PATIENCE)
    assert bench.run(cleanup).returncode == 0
    assert not bench.agent.pin_dir.exists()


def test_make_demo() -> None:
    """README.md."""
    (block,) = docs.section("README.md", "## Try it: two commands")
    demo, test = docs.commands(block)
    done = subprocess.run(
        ["bash", "-c", demo], cwd=docs.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "backend-3" in done.stdout
    assert test.split("#")[0].strip() == "make test"
    assert "make test" in (docs.ROOT / ".ci" / "run").read_text()


RUN = sorted(
    {
        *(each for each in SAID if each.startswith("kbpf run ") and ":" not in each),
        *(line for block in docs.blocks("docs/configuration.md") for line in docs.commands(block)),
    }
)


@pytest.mark.parametrize("command", RUN)
def test_kbpf_run_is_told_what_it_knows(bench: Bench, command: str) -> None:
    """It takes the flags and the file. What `kbpf run` then does is what most tests are about."""
    if "--help" in command:
        done = bench.run(command)
        assert "--kubeconfig" in done.stdout
        return
    written = bench.conf.parent / "written"
    text = command.replace("FILE", str(written if "--write" in command else bench.conf))
    if "--write" not in text:
        text += f" --write-config-to {written}"
    done = bench.run(text)
    assert done.returncode == 0, done.stderr
    assert "kind: KbpfConfiguration" in written.read_text()


# ---- in a cluster --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(programs: None, kubectl: Path) -> Iterator[PodCluster]:
    with PodCluster(kubectl, 3, "dc") as made:
        yield made


@pytest.fixture(scope="module")
def shell(cluster: PodCluster, kubectl: Path, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(cluster, tmp_path_factory.mktemp("clone"), kubectl)


def well(cluster: PodCluster, command: str) -> None:
    """Returns when all devices have had their turn, for who asks whether it is well."""
    if "inspect status" in command or "--attached" in command:
        agent = cluster.pod_agents[0]
        until("it is well", lambda: agent.exec("kbpf", "inspect", "status").returncode == 0)


TYPED = [
    *(each for block in docs.blocks("docs/troubleshoot.md") for each in docs.commands(block)),
    *(f"kubectl -n kube-system exec ds/kube-proxy -- {line}"
      for block in docs.blocks("docs/kernels.md") for line in docs.commands(block)),
]  # fmt: skip


@pytest.mark.parametrize("command", TYPED)
def test_what_to_look_at(shell: Shell, cluster: PodCluster, command: str) -> None:
    """troubleshoot.md, kernels.md: each command ends well on a node that is well."""
    until(
        "it is well",
        lambda: cluster.pod_agents[0].exec("kbpf", "inspect", "status").returncode == 0,
    )
    assert shell(command)


NOT_HERE = {
    "kubectl -n kube-system logs": "needs a kubelet",
    "kubectl debug node/NODE --profile=sysadmin --image=registry.k8s.io/kube-proxy:v1.37.1 -- "
    "kube-proxy --cleanup": "needs a kubelet; what it runs: "
    "tests/lab/cluster/test_takeover_cleanup.py",
    "kubectl apply -k": "of the overlays: tests/lab/cluster/test_install_doc.py",
    "kubectl delete -k": "of the overlays: tests/lab/cluster/test_install_doc.py",
    "kubectl -n kube-system rollout status ds kbpf-cleanup": "of its DaemonSet: test_daemonset.py",
    "kbpf ...": "any", "kbpf inspect ...": "any",
    "kbpf cleanup": "ends what others look at: test_without_a_cluster",
    "kbpf cleanup --keep-connections": "tests/lab/cluster/test_takeover.py",
    "kbpf inspect": "a group: its commands are here",
}  # fmt: skip
KUBECTL = [each for each in SAID if re.match(r"kubectl .", each)]
KBPF = [each for each in SAID
        if re.match(r"kbpf (?!run)", each) and ":" not in each]  # fmt: skip


@pytest.mark.parametrize("command", [each for each in [*KUBECTL, *KBPF] if each not in NOT_HERE])
def test_commands_in_the_text(shell: Shell, cluster: PodCluster, command: str) -> None:
    """Of any page, in the place of what stands for a name, and in the pod where it is kbpf's."""
    for before, after in {
        "NAME": "kubernetes", "IMAGE": "kbpf:0.1.0", "build/artifacts": "/tmp/artifacts"
    }.items():  # fmt: skip
        command = re.sub(rf"\b{before}\b", after, command)
    if command.startswith("kbpf"):
        command = f"kubectl -n kube-system exec ds/kube-proxy -- {command}"
    well(cluster, command)
    shell(command)


def test_nothing_is_left_out_without_being_there() -> None:
    assert {*NOT_HERE} <= {*KUBECTL, *KBPF}


# ---- by developers -------------------------------------------------------------------------------


MAKE = [each for each in SAID if each.startswith("make ")]


@pytest.mark.parametrize("command", MAKE)
def test_targets_of_make(command: str) -> None:
    """They are there, and so is what they would run."""
    done = subprocess.run(
        ["bash", "-c", command.replace("make", "make -n", 1)], cwd=docs.ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [each for each in SAID if each.startswith("python -m ")])
def test_modules_that_are_run(command: str) -> None:
    """They are there, and know these options; what they do takes minutes."""
    module, *words = command.split()[2:]
    if module == "benchmarks":
        code = "import importlib, sys; importlib.import_module(sys.argv[1]).run"
        arguments = [sys.executable, "-c", code, ".".join((module, *words))]
    else:
        arguments = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(arguments, cwd=docs.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert module == "benchmarks" or all(word in done.stdout for word in words)
