# SPDX-License-Identifier: Apache-2.0
"""`kbpf run --config` in place of kube-proxy: kubeadm's files unchanged, on a node of a cluster
with a real API server. How the agent authenticates, how it follows changes of its file and of its
Node, and what it sets on the node.
"""

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kbpf.cli import arguments
from kbpf.cli.app import call
from kbpf.config import kinds, load
from kbpf.model.config import LocalMode
from tests.support.cluster import kubeadm
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.kube_objects import node
from tests.support.cluster.kubeadm import Mount
from tests.support.lab.dial import Dial, check
from tests.support.lab.lab import on, run, until
from tests.support.lab.load import under_load
from tests.values.config.test_flags_and_file import FIELDS, MODES
from tests.values.config.test_written_file import TEXTS

SPACE = "kube-system"
PODS = "10.244.0.0/16,fd00:10:244::/48"
OBJECTS = """
apiVersion: v1
kind: ServiceAccount
metadata: {name: kube-proxy, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: "kubeadm:node-proxier"}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: system:node-proxier}
subjects: [{kind: ServiceAccount, name: kube-proxy, namespace: kube-system}]
"""
"""Of kubeadm."""
ON_EVERY = "10.244.1.1"
"""An address of the node that its Node object does not list."""


class Kubeadm(Cluster):
    """One node, whose agent is started as kubeadm's DaemonSet starts kube-proxy. There is no Node
    object yet.
    """

    def __init__(self) -> None:
        super().__init__(1, "k")

    def bring_up(self) -> None:
        """The objects of kubeadm, the mounts of kubelet, the agent."""
        self.account = Mount(self.lab.folder / "account")
        self.mount = Mount(self.lab.folder / "kube-proxy")
        for obj in yaml.safe_load_all(OBJECTS):
            self.kube.create(obj)
        self.secret = ""
        self.new_token()
        self.put(self.config())
        self.agent.start(wait=False, extra=("--config", str(self.mount.folder / "config.conf")))
        self.agent.wait_synced()

    def new_token(self) -> None:
        """Creates a token bound to a new Secret, and revokes the previous one by deleting its
        Secret.
        """
        before, self.secret = self.secret, f"{self.secret}x"
        reference = {"kind": "Secret", "apiVersion": "v1"}
        made = self.kube.create({**reference, "metadata": {"name": self.secret, "namespace": SPACE}})
        bound = {**reference, "name": self.secret, "uid": made["metadata"]["uid"]}
        token = self.kube.token("kube-proxy", SPACE, boundObjectRef=bound)
        self.account.put(ca_crt=self.api.authority.crt.read_text(), token=token)
        if before:
            self.kube.delete("Secret", before, SPACE)

    def config(self, more: str = "") -> str:
        """kubeadm's configuration, with the fields of `more` replaced."""
        said = yaml.safe_load(kubeadm.config(PODS, self.mount.folder / "kubeconfig.conf"))
        return yaml.safe_dump(said | (yaml.safe_load(more) or {}))

    def put(self, config: str) -> None:
        self.mount.put(
            config_conf=config,
            kubeconfig_conf=kubeadm.kubeconfig(self.api.url, self.account.folder),
        )

    def begun(self) -> float:
        """When the agent that wrote the status started, in seconds of CLOCK_BOOTTIME; 0.0 while it
        is not synced.
        """
        status = self.agent.status()
        return status["started"] if status is not None and status["synced"] else 0.0

    @contextlib.contextmanager
    def begins_anew(self) -> Iterator[None]:
        """The file changes in this block; then waits until the same process has restarted its
        agent.
        """
        before, pid = self.begun(), self.agent.pid
        yield
        until("the agent has restarted", lambda: self.begun() > before)
        assert self.agent.is_running
        assert self.agent.status()["pid"] == pid

    @contextlib.contextmanager
    def configured(self, more: str) -> Iterator[None]:
        """In this block the agent runs with other settings."""
        with self.begins_anew():
            self.put(self.config(more))
        try:
            yield
        finally:
            with self.begins_anew():
                self.put(self.config())

    def says(self, words: str) -> None:
        """Waits until the agent's log contains these words."""
        until(f"{words!r} is logged", lambda: any(words in line for line in self.agent.lines()))


@pytest.fixture(scope="module")
def cluster(programs: None) -> Iterator[Kubeadm]:
    with Kubeadm() as made:
        made.create(*made.web(20, "a1", type="NodePort", node_port=30020))
        made.settle()
        yield made


def reaches(cluster: Kubeadm, client: str, to: str, outcome: str) -> None:
    check(cluster, Dial(f"{client} to {to}", client, to, outcome))


def becomes(cluster: Kubeadm, what: str, address: str, answers: bool) -> None:
    """Waits until the NodePort answers at an address, or no longer does."""
    place = cluster["a2"]
    until(what, lambda: ("name" in place.tcp(address, 30020, timeout=1.0)) is answers)


def test_kubeadms_files_are_read_unchanged(cluster: Kubeadm):
    """The ServiceAccount's token and role are enough; the Node may be created later."""
    said = "\n".join(cluster.agent.lines())
    assert "ignored, as kube-proxy does" not in said
    assert "is ignored" not in said
    assert "unknown field" not in said
    assert "nodePortAddresses is unset" in said
    assert said.count("there is no Node node-1 yet") == 1
    reaches(cluster, "a2", "10.96.0.20:80", "a1")
    reaches(cluster, "host-1", "127.0.0.1:30020", "a1")
    for address in (cluster.lab.nodes[0].ip, ON_EVERY):
        reaches(cluster, "a2", f"{address}:30020", "a1")


def test_a_changed_file_restarts_the_agent_without_disturbing_traffic(cluster: Kubeadm):
    own = cluster.lab.nodes[0].ip
    with under_load(cluster, "10.96.0.20", "a2") as load:
        with cluster.configured(f"nodePortAddresses: [{own}/32]"):
            load.goes_on()
            cluster.settle()
            reaches(cluster, "a2", f"{own}:30020", "a1")
            assert "error" in cluster["a2"].tcp(ON_EVERY, 30020, timeout=5.0)
        load.goes_on()
    cluster.settle()
    reaches(cluster, "a2", f"{ON_EVERY}:30020", "a1")


# ---- the node ------------------------------------------------------------------------------------


PRIMARY = "nodePortAddresses: [primary]\ndetectLocalMode: NodeCIDR\nclusterCIDR: ''"


def test_the_agent_follows_its_node_object(cluster: Kubeadm):
    """NodePorts answer on the Node's own addresses and follow its object, as do its zone and its
    pod networks. The last known values stay in force when the Node is deleted.
    """
    kube, home = cluster.kube, cluster.lab.nodes[0]

    def networks() -> set[bytes]:
        return set(cluster.agent.entries("local_networks"))

    with cluster.configured(PRIMARY):
        becomes(cluster, "no Node: all addresses", ON_EVERY, True)
        cluster.says("detect-local-mode=NodeCIDR has no network yet")
        assert not networks()
        made = kube.create(node(home.name, home.ip, zone="zone-1"))
        kube.patch("Node", home.name, {"spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24"]}})
        becomes(cluster, "the Node's address only", ON_EVERY, False)
        reaches(cluster, "a2", f"{home.ip}:30020", "a1")
        until("the Node's network is known", lambda: len(networks()) == 1)

        addresses = {"status": {"addresses": [{"type": "InternalIP", "address": ON_EVERY}]}}
        kube.patch("Node", home.name, addresses, sub="status")
        becomes(cluster, "its new address", ON_EVERY, True)
        becomes(cluster, "no longer the old one", home.ip, False)
        cluster.change(cluster.slice("web-20", "a1@zone-1 a2@zone-2"))
        reaches(cluster, "a3", "10.96.0.20:80", "a1")
        kube.patch("Node", home.name, {"metadata": {"labels": {"topology.kubernetes.io/zone": "zone-2"}}})
        until("the new zone is in force", lambda: cluster["a3"].tcp("10.96.0.20", 80)["name"] == "a2")
        reaches(cluster, "a3", "10.96.0.20:80", "a2")

        before = networks()
        kube.delete("Node", home.name)
        cluster.settle()
        reaches(cluster, "a3", "10.96.0.20:80", "a2")
        reaches(cluster, "a3", f"{ON_EVERY}:30020", "a2")
        becomes(cluster, "still not", home.ip, False)

        # podCIDRs are immutable: the Node is created again with others
        made["metadata"] = {"name": home.name, "labels": {"topology.kubernetes.io/zone": "zone-1"}}
        made["spec"] = {"podCIDR": "10.244.9.0/24", "podCIDRs": ["10.244.9.0/24"]}
        kube.create(made)
        until("the new network replaces the old one", lambda: len(networks()) == 1 and networks() != before)
        cluster.change(cluster.slice("web-20", "a1"))
        kube.delete("Node", home.name)


OTHERS = """
conntrack:
  maxPerCore: 0
  tcpEstablishedTimeout: 2h0m0s
  tcpCloseWaitTimeout: 0s
  tcpBeLiberal: true
  udpTimeout: 45s
  udpStreamTimeout: 3m
oomScoreAdj: 300
"""


def test_conntrack_and_oom_score_are_set_as_kube_proxy_sets_them(cluster: Kubeadm):
    names = ("tcp_timeout_established", "tcp_timeout_close_wait", "tcp_be_liberal", "udp_timeout", "udp_timeout_stream")

    def found() -> str:
        return " ".join(sysctl(cluster, f"nf_conntrack_{name}") for name in names)

    assert found().startswith("86400 3600 ")
    with cluster.configured(OTHERS):
        assert found() == "7200 3600 1 45 180"
        assert Path(f"/proc/{cluster.agent.pid}/oom_score_adj").read_text().strip() == "300"
    assert found().startswith("86400 ")


def sysctl(cluster: Kubeadm, name: str) -> str:
    path = f"/proc/sys/net/netfilter/{name}"
    return on(cluster.lab.nodes[0], "cat", path).strip()


def test_every_flag_of_kube_proxy_is_known(kube_proxy: Path):
    said = run(str(kube_proxy), "--help")
    theirs = set(re.findall(r"^ +(?:-\w, )?(--[a-z0-9-]+)", said, re.M))
    ours = set(re.findall(r"--[a-z0-9-]+", arguments.build_parser().format_help()))
    assert len(theirs) > 50
    assert theirs <= ours


NODE_PORT_FLAGS = (
    {},
    *({"--nodeport-addresses": text} for text in ("10.0.0.0/8", "primary,localhost")),
    {"--nodeport-addresses": "10.0.0.0/8", "--iptables-localhost-nodeports": "true"},
    {"--nodeport-addresses": "localhost", "--feature-gates": f"{kinds.LOCALHOST_GATE}=true"},
)
MIN_SYNC = {"--iptables-min-sync-period": "0.25s", "--ipvs-min-sync-period": "0.5s"}
"""kbpf's default is another one."""


@pytest.mark.parametrize("mode", MODES)
def test_flags_mean_what_the_real_kube_proxy_makes_of_them(kube_proxy: Path, tmp_path, mode: str):
    """kube-proxy writes its flags as a file, which kbpf reads as it reads the flags. All flags at once, twice, with
    the first and the last sample of each.
    """
    theirs = set(re.findall(r"^ +(?:-\w, )?(--[a-z0-9-]+)", run(str(kube_proxy), "--help"), re.M))
    rows = {name: row for row in FIELDS for name in {row.name, *row.aliases} & theirs}
    assert len(rows) > 30
    for given in (*({name: TEXTS[row.kind][i] for name, row in rows.items()} for i in (0, -1)), *NODE_PORT_FLAGS):
        flags = given | MIN_SYNC | {"--proxy-mode": mode}
        if "--metrics-bind-address" in flags:
            flags["--metrics-bind-address"] = "192.0.2.1:7"  # kube-proxy accepts only one
        written = tmp_path / "written"
        run(str(kube_proxy), *map("=".join, flags.items()), "--write-config-to", str(written))
        ours = load.load({rows[name].name: text for name, text in flags.items()}, {}).config
        local = ours.detect_local_mode or LocalMode.CLUSTER_CIDR  # kube-proxy writes this default
        assert replace(ours, detect_local_mode=local) == load.load({}, {}, written.read_bytes()).config, flags


def test_written_configuration_round_trips_through_kube_proxy(kube_proxy: Path, tmp_path):
    """The real kube-proxy reads it in strict mode, without an unknown field."""
    theirs, ours, again = (tmp_path / name for name in ("theirs", "ours", "again"))
    run(str(kube_proxy), "--write-config-to", str(theirs))
    assert call(["run", "--config", str(theirs), "--write-config-to", str(ours)]) == 0
    assert not [note for note in load.load({}, {}, theirs.read_bytes()).notes if note.is_warning]
    command = (str(kube_proxy), "--config", str(ours), "--write-config-to", str(again))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "lenient" not in done.stderr
    before, after = yaml.safe_load(theirs.read_text()), yaml.safe_load(again.read_text())
    # A field that is empty or zero in one may be left out in the other.
    for config in (before, after):
        config["nodePortAddresses"] = config["nodePortAddresses"] or []
        config["ipvs"]["scheduler"] = config["ipvs"]["scheduler"] or "rr"
    assert after == before


def test_each_line_of_a_json_log_is_json_and_none_has_a_token(cluster: Kubeadm):
    """At the highest verbosity, while the API server restarts and refuses the old token, so that the
    new one is read.
    """
    with cluster.configured("logging: {format: json, verbosity: 10}"):
        before = len(cluster.agent.lines())
        cluster.new_token()
        cluster.api.kill()  # all connections are new
        cluster.api.restart()

        def told() -> list[dict[str, str]]:
            return [json.loads(line) for line in cluster.agent.lines()[before:]]

        # At last comes "watch recovered", which the slowest of the watches logs.
        expected = {"debug", "warning", "info"}
        until(
            "all levels are logged",
            lambda: expected <= {line["level"] for line in told()},
            state=lambda: cluster.agent.tail(12),
        )
        lines = told()
    assert all({"time", "level", "logger", "message"} == line.keys() for line in lines)
    token = (cluster.account.folder / "token").read_text()
    assert len(token) > 100
    assert token not in "\n".join(cluster.agent.lines())
