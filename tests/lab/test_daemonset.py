"""What operators do with kube-proxy on a kubeadm cluster, with real objects on the real API server:
the DaemonSet is installed, restarted, deleted, made anew; pods are deleted; a node joins.

What a kubelet would do is done by a fake, tests/support/daemonset.py; the containers are real: runc
runs them with what the pod's spec grants, and nothing else.
"""

import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.daemonset import ROOT, PodAgent, PodCluster, asked
from tests.support.dial import UNSERVED, Dial, check
from tests.support.kubectl import MANIFESTS
from tests.support.lab import cgroup2, inside, run, until
from tests.support.load import Load, under_load
from tests.support.pods import CAPABILITIES, capabilities_here

HOST, HOST6 = "10.96.0.20", "fd00:10:96::20"
VIP = "203.0.113.20"
NODE_PORT = 30020
SPACE = ("-n", "kube-system")


@pytest.fixture(scope="module")
def pods(programs: None, kubectl: Path) -> Iterator[PodCluster]:
    """A control plane node and a worker that run kbpf, and a node that has not joined yet."""
    with PodCluster(kubectl, 3, "d") as made:
        yield made


def running(pods: PodCluster) -> list[PodAgent]:
    return [agent for agent in pods.pod_agents if agent.is_running]


@pytest.fixture(autouse=True)
def _as_before(pods: PodCluster) -> Iterator[None]:
    """Whatever a test leaves behind, the next one finds the DaemonSet as it is in manifests/."""
    yield
    pods.kubectl("apply", "-k", str(pods.overlay))
    pods.kubelets.sync()


@pytest.fixture
def web(pods: PodCluster) -> Iterator[PodCluster]:
    """A Service with a backend on each node, under all kinds of addresses."""
    made = pods.web(20, "a1 b1", dual=True, type="LoadBalancer", node_port=NODE_PORT)
    made[0]["status"] = {"loadBalancer": {"ingress": [{"ip": VIP}]}}
    pods.create(*made)
    pods.settle(*running(pods))
    yield pods
    pods.delete(*made)


def expect(cluster: PodCluster, client: str, to: str, outcome: str = "a1 b1") -> None:
    check(cluster, Dial("now", client, to, outcome))


def test_every_kind_of_address_from_every_node_and_its_pods(web: PodCluster) -> None:
    """The first node is a control plane, with its taint."""
    addresses = [f"{HOST}:80", f"[{HOST6}]:80", f"{VIP}:80"]
    for client, to in itertools.product(
        ("a2", "host-1", "a-net", "b2", "host-2", "b-net"), addresses
    ):
        expect(web, client, to)
    for client, home in (("a2", 1), ("host-1", 1), ("b2", 2), ("host-2", 2)):
        expect(web, client, f"198.18.0.{home}:{NODE_PORT}")


@contextlib.contextmanager
def connections(cluster: PodCluster) -> Iterator[Load]:
    """New ones all the time, of which none may fail, and an established one that lives on."""
    client = cluster["a3"]
    client.tcp(HOST, 80, keep="kept")
    try:
        with under_load(cluster, HOST, "a2", "host-2") as load:
            yield load
        assert "name" in client.ask("talk", keep="kept"), "the established connection"
    finally:
        client.ask("drop", keep="kept")


def adopted(agents: list[PodAgent]) -> None:
    """The pods that run now took over what they found."""
    for agent in agents:
        said = "\n".join(agent.lines())
        assert "adopted=True" in said, said
        assert "hooks_changed=0" in said, "nothing had to be attached anew"


def test_rollout_restart(web: PodCluster) -> None:
    before = [agent.runs for agent in running(web)]
    with connections(web) as load:
        web.kubectl(*SPACE, "rollout", "restart", "ds", "kube-proxy")
        web.kubelets.sync()
        assert not {agent.runs for agent in running(web)} & set(before), "all are others"
        load.goes_on()
    adopted(running(web))


def test_rolling_update_to_a_version_with_another_layout_and_back(
    web: PodCluster, tmp_path: Path
) -> None:
    """Its maps are others, so what they hold is copied; its programs take the hooks over."""
    other = tmp_path / "kbpf"
    shutil.copytree(ROOT / "kbpf", other, ignore=shutil.ignore_patterns("__pycache__"))
    layout = other / "dataplane" / "bpf" / "layout.py"
    layout.write_text(
        layout.read_text() + "\n\nfor _name in ('services', 'backends', 'sock_peers'):\n"
        "    MAPS[_name] = __import__('dataclasses').replace(MAPS[_name], version=99)\n"
    )
    agents = running(web)
    with connections(web) as load:
        for image in ("kbpf:0.2.0", "kbpf:0.1.0"):
            before = [sorted(p.name for p in agent.pin_dir.glob("maps-*")) for agent in agents]
            for agent in agents:
                agent.versions = {"kbpf:0.2.0": other}
            web.kubectl(*SPACE, "set", "image", "ds/kube-proxy", f"kube-proxy={image}")
            web.kubelets.sync()
            load.goes_on()
            for agent, names in zip(agents, before, strict=True):
                until(
                    "it has maps of its own, and the others are gone",
                    lambda agent=agent, names=names: set(names).isdisjoint(
                        p.name for p in agent.pin_dir.glob("maps-*")
                    ),
                )
    expect(web, "b2", f"{HOST}:80")


def test_pods_are_deleted(web: PodCluster) -> None:
    agents = running(web)
    with connections(web) as load:
        for agent in agents:
            web.kubelets.delete_pod(agent)
        load.goes_on()
        web.kubelets.sync()
    assert running(web) == agents
    adopted(agents)


def test_all_objects_are_deleted_and_made_anew(web: PodCluster) -> None:
    """Traffic goes on, without an account, a ConfigMap or a pod; what changed meanwhile is made up
    for.
    """
    agents = running(web)
    folder = str(web.overlay)
    with connections(web) as load:
        web.kubectl("delete", "-k", folder)
        web.kubelets.sync()
        assert not running(web)
        load.goes_on()
        web.kube.replace(web.slice("web-20", "a1"))
        expect(web, "b2", f"{HOST}:80", "a1 b1")
        web.kubectl("apply", "-k", folder)
        web.kubelets.sync()
        assert running(web) == agents
    adopted(agents)
    for client in ("a2", "b2"):
        expect(web, client, f"{HOST}:80", "a1")


def test_a_node_joins(web: PodCluster) -> None:
    """It serves from the first pass on; nobody else notices."""
    expect(web, "c2", f"{HOST}:80", UNSERVED)
    with connections(web):
        joined = web.join()
    web.change(
        *[web.slice("web-20", "a1 b1 c1", v6=v6) for v6 in (False, True)], agents=running(web)
    )
    assert joined in running(web)
    for client in ("c2", "host-3", "a2"):
        expect(web, client, f"{HOST}:80", "a1 b1 c1")
        expect(web, client, f"[{HOST6}]:80", "a1 b1 c1")


def test_kbpf_is_taken_off_the_nodes(web: PodCluster) -> None:
    """By a DaemonSet whose pods get ready when their node is clean; nothing before has ended it."""
    agents, cleanup = running(web), str(MANIFESTS / "cleanup")
    web.kubectl("delete", "-k", str(web.overlay))
    web.kubelets.sync()
    expect(web, "a2", f"{HOST}:80")
    web.kubectl("apply", "-k", cleanup)
    try:
        (found,) = web.kubectl.objects(*SPACE, "get", "ds")
        (container,) = found["spec"]["template"]["spec"]["containers"]
        ready = container["readinessProbe"]["exec"]["command"]
        for agent in agents:
            web.kubelets.launch(agent)
            until("its pod is ready", lambda agent=agent: agent.exec(*ready).returncode == 0)
            assert agent.is_running, "and stays: it would be started again"
            agent.kill()
            assert list(agent.bpffs.iterdir()) == []
        for client, to in (("a2", f"{HOST}:80"), ("host-2", f"[{HOST6}]:80")):
            expect(web, client, to, UNSERVED)
    finally:
        web.kubectl("delete", "-k", cleanup)


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_its_probes(pods: PodCluster, probe: str) -> None:
    """Asked as a kubelet asks them: at the node's address."""
    agent = pods.pod_agents[1]
    (found,) = pods.kubectl.objects(*SPACE, "get", "ds", "kube-proxy")
    probe_of = found["spec"]["template"]["spec"]["containers"][0][probe]["httpGet"]
    port, path = probe_of["port"], probe_of["path"]
    until("it is well", lambda: asked(agent, port, path) == 200)


IN_THE_POD = [
    ("inspect", "status"),
    ("inspect", "service", "default/kubernetes"),
    ("check",),
    ("check", "--attached"),
]


@pytest.mark.parametrize("command", IN_THE_POD, ids=" ".join)
def test_kbpf_in_the_pod(pods: PodCluster, command: tuple[str, ...]) -> None:
    """`kubectl exec`: the container can do what its own checks ask for."""
    said = []

    def well() -> bool:
        done = pods.pod_agents[0].exec("kbpf", *command)
        said[:] = [done.stdout, done.stderr]
        return done.returncode == 0

    try:
        until("it ends with 0", well)
    except AssertionError as error:
        error.add_note("\n".join(said))
        raise


def test_its_account_may_send_events(pods: PodCluster) -> None:
    """Of each start on a node."""

    def reported() -> set[str]:
        rows = pods.kube.list("Event")["items"]
        return {row["regarding"]["name"] for row in rows if row["reason"] == "Starting"}

    until("both nodes' agents have", lambda: {"node-1", "node-2"} <= reported())


# ---- what the container may do -----------------------------------------------------------


def test_the_container_has_what_the_spec_grants_and_no_more(pods: PodCluster) -> None:
    """So that the other tests prove it enough."""
    wanted = capabilities_here(CAPABILITIES)
    status = Path(f"/proc/{pods.pod_agents[0].pid}/status").read_text()
    facts = dict(re.findall(r"^(\w+):\t(\S+)$", status, re.M))
    for kind in ("CapPrm", "CapEff", "CapBnd"):
        assert int(facts[kind], 16) == sum(1 << CAPABILITIES[name] for name in wanted), kind
    assert (int(facts["CapInh"], 16), int(facts["CapAmb"], 16)) == (0, 0)
    assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")


def test_it_finds_the_nodes_cgroup_root(pods: PodCluster) -> None:
    """It has a cgroup namespace of its own. The lab tells its agents where the root is, since that
    of a lab's node is no real one; here the container is given the machine's, and told nothing.
    """
    agent = pods.pod_agents[0]
    code = "from kbpf.kernel import mounts; print(mounts.cgroup_root())"
    said = pods.kubelets.try_out(
        agent, ["python3", "-c", code], {"/sys/fs/cgroup": Path("/sys/fs/cgroup")}
    )
    assert said == f"/host{cgroup2()}"


def test_it_sets_what_has_to_be_set_below_proc_sys(pods: PodCluster) -> None:
    """A container's own /proc/sys is read-only. Here: conntrack's times as kube-proxy has them, and
    the ports of masqueraded clients are kept clear of the node's sockets.
    """
    agent = pods.pod_agents[0]
    close_wait = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close_wait"
    until("conntrack is set", lambda: node_file(agent, close_wait) == "3600")
    ports = "/proc/sys/net/ipv4/ip_local_port_range"
    before = node_file(agent, ports)
    try:
        node_file(agent, ports, "10000 60999")
        reserved = "/proc/sys/net/ipv4/ip_local_reserved_ports"
        until("the ports are reserved", lambda: node_file(agent, reserved) == "1024-29999")
    finally:
        node_file(agent, ports, before)


def node_file(agent: PodAgent, path: str, text: str | None = None) -> str:
    """What stands in a file as the node's network namespace has it; written before, if asked."""
    if text is not None:
        run(*inside(agent.node.netns, None, "sh", "-c", f"echo '{text}' > {path}"))
    return run(*inside(agent.node.netns, None, "cat", path)).strip()


class Row(NamedTuple):
    """What the container is granted, and what comes of it. `seccomp`: instead of the default
    profile, which lets only SYS_ADMIN call bpf(2) in some versions. `starts`: whether the agent
    comes up; `said`: what its log says is wrong.
    """

    name: str
    granted: str
    seccomp: bool
    starts: bool
    said: str


ROWS = [
    Row("as in manifests/", "BPF NET_ADMIN PERFMON SYS_ADMIN SYS_RESOURCE", True, True, ""),
    Row("without NET_ADMIN", "BPF PERFMON SYS_ADMIN", True, True,
        "cannot destroy a UDP socket (sock_diag): EPERM"),
    Row("without SYS_ADMIN", "BPF NET_ADMIN PERFMON", False, True,
        "cannot enter the network namespace"),
    Row("without SYS_ADMIN and BPF", "NET_ADMIN PERFMON", False, False, "cannot create the map"),
    Row("without SYS_ADMIN and PERFMON", "NET_ADMIN BPF", False, False,
        "the kernel refuses the program"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_which_capabilities_it_needs(pods: PodCluster, row: Row) -> None:
    """On a node that kbpf has never run on. A UDP socket of a pod, whose backend goes, is cut; or
    the log says why not.
    """
    agent = pods.pod_agents[0]
    assert agent.stop() == 0
    agent.remove_pins()
    path = "/spec/template/spec/containers/0/securityContext"
    changes = [
        {"op": "replace", "path": f"{path}/capabilities/add", "value": row.granted.split()},
        *([] if row.seccomp else [{"op": "replace", "path": f"{path}/seccompProfile/type",
                                   "value": "Unconfined"}]),
    ]  # fmt: skip
    pods.kubectl(*SPACE, "patch", "ds", "kube-proxy", "--type=json", "-p", json.dumps(changes))
    dns, client = pods.web(21, "a1", "UDP"), pods["a3"]
    pods.create(*dns)
    try:
        pods.kubelets.launch(agent)
        if not row.starts:
            assert agent.wait_ended() == 1
            assert row.said in agent.tail()
            return
        agent.wait_synced()
        client.udp("10.96.0.21", 80, keep="udp", connected=True)
        pods.kube.replace(pods.web(21, "a2", "UDP")[1])
        if row.said:
            until(f"it says {row.said}", lambda: row.said in agent.tail(30))
        else:
            pods.settle(agent)
            assert client.ask("hear", keep="udp") == {"error": "ECONNABORTED"}, agent.tail()
        client.ask("drop", keep="udp")
    finally:
        pods.delete(*dns)
