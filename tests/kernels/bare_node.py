# SPDX-License-Identifier: Apache-2.0
"""A node without IPv6, conntrack, nftables and a mounted cgroup v2. tests.kernels boots a guest for
it, with BARE (tests/kernels/__main__.py) on the kernel's command line.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from tests.support.build import artifacts
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, node, port, service, slice_port
from tests.support.lab.lab import PATIENCE, V1_ONLY, Place, ip, run, until
from tests.support.lab.web import get

NODE_IP, CLIENT_IP, POD_IP, VIP = "198.18.0.1", "198.18.0.9", "10.244.1.2", "10.96.0.20"
OBJECTS = (
    node("bare", NODE_IP),
    service("web", port(80, node_port=30020), type="NodePort", cluster_ip=VIP),
    endpoint_slice("web", endpoint(POD_IP), ports=[slice_port(8080)]),
    service("dual", cluster_ips=("10.96.0.21", "fd00:10:96::21")),
    endpoint_slice("dual", endpoint("fd00:10:244::2"), ports=[slice_port(80)], family="IPv6"),
)


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, Place]]:
    """The node is this machine; a pod and a client outside are behind veth pairs."""
    made = {"host": Place("host", None, None)}
    sides = {"pod": ("10.244.1.1", POD_IP), "client": (NODE_IP, CLIENT_IP)}
    try:
        for name, (near, far) in sides.items():
            netns = f"bare-{name}-{os.getpid()}"
            run("ip", "netns", "add", netns)
            ip(
                f"""
                link add {name} type veth peer name eth0 netns {netns}
                addr add {near}/24 dev {name}
                link set {name} up
                """,
            )
            ip(
                f"""
                link set lo up
                addr add {far}/24 dev eth0
                link set eth0 up
                route add default via {near}
                """,
                netns=netns,
            )
            made[name] = Place(name, netns, None)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        made["pod"].serve(8080, address="0.0.0.0")
        yield made
    finally:
        for name, place in made.items():
            place.close()
            if name in sides:
                subprocess.run(["ip", "netns", "del", f"bare-{name}-{os.getpid()}"], check=False)


@pytest.fixture(scope="module")
def log(places: dict[str, Place], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The log of an agent that has started and synced."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "objects").mkdir()
    (folder / "objects" / "all.yaml").write_text(yaml.safe_dump_all(OBJECTS))
    command = (
        *V1_ONLY,
        *(sys.executable, "-m", "kbpf", "run", "--mode", "bpf", "--hostname-override", "bare"),
        *("--source", str(folder / "objects"), "--state-dir", str(folder / "state")),
        *("--cache-dir", str(artifacts.compiled())),
    )
    with (folder / "log").open("wb") as output, subprocess.Popen(command, stderr=output) as agent:
        try:
            until("the agent is ready", lambda: _is_ready(agent), 4 * PATIENCE)
            yield folder / "log"
        finally:
            agent.terminate()
            print((folder / "log").read_text())
    subprocess.run([sys.executable, "-m", "kbpf", "cleanup"], check=True)


def _is_ready(agent: "subprocess.Popen[bytes]") -> bool:
    assert agent.poll() is None
    try:
        return get(None, "127.0.0.1", 10256, "/readyz").status == 200
    except OSError:
        return False


DIALS = (("host", VIP, 80), ("pod", VIP, 80), ("client", NODE_IP, 30020), ("host", NODE_IP, 30020))


@pytest.mark.parametrize(("client", "host", "number"), DIALS)
def test_service_is_served(places: dict[str, Place], log: Path, client: str, host: str, number: int):
    answer = places[client].many(8, host, number)
    assert answer["names"] == {"pod": 8}, (answer, log.read_text())


def test_node_is_bare():
    assert not Path("/proc/net/if_inet6").exists()
    for module in ("nf_conntrack", "nf_tables"):
        loaded = subprocess.run(["modprobe", module], capture_output=True, check=False)
        assert loaded.returncode, f"{module} must be missing"


def test_agent_says_what_is_missing_and_has_no_error(log: Path):
    status = subprocess.run(
        [sys.executable, "-m", "kbpf", "inspect", "status", "-o", "json"], capture_output=True, check=True
    )
    assert msgspec.json.decode(status.stdout)["mode"] == "bpf"
    text = log.read_text()
    assert "mounted the cgroup v2 hierarchy for this process" in text
    assert "nf_conntrack is not loaded" in text
    assert not [line for line in text.splitlines() if "ERROR" in line or "Traceback" in line]


def test_check_finds_the_node_usable():
    command = (sys.executable, "-m", "kbpf", "check", "--cache-dir", str(artifacts.compiled()))
    done = subprocess.run([*V1_ONLY, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
