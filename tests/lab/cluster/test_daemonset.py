# SPDX-License-Identifier: Apache-2.0
"""What operators do with kube-proxy on a kubeadm cluster, with real objects on a real API server:
the DaemonSet is installed, restarted, deleted and recreated, pods are deleted, a node joins.

The kubelet is a fake (tests/support/cluster/daemonset.py); the containers are real: runc runs them
with what the pod's spec grants and nothing else.
"""

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.build import artifacts
from tests.support.cluster.daemonset import ROOT, PodAgent, PodCluster
from tests.support.cluster.kubectl import MANIFESTS
from tests.support.features import lacking
from tests.support.lab.dial import UNSERVED, Dial, check
from tests.support.lab.kept import Kept
from tests.support.lab.lab import PATIENCE, Place, cgroup2, on, run, until
from tests.support.lab.load import THREADS, Load, under_load

HOST, HOST6 = "10.96.0.20", "fd00:10:96::20"
NODE_PORT = 30020
SPACE = ("-n", "kube-system")
DAEMONSET = ("ds", "kube-proxy", f"--timeout={PATIENCE:.0f}s")


@pytest.fixture(scope="module")
def pods(programs: None, kubectl: Path) -> Iterator[PodCluster]:
    """A control plane node and a worker that run kbpf, a node that has not joined yet, and a client
    outside of the cluster. Pods are on a bridge, and an overlay joins the nodes.
    """
    with PodCluster(kubectl, 3, "d", "vxlan") as made:
        client = Place("outside", made.lab.outside, None)
        made.places["outside"], made.home["outside"] = client, made.lab.nodes[1]
        try:
            yield made
        finally:
            client.close()


def running(pods: PodCluster) -> list[PodAgent]:
    return [agent for agent in pods.pod_agents if agent.is_running]


@pytest.fixture(autouse=True)
def _as_before(pods: PodCluster) -> Iterator[None]:
    """Restores the DaemonSet of manifests/ after each test."""
    yield
    pods.kubectl("apply", "-k", str(pods.overlay))
    pods.kubelets.sync()


@pytest.fixture
def web(pods: PodCluster) -> Iterator[PodCluster]:
    """A Service with a backend on each node, for both families. tests/lab/cni dials all kinds of
    addresses on each kind of network.
    """
    made = pods.web(20, "a1 b1", dual=True, type="NodePort", node_port=NODE_PORT)
    pods.create(*made)
    pods.settle(*running(pods))
    yield pods
    pods.delete(*made)


def expect(cluster: PodCluster, client: str, to: str, outcome: str = "a1 b1") -> None:
    check(cluster, Dial("current state", client, to, outcome))


@contextlib.contextmanager
def connections(cluster: PodCluster, kept: tuple[str, ...] = ("a3", "outside"), may_fail: int = 0) -> Iterator[Load]:
    """Opens new connections throughout the block, by socket hooks and from outside. None may fail,
    except `may_fail` of those from outside. Connections that the clients `kept` have opened before
    must survive it.
    """
    worker = cluster.lab.nodes[1].ip
    ways = {"a3": (HOST, 80), "outside": (worker, NODE_PORT)}
    established = Kept(*((cluster[name], ways[name]) for name in kept))
    established.open()
    try:
        with (
            under_load(cluster, HOST, "a2", "host-2") as sockets,
            under_load(cluster, worker, "outside", port=NODE_PORT, may_fail=may_fail) as packets,
        ):
            yield Load((*sockets.places, *packets.places), may_fail)
        established.all_talk()
    finally:
        established.close()


def adopted(agents: list[PodAgent]) -> None:
    """Checks that the agents of the running pods adopted the pinned state. Their lines are in the
    log a moment after they are ready: runc copies them.
    """
    for agent in agents:
        until(
            "the agent says what it has attached",
            lambda agent=agent: any("hooks attached changed=" in line for line in agent.lines()),
        )
        said = "\n".join(agent.lines())
        assert "adopted=True" in said, said
        assert "hooks attached changed=0" in said, "no hook is attached again"


def test_a_rollout_restart_fails_no_connection(web: PodCluster):
    before = [agent.runs for agent in running(web)]
    with connections(web) as load:
        web.kubectl(*SPACE, "rollout", "restart", "ds", "kube-proxy")
        web.kubelets.sync()
        assert "successfully rolled out" in web.kubectl(*SPACE, "rollout", "status", *DAEMONSET)
        assert not {agent.runs for agent in running(web)} & set(before), "all containers are new"
        load.goes_on()
    adopted(running(web))


LAID_OUT = """

from dataclasses import replace as _replace

_grown = FormerLayout(MAPS["flows"].version, FLOW.size, lambda value: value + bytes(8))
MAPS["flows"] = _replace(MAPS["flows"], value_size=FLOW.size + 8, former_layouts=(_grown,))
MAPS["flow_scratch"] = _replace(MAPS["flow_scratch"], value_size=SCRATCH_SIZE + 8)
FLOW = Struct(FLOW.format + "8x")
for _name in set(MAPS) - {"flows", "flow_scratch", "new_flows_paused_until"}:
    MAPS[_name] = _replace(MAPS[_name], version=99)
"""
"""A version in which flows have one more field, and all other maps have another layout version.
Only `new_flows_paused_until` never changes: versions coordinate an upgrade by it.
"""
IN_C = "	struct next_hop out; /* of the packets that this entry matches */\n"


@pytest.fixture(scope="module")
def another_version(tmp_path_factory) -> Path:
    other = tmp_path_factory.mktemp("version") / "kbpf"
    shutil.copytree(ROOT / "kbpf", other, ignore=shutil.ignore_patterns("__pycache__"))
    layout, types = other / "dataplane/bpf/maps/layout.py", other / "bpf" / "types.h"
    layout.write_text(layout.read_text() + LAID_OUT)
    assert IN_C in types.read_text()
    types.write_text(types.read_text().replace(IN_C, IN_C + "	u64 more;\n"))
    # As in an image: a pod that compiles while other tests run may not be ready in time.
    compile_ahead = (sys.executable, "-P", "-m", "kbpf", "compile", "--cache-dir")
    run("env", f"PYTHONPATH={other.parent}", *compile_ahead, str(artifacts.compiled()))
    return other


def test_a_rolling_update_to_another_map_layout_and_back(web: PodCluster, another_version: Path):
    """The new version has new maps, to which entries are copied, and its programs replace those at
    the hooks. The version it goes back to does not know the new layout: connections of the packet
    path end there (docs/limits.md), and no others.
    """
    with connections(web) as load:
        update(web, "kbpf:0.2.0", another_version, load)
    # One that waits for its answer during the switch ends like any other of the packet path.
    with connections(web, kept=("a3",), may_fail=THREADS) as load:
        update(web, "kbpf:0.1.0", another_version, load)
    expect(web, "b2", f"{HOST}:80")


def update(web: PodCluster, image: str, another_version: Path, load: Load) -> None:
    """Makes a rolling update to this image; waits until the maps of the old version are gone."""
    agents = running(web)
    before = [sorted(p.name for p in agent.pin_dir.glob("maps-*")) for agent in agents]
    for agent in agents:
        agent.versions = {"kbpf:0.2.0": another_version}
    web.kubectl(*SPACE, "set", "image", "ds/kube-proxy", f"kube-proxy={image}")
    web.kubelets.sync()
    load.goes_on()
    for agent, names in zip(agents, before, strict=True):
        until(
            "only the new version's maps exist",
            lambda agent=agent, names=names: set(names).isdisjoint(p.name for p in agent.pin_dir.glob("maps-*")),
        )
        # A thread of the agent that a busy machine has stopped for ten seconds is a problem.
        until(
            "the packet path is on after the update",
            lambda agent=agent: packet_problems(agent) == ("", []),
            state=lambda agent=agent: packet_problems(agent),
        )


def packet_problems(agent: PodAgent) -> tuple[str, list[str]]:
    """What is wrong with the packet path as a whole, and the devices that have no programs."""
    status = agent.status()
    return status["packets"]["problem"], status["packets"]["failed"]


def test_a_joining_node_is_served(web: PodCluster):
    """The new node serves as soon as its agent is synced; traffic of the others is not
    disturbed.
    """
    expect(web, "c2", f"{HOST}:80", UNSERVED)
    with connections(web):
        joined = web.join()
    web.change(*[web.slice("web-20", "a1 b1 c1", v6=v6) for v6 in (False, True)], agents=running(web))
    assert joined in running(web)
    for client in ("c2", "host-3", "a2"):
        expect(web, client, f"{HOST}:80", "a1 b1 c1")
        expect(web, client, f"[{HOST6}]:80", "a1 b1 c1")


def test_the_cleanup_daemonset_removes_kbpf_from_the_nodes(web: PodCluster):
    """A cleanup DaemonSet's pod becomes ready once its node is clean. While an agent runs it
    neither becomes ready nor stops it. It finds the pins where the ConfigMap says.
    """
    agents, cleanup = running(web), str(MANIFESTS / "cleanup")
    web.kubectl("apply", "-k", cleanup)
    web.kubelets.sync()
    (found,) = web.kubectl.objects(*SPACE, "get", "ds", "kbpf-cleanup")
    assert found["status"].get("numberReady", 0) == 0
    assert all(agent.is_running and agent.pin_dir.exists() for agent in agents)
    web.kubectl("delete", "-k", cleanup)
    web.kubectl(*SPACE, "delete", "daemonset", "kube-proxy")
    web.kubelets.sync()
    expect(web, "a2", f"{HOST}:80")
    own = {"apiVersion": "kbpf.io/v1alpha1", "kind": "KbpfConfiguration"}
    for agent in agents:
        agent.pin_dir.rename(agent.bpffs / "elsewhere")
    told = {"data": {"config.conf": json.dumps({**own, "pinDir": "/sys/fs/bpf/elsewhere"})}}
    web.kubectl(*SPACE, "patch", "cm", "kube-proxy", "--type=merge", "-p", json.dumps(told))
    web.kubectl("apply", "-k", cleanup)
    try:
        web.kubelets.sync()
        said = web.kubectl(*SPACE, "rollout", "status", "ds", "kbpf-cleanup", DAEMONSET[-1])
        assert "successfully rolled out" in said
        for agent in agents:
            assert list(agent.bpffs.iterdir()) == []
        for client, to in (("a2", f"{HOST}:80"), ("host-2", f"[{HOST6}]:80")):
            expect(web, client, to, UNSERVED)
    finally:
        web.kubectl("delete", "-k", cleanup)
        web.kubelets.sync()


# ---- what the container may do -----------------------------------------------------------


def test_the_nodes_cgroup_root_is_found_in_a_cgroup_namespace(pods: PodCluster):
    """The container has its own cgroup namespace. Agents of the lab get --cgroup, since the root of
    a lab node is not a real one; here the container gets the machine's root mounted and no flag.
    """
    agent = pods.pod_agents[0]
    code = "from kbpf.kernel.system import mounts; print(mounts.find_cgroup_root())"
    said = pods.kubelets.try_out(agent, ["python3", "-c", code], {"/sys/fs/cgroup": Path("/sys/fs/cgroup")})
    assert said == f"/host{cgroup2()}"


def test_sysctls_of_the_node_are_set_from_the_container(pods: PodCluster):
    """A container's own /proc/sys is read-only. The agent sets conntrack's time-outs to
    kube-proxy's values, and keeps the ports of masqueraded clients out of the range of the node's
    sockets.
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
    """A file's text in the node's network namespace; `text` is written to it first, if given."""
    if text is not None:
        on(agent.node, "sh", "-c", f"echo '{text}' > {path}")
    return on(agent.node, "cat", path).strip()


OURS = {"type": "Localhost", "localhostProfile": "kbpf.json"}
DEFAULT, NONE = {"type": "RuntimeDefault"}, {"type": "Unconfined"}


ROWS = {
    "as in manifests/": ("BPF NET_ADMIN PERFMON SYS_ADMIN SYS_RESOURCE", DEFAULT, True, ""),
    "without NET_ADMIN": ("BPF PERFMON SYS_ADMIN", DEFAULT, True, "cannot destroy a UDP socket (sock_diag): EPERM"),
    "without SYS_ADMIN": ("BPF NET_ADMIN PERFMON", OURS, True, "cannot enter the network namespace"),
    "without SYS_ADMIN and BPF": ("NET_ADMIN PERFMON", NONE, False, "cannot create the map"),
    "without SYS_ADMIN and PERFMON": ("NET_ADMIN BPF", NONE, False, "the kernel refuses the program"),
}
"""The container's capabilities and the outcome. `seccomp`: the profile; some versions of the
runtime's default allow bpf(2) with SYS_ADMIN only. `starts`: whether the agent starts. `said`: the
error in its log, "" for none.
"""


@pytest.mark.parametrize("name", ROWS)
def test_capabilities_that_the_agent_needs(pods: PodCluster, name: str):
    """Without pins of an earlier agent. A pod's UDP socket is aborted when its backend is removed,
    or the log says why not.
    """
    granted, seccomp, starts, said = ROWS[name]
    if starts and lacking("socket_iterator"):
        said = "the kernel refuses the iterator of socket storages"
    agent = pods.pod_agents[0]
    assert agent.stop() == 0
    agent.remove_pins()
    path = "/spec/template/spec/containers/0/securityContext"
    changes = [
        {"op": "replace", "path": f"{path}/capabilities/add", "value": granted.split()},
        {"op": "replace", "path": f"{path}/seccompProfile", "value": seccomp},
    ]
    pods.kubectl(*SPACE, "patch", "ds", "kube-proxy", "--type=json", "-p", json.dumps(changes))
    dns, client = pods.web(21, "a1", "UDP"), pods["a3"]
    pods.create(*dns)
    try:
        pods.kubelets.launch(agent)
        if not starts:
            assert agent.wait_ended() == 1
            assert said in agent.tail()
            return
        agent.wait_synced()
        client.udp("10.96.0.21", 80, keep="udp", connected=True)
        pods.kube.replace(pods.web(21, "a2", "UDP")[1])
        if said:
            until(f"{said!r} is logged", lambda: any(said in line for line in agent.lines()))
        else:
            pods.settle(agent)
            assert client.ask("hear", keep="udp") == {"error": "ECONNABORTED"}, agent.tail()
        client.ask("drop", keep="udp")
        assert agent.stop() == 0
        pods.kubelets.launch(agent)  # adopts the pins of the first start
        agent.wait_synced()
    finally:
        pods.delete(*dns)
        usual = {"op": "replace", "path": f"{path}/seccompProfile", "value": DEFAULT}
        pods.kubectl(*SPACE, "patch", "ds", "kube-proxy", "--type=json", "-p", json.dumps([usual]))
