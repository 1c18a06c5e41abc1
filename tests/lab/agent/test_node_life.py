# SPDX-License-Identifier: Apache-2.0
"""What happens to a node in its life: it reboots, gets its pods' devices after kbpf, another name,
other addresses, IPv6. The objects are files, so that other kernels run this too, in both modes.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kbpf.kernel.net.ipvs import IpvsClient, IpvsCommand, IpvsRequest
from kbpf.kernel.system import netns
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, node, service, slice_port
from tests.support.cluster.scenario import FolderNode
from tests.support.lab.lab import MODE, Lab, Place, ip, run, until
from tests.support.lab.podnet import gate

OLD, OLD6, NEW, NEW6 = "198.18.0.1", "fd00:198:18::1", "198.18.0.77", "fd00:198:18::77"
RENAMED = "node-renamed"


WAYS = ("auto", "direct") if MODE == "bpf" else ("auto",)
in_any_way = pytest.mark.parametrize("home", WAYS[:1], indirect=True)
"""For tests in which packets take no other path by another `--forwarding`."""


@pytest.fixture(scope="module", params=WAYS)
def home(request, programs: None, tmp_path_factory) -> Iterator[FolderNode]:
    """A node with two pods that serve, and a client outside; its agent is not started. There is
    another node, without an agent.
    """
    folder = tmp_path_factory.mktemp("life") / "objects"
    way = ("--forwarding", request.param)
    with Lab(2, "nl", apart=True) as lab, FolderNode(lab, folder, 2, *way) as made:
        made.places["outside"] = outside = Place("outside", lab.outside, None)
        backends = [made[name] for name in ("a1", "a2")]
        made.write(
            [
                node("node-1", OLD, OLD6),
                *made.web(20, "a1", dual=True, type="NodePort", node_port=30020),
                service("local", cluster_ip="10.96.0.21", internal_policy="Local"),
                endpoint_slice(
                    "local",
                    endpoint(backends[0].ip, node="node-1"),
                    endpoint(backends[1].ip, node=RENAMED),
                    ports=[slice_port(8080)],
                ),
            ]
        )
        yield made
        outside.close()


@contextlib.contextmanager
def running(home: FolderNode, *arguments: str) -> Iterator[None]:
    """The agent runs with these additional arguments."""
    home.agent.start(extra=arguments)
    try:
        yield
    finally:
        home.agent.stop()


V4 = (("a2", "10.96.0.20", 80), ("host-1", "10.96.0.20", 80), ("outside", OLD, 30020))
V6 = (("a2", "fd00:10:96::20", 80), ("host-1", "fd00:10:96::20", 80), ("outside", OLD6, 30020))


def serves(home: FolderNode, *dials: tuple[str, str, int], backend: str = "a1") -> None:
    for client, host, port_number in dials:
        answer = home[client].many(8, host, port_number)
        assert answer["names"] == {backend: 8}, (client, host, answer, home.agent.tail())


def becomes_served(home: FolderNode, *dials: tuple[str, str, int]) -> None:
    """Waits until all are answered: new devices get their programs in another thread than the
    maps.
    """
    until(
        "new devices are served",
        lambda: all("name" in home[client].tcp(host, number, timeout=1) for client, host, number in dials),
    )


def is_unserved(home: FolderNode, *dials: tuple[str, str, int]) -> bool:
    return all("error" in home[client].tcp(host, number, timeout=1) for client, host, number in dials)


def forget_all(home: FolderNode) -> None:
    """What a reboot leaves of an agent that was killed: files on disk, nothing in the kernel."""
    home.agent.kill()
    home.agent.remove_pins()
    if MODE == "ipvs":
        folder = Path("/run/netns") / home.agent.node.netns
        netns.run_in(folder, delete_virtual_services)
        for command in ("nft flush ruleset", "ip link del kbpf-ipvs0"):
            run("nsenter", f"--net={folder}", *command.split())


def delete_virtual_services() -> None:
    with contextlib.closing(IpvsClient()) as client:
        delete = IpvsCommand.IPVS_CMD_DEL_SERVICE
        client.try_apply([IpvsRequest(delete, key) for key, _ in client.list_services()])
        assert client.list_services() == []


@in_any_way
def test_node_reboots(home: FolderNode):
    """The state folder of an earlier boot survives, as a hostPath on a disk does, with files that
    the crash cut off. Objects change meanwhile.
    """
    home.agent.start()
    serves(home, *V4, *V6)
    forget_all(home)
    until("nothing is attached any more", lambda: is_unserved(home, *V4, *V6))
    stale = home.agent.state_dir / "kbpf-ipvs0"
    stale.mkdir(parents=True, exist_ok=True)
    for name in ("lock", "status", "services"):
        (stale / name).write_text('[{"key":')
    home.write([home.slice("web-20", "a2")])
    with running(home):
        serves(home, *V4, backend="a2")
        serves(home, *V6)
        assert not home.agent.status()["problems"]
    home.write([home.slice("web-20", "a1")])


def test_pod_network_comes_after_the_agent(home: FolderNode):
    """A CNI plugin makes a Pod's devices while the agent runs."""
    with running(home):
        late = home.agent.node.pod("late").serve(8080)
        home.places["late"], home.home["late"] = late, home.agent.node
        home.write(home.web(30, "late", type="NodePort", node_port=30030))
        home.settle()
        dials = (("host-1", "10.96.0.30", 80), ("outside", OLD, 30030))
        becomes_served(home, *dials)
        serves(home, *dials, backend="late")
        assert late.many(8, "10.96.0.20", 80)["names"] == {"a1": 8}


@in_any_way
def test_renamed_node(home: FolderNode):
    """Endpoints of this node are those with its new name."""
    with running(home):
        serves(home, ("a2", "10.96.0.21", 80))
    with running(home, "--hostname-override", RENAMED):
        serves(home, ("a2", "10.96.0.21", 80), backend="a2")
        serves(home, *V4, *V6)


def test_addresses_of_the_node_change(home: FolderNode):
    """NodePorts answer on the new address, and no longer on the old one. A pod of this node sees a
    masqueraded client as the node's new address.
    """
    netns = home.agent.node.netns
    new = (("outside", NEW, 30020), ("outside", NEW6, 30020))
    old = (("outside", OLD, 30020), ("outside", OLD6, 30020))
    with running(home):
        serves(home, *old)
        try:
            readdress(netns, (OLD, OLD6), (NEW, NEW6))
            home.write([node("node-1", NEW, NEW6)])
            becomes_served(home, *new)
            serves(home, *new)
            for address in (NEW, NEW6):
                seen = home["outside"].many(1, address, 30020)["seen"]
                # MASQUERADE (mode ipvs) may choose the node's address in the network of its pods.
                own = gate(home.agent.node.number, ":" in address)
                allowed = {address, own} if MODE == "ipvs" else {address}
                assert {client for _, _, client, *_ in seen} <= allowed, seen
                assert seen
            # deleted after the new ones are written
            until("the old addresses are not served any more", lambda: is_unserved(home, *old))
            serves(home, *V4[:2], *V6[:2])
        finally:
            readdress(netns, (NEW, NEW6), (OLD, OLD6))
            home.write([node("node-1", OLD, OLD6)])


VIPS = (
    "addr add 198.18.1.2/32 dev lo scope host",
    "addr add 198.18.1.3/32 dev eth0 scope link",
    "route add local 198.18.1.4/32 dev lo",
    "addr add fd00:198:18:1::3/128 dev lo",
    "route add local fd00:198:18:1::4/128 dev lo table local",
)


@in_any_way
def test_node_ports_answer_on_all_addresses_of_the_node(home: FolderNode):
    """Of any scope, and those that no device has. They come while the agent runs, and go."""
    netns, vips = home.agent.node.netns, re.findall(r"(\S+)/", " ".join(VIPS))
    ways = [f"route add {vip} via {OLD6 if ':' in vip else OLD}" for vip in vips]
    dials = [(client, vip, 30020) for vip in vips for client in ("outside", "a2", "host-1")]
    ip(*ways, netns=home.agent.node.lab.outside)
    with running(home, "--nodeport-addresses", "all"):
        serves(home, *V4, *V6)
        ip(*VIPS, netns=netns)
        becomes_served(home, *dials)
        serves(home, *dials)
        ip(*(vip.replace(" add ", " del ") for vip in VIPS), netns=netns)
        until("none is served any more", lambda: is_unserved(home, *dials))
    ip(*(way.replace(" add ", " del ") for way in ways), netns=home.agent.node.lab.outside)


def readdress(netns: str, before: tuple[str, str], after: tuple[str, str]) -> None:
    """Replaces the addresses of eth0; with the last one of a family its routes go."""
    ip(
        f"""
        addr del {before[0]}/24 dev eth0
        addr del {before[1]}/64 dev eth0
        addr add {after[0]}/24 dev eth0
        addr add {after[1]}/64 dev eth0 nodad
        route replace default via 198.18.0.254
        route replace default via fd00:198:18::fe
        """,
        netns=netns,
    )


@in_any_way
def test_ipv6_is_switched_off_and_on_by_sysctl(home: FolderNode):
    """The agent starts without IPv6 and serves IPv4; once IPv6 is on, it serves that too, without
    a restart.
    """
    netns = home.agent.node.netns
    switch_ipv6_on = switch_ipv6_off(netns)
    try:
        with running(home):
            serves(home, *V4)
            assert is_unserved(home, *V6)
            switch_ipv6_on()
            becomes_served(home, *V6)
            serves(home, *V4, *V6)
    finally:
        switch_ipv6_on()


def switch_ipv6_off(netns: str) -> Callable[[], None]:
    """Sets net.ipv6.conf.*.disable_ipv6: the kernel deletes all addresses and routes of IPv6.
    Returns a function that switches it on again and restores them.
    """
    addresses = json.loads(run("ip", "-n", netns, "-6", "-j", "addr", "show"))
    routes = run("ip", "-n", netns, "-6", "route", "show")

    def write(value: int) -> None:
        for name in ("all", "default", "lo"):
            path = f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6"
            run("nsenter", f"--net=/run/netns/{netns}", "sh", "-c", f"echo {value} > {path}")

    def restore() -> None:
        write(0)
        ip(
            *(
                f"addr replace {info['local']}/{info['prefixlen']} dev {link['ifname']} nodad"
                for link in addresses
                for info in link["addr_info"]
            ),
            *(f"route replace {route}" for route in routes.splitlines()),
            netns=netns,
        )

    write(1)
    return restore
