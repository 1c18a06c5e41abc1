# SPDX-License-Identifier: Apache-2.0
"""Which devices get programs, on nodes as CNIs, clouds and operators set them up."""

from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.layout import MAX_DEVICES
from kbpf.dataplane.bpf.packet_path.device_roles import (
    DeviceRole,
    assign_roles,
    count_left_out,
    decide_roles,
    describe_left_out,
    find_unmatched,
)
from kbpf.kernel.net.devices import Device
from kbpf.kernel.net.uapi import ARPHRD_ETHER, ARPHRD_NONE

HOST, POD, PORT, SKIPPED = DeviceRole.HOST, DeviceRole.POD, DeviceRole.PORT, DeviceRole.SKIPPED
LOOPBACK, TUNNEL, INFINIBAND, CAN = 772, 768, 32, 280


class Row(NamedTuple):
    """A device: its name, its kind, its master and its role. The kind has suffixes: ``/pod`` for a
    peer in another namespace, ``/net`` for an address in a subnet, ``/down`` for a device that is
    down, ``/nf`` for a bridge whose packets pass netfilter.
    """

    name: str
    kind: str
    role: DeviceRole
    master: str = ""
    link_type: int = ARPHRD_ETHER


def devices(rows: tuple[Row, ...]) -> tuple[Device, ...]:
    index = {row.name: number for number, row in enumerate(rows, 1)}
    listing = []
    for row in rows:
        kind, *suffixes = row.kind.split("/")
        listing.append(
            Device(
                ifindex=index[row.name],
                name=row.name,
                kind=kind,
                up="down" not in suffixes,
                loopback=row.name == "lo",
                link_type=row.link_type,
                master=index[row.master] if row.master else 0,
                peer_netns=3 if "pod" in suffixes else None,
                has_subnet="net" in suffixes,
                bridge_netfilter="nf" in suffixes,
            )
        )
    return tuple(listing)


class Shape(NamedTuple):
    """The devices of a node, and the operator's settings."""

    name: str
    rows: tuple[Row, ...]
    patterns: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()


LO = Row("lo", "", SKIPPED, link_type=LOOPBACK)
ETH0 = Row("eth0", "/net", HOST)

SHAPES = [
    Shape("a node without pods", (LO, ETH0)),
    Shape(
        "flannel: a bridge of pods, the overlay beside it",
        (
            LO,
            ETH0,
            Row("flannel.1", "vxlan/net", HOST),
            Row("cni0", "bridge/net", POD),
            Row("veth1a2b", "veth/pod", SKIPPED, master="cni0"),
            Row("veth3c4d", "veth/pod", SKIPPED, master="cni0"),
        ),
    ),
    Shape(
        "flannel with br_netfilter",
        (
            LO,
            ETH0,
            Row("flannel.1", "vxlan/net", HOST),
            Row("cni0", "bridge/net/nf", POD),
            Row("veth1a2b", "veth/pod", PORT, master="cni0"),
            Row("veth3c4d", "veth/pod/down", PORT, master="cni0"),
        ),
    ),
    Shape(
        "weave with br_netfilter",
        (
            LO,
            ETH0,
            Row("weave", "bridge/net/nf", POD),
            Row("datapath", "openvswitch", SKIPPED),
            Row("vxlan-6784", "vxlan", SKIPPED, master="datapath"),
            Row("vethwe-bridge", "veth", PORT, master="weave"),
            Row("vethwepl0123456", "veth/pod", PORT, master="weave"),
        ),
    ),
    Shape(
        "br_netfilter: a bridge of pods with an overlay and a dummy",
        (
            LO,
            ETH0,
            Row("br0", "bridge/net/nf", POD),
            Row("vxlan5", "vxlan", PORT, master="br0"),
            Row("mac0", "dummy", SKIPPED, master="br0"),
        ),
    ),
    Shape(
        "br_netfilter: a bond in a bridge with virtual machines",
        (
            LO,
            Row("eno1", "", SKIPPED, master="bond0"),
            Row("bond0", "bond", PORT, master="br0"),
            Row("vnet0", "tun", PORT, master="br0"),
            Row("br0", "bridge/net/nf", HOST),
        ),
    ),
    Shape(
        "br_netfilter: a bridge in a VRF",
        (
            LO,
            Row("red", "vrf", SKIPPED),
            Row("br1", "bridge/nf", POD, master="red"),
            Row("veth1", "veth/pod", PORT, master="br1"),
        ),
    ),
    Shape(
        "br_netfilter: a bridge of pods, while the operator names the host devices",
        (
            LO,
            ETH0,
            Row("br0", "bridge/net/nf", SKIPPED),
            Row("eth1", "", SKIPPED, master="br0"),
            Row("cni0", "bridge/nf", POD),
            Row("veth1a2b", "veth/pod", PORT, master="cni0"),
        ),
        patterns=("eth0",),
    ),
    Shape(
        "br_netfilter: excluded bridges and ports",
        (
            LO,
            ETH0,
            Row("docker0", "bridge/nf", SKIPPED),
            Row("veth1", "veth/pod", SKIPPED, master="docker0"),
            Row("cni0", "bridge/nf", POD),
            Row("veth2", "veth/pod", SKIPPED, master="cni0"),
        ),
        excluded=("docker?", "veth2"),
    ),
    Shape(
        "flannel before its first pod: the bridge is empty and down", (LO, ETH0, Row("cni0", "bridge/net/down", POD))
    ),
    Shape(
        "flannel over WireGuard, host-gw: no overlay at all",
        (LO, ETH0, Row("flannel-wg", "wireguard/net", HOST, link_type=ARPHRD_NONE)),
    ),
    Shape(
        "calico, routed, IPIP",
        (
            LO,
            ETH0,
            Row("tunl0", "ipip", HOST, link_type=TUNNEL),
            Row("cali0123456789a", "veth/pod", POD),
            Row("calibcdef012345", "veth/pod", POD),
        ),
    ),
    Shape(
        "flannel, IPIP",
        (
            LO,
            ETH0,
            Row("tunl0", "ipip/down", HOST, link_type=TUNNEL),
            Row("flannel.ipip", "ipip", HOST, link_type=TUNNEL),
            Row("cni0", "bridge/net", POD),
        ),
    ),
    Shape(
        "kube-router: a tunnel for each node of another subnet",
        (
            LO,
            ETH0,
            Row("tunl0", "ipip/down", HOST, link_type=TUNNEL),
            Row("tun-19818002", "ipip", HOST, link_type=TUNNEL),
            Row("kube-bridge", "bridge/net", POD),
        ),
    ),
    Shape(
        "calico, VXLAN and WireGuard",
        (
            LO,
            ETH0,
            Row("vxlan.calico", "vxlan", HOST),
            Row("vxlan-v6.calico", "vxlan", HOST),
            Row("wireguard.cali", "wireguard", HOST, link_type=ARPHRD_NONE),
            Row("cali0123456789a", "veth/pod", POD),
        ),
    ),
    Shape(
        "cilium, VXLAN: its own cable has both ends here",
        (
            LO,
            ETH0,
            Row("cilium_net", "veth", HOST),
            Row("cilium_host", "veth", HOST),
            Row("cilium_vxlan", "vxlan", HOST),
            Row("lxc_health", "veth/pod", POD),
            Row("lxc0a1b2c3d4e5f", "veth/pod", POD),
        ),
    ),
    Shape("cilium, netkit", (LO, ETH0, Row("lxc0a1b2c3d4e5f", "netkit/pod", POD))),
    Shape(
        "kind: the node is a container, eth0 is a cable; kindnet's ends have a /32",
        (LO, Row("eth0", "veth/pod/net", HOST), Row("veth5e6f7a8b", "veth/pod", POD)),
    ),
    Shape(
        "kind with calico",
        (
            LO,
            Row("eth0", "veth/pod/net", HOST),
            Row("tunl0", "ipip/down", HOST, link_type=TUNNEL),
            Row("cali0123456789a", "veth/pod", POD),
        ),
    ),
    Shape(
        "weave: ports of the bridge are pods and a cable to its switch",
        (
            LO,
            ETH0,
            Row("weave", "bridge/net", POD),
            Row("datapath", "openvswitch", SKIPPED),
            Row("vxlan-6784", "vxlan", SKIPPED, master="datapath"),
            Row("vethwe-datapath", "veth", SKIPPED, master="datapath"),
            Row("vethwe-bridge", "veth", SKIPPED, master="weave"),
            Row("vethwepl0123456", "veth/pod", SKIPPED, master="weave"),
        ),
    ),
    Shape(
        "AWS VPC CNI: routed cables, a second interface, a VLAN per pod with its own group",
        (
            LO,
            Row("ens5", "/net", HOST),
            Row("ens6", "", HOST),
            Row("eni0123456789a", "veth/pod", POD),
            Row("vlanbcdef012345", "veth/pod", POD),
            Row("vlan.eth.1", "vlan", HOST),
        ),
    ),
    Shape("GKE, ptp: a cable per pod", (LO, ETH0, Row("gke0123456789a", "veth/pod", POD))),
    Shape(
        "Azure, bridge mode: the uplink is a port of the pods' bridge",
        (
            LO,
            Row("eth0", "", SKIPPED, master="azure0"),
            Row("azure0", "bridge/net", HOST),
            Row("azv0123456", "veth/pod", SKIPPED, master="azure0"),
        ),
    ),
    Shape(
        "kubenet: cbr0", (LO, ETH0, Row("cbr0", "bridge/net", POD), Row("veth0a", "veth/pod", SKIPPED, master="cbr0"))
    ),
    Shape(
        "a bridge of pods with an overlay and a dummy that gives it its address",
        (
            LO,
            ETH0,
            Row("br0", "bridge/net", POD),
            Row("vxlan5", "vxlan", SKIPPED, master="br0"),
            Row("mac0", "dummy", SKIPPED, master="br0"),
            Row("veth0a", "veth/pod", SKIPPED, master="br0"),
        ),
    ),
    Shape(
        "antrea: one switch for all, its gateway is the way in",
        (
            LO,
            ETH0,
            Row("ovs-system", "openvswitch/down", SKIPPED),
            Row("antrea-gw0", "openvswitch/net", HOST),
            Row("coredns--1a2b3c", "veth/pod", SKIPPED, master="ovs-system"),
        ),
    ),
    Shape(
        "Open vSwitch with the uplink in it",
        (
            LO,
            Row("ovs-system", "openvswitch/down", SKIPPED),
            Row("eth0", "", SKIPPED, master="ovs-system"),
            Row("br-ex", "openvswitch/net", HOST),
            Row("br-int", "openvswitch/down", SKIPPED),
            Row("genev_sys_6081", "geneve", SKIPPED, master="ovs-system"),
        ),
    ),
    Shape(
        "a bond of two, with VLANs on it",
        (
            LO,
            Row("eno1", "", SKIPPED, master="bond0"),
            Row("eno2", "", SKIPPED, master="bond0"),
            Row("bond0", "bond", HOST),
            Row("bond0.100", "vlan/net", HOST),
            Row("bond0.200", "vlan/net", HOST),
        ),
    ),
    Shape("a team", (LO, Row("eno1", "", SKIPPED, master="team0"), Row("team0", "team/net", HOST))),
    Shape(
        "a bond in a bridge with virtual machines",
        (
            LO,
            Row("eno1", "", SKIPPED, master="bond0"),
            Row("bond0", "bond", SKIPPED, master="br0"),
            Row("vnet0", "tun", SKIPPED, master="br0"),
            Row("br0", "bridge/net", HOST),
        ),
    ),
    Shape(
        "libvirt and docker beside the cluster",
        (
            LO,
            ETH0,
            Row("virbr0", "bridge/net", HOST),
            Row("vnet1", "tun", SKIPPED, master="virbr0"),
            Row("docker0", "bridge/net/down", POD),
            Row("br-0a1b2c3d4e5f", "bridge/net", POD),
            Row("veth9", "veth/pod", SKIPPED, master="br-0a1b2c3d4e5f"),
        ),
    ),
    Shape(
        "macvlan of the host, macvtap of a virtual machine, ipvlan",
        (
            LO,
            ETH0,
            Row("shim0", "macvlan/net", HOST),
            Row("ipvl0", "ipvlan/net", HOST),
            Row("macvtap0", "macvtap", SKIPPED),
        ),
    ),
    Shape(
        "VPNs: WireGuard, tun, PPP, XFRM",
        (
            LO,
            ETH0,
            Row("wg0", "wireguard", HOST, link_type=ARPHRD_NONE),
            Row("tun0", "tun", HOST, link_type=ARPHRD_NONE),
            Row("ppp0", "ppp", HOST, link_type=512),
            Row("ipsec0", "xfrm", HOST, link_type=ARPHRD_NONE),
        ),
    ),
    Shape(
        "a VRF: its ports show the packets",
        (
            LO,
            Row("red", "vrf", SKIPPED),
            Row("eth0", "/net", HOST, master="red"),
            Row("br1", "bridge", POD, master="red"),
            Row("veth1", "veth/pod", POD, master="red"),
        ),
    ),
    Shape(
        "what never carries a Service's packets",
        (
            LO,
            ETH0,
            Row("kube-ipvs0", "dummy", SKIPPED),
            Row("nodelocaldns", "dummy/net", SKIPPED),
            Row("kbpf-ipvs0", "dummy", SKIPPED),
            Row("kbpf-demo0", "veth/pod", SKIPPED),
            Row("ifb0", "ifb/down", SKIPPED),
            Row("nlmon0", "nlmon", SKIPPED, link_type=824),
            Row("can0", "can", SKIPPED, link_type=CAN),
            Row("ib0", "ipoib/net", SKIPPED, link_type=INFINIBAND),
        ),
    ),
    Shape(
        "fallback devices of tunnel modules, down",
        (
            LO,
            ETH0,
            Row("tunl0", "ipip/down", HOST, link_type=TUNNEL),
            Row("sit0", "sit/down", HOST, link_type=776),
            Row("gre0", "gre/down", HOST, link_type=778),
            Row("gretap0", "gretap/down", HOST),
            Row("ip6tnl0", "ip6tnl/down", HOST, link_type=769),
        ),
    ),
    Shape("an uplink that is down is there before its first packet", (LO, Row("eth1", "/down", HOST))),
    Shape(
        "named: only these are host devices, pods are found as ever",
        (
            LO,
            ETH0,
            Row("eth1", "/net", SKIPPED),
            Row("flannel.1", "vxlan/net", HOST),
            Row("wg0", "wireguard/net", SKIPPED, link_type=ARPHRD_NONE),
            Row("cni0", "bridge", POD),
            Row("veth1a2b", "veth/pod", SKIPPED, master="cni0"),
            Row("cali0123456789a", "veth/pod", POD),
        ),
        patterns=("eth0", "flannel.*"),
    ),
    Shape(
        "named: a cable with an address in a subnet is a pod's, unless it is named",
        (LO, Row("eth0", "veth/pod/net", HOST), Row("ve-box", "veth/pod/net", POD)),
        patterns=("eth*",),
    ),
    Shape(
        "named: whatever it is, a port too",
        (LO, Row("eth0", "", HOST, master="br0"), Row("br0", "bridge/net", SKIPPED), Row("dummy0", "dummy/net", HOST)),
        patterns=("eth0", "dummy0"),
    ),
    Shape(
        "named by a star: still not loopback, our own, and what has no IP",
        (
            LO,
            ETH0,
            Row("kbpf-ipvs0", "dummy", SKIPPED),
            Row("can0", "can", SKIPPED, link_type=CAN),
            Row("eth1", "", SKIPPED),
        ),
        patterns=("*",),
        excluded=("eth1",),
    ),
    Shape("names are compared letter by letter", (LO, Row("Eth0", "/net", SKIPPED)), ("eth*",)),
    Shape(
        "excluded: uplinks and pods",
        (
            LO,
            ETH0,
            Row("eth1", "/net", SKIPPED),
            Row("cali1", "veth/pod", SKIPPED),
            Row("docker0", "bridge", SKIPPED),
            Row("veth1", "veth/pod", SKIPPED, master="docker0"),
        ),
        excluded=("eth1", "cali*", "docker?"),
    ),
    Shape("excluded wins over named", (LO, Row("eth0", "/net", SKIPPED)), ("eth*",), ("eth0",)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_device_of_a_node_has_its_role(shape: Shape):
    listing = devices(shape.rows)
    chosen = assign_roles(listing, shape.patterns, shape.excluded)
    named = {device.name: chosen[device.ifindex] for device in listing}
    reasons = decide_roles(listing, shape.patterns, shape.excluded)
    assert named == {row.name: row.role for row in shape.rows}, reasons


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_order_of_the_listing_does_not_matter(shape: Shape):
    listing = devices(shape.rows)
    assert assign_roles(reversed(listing), shape.patterns, shape.excluded) == assign_roles(
        listing, shape.patterns, shape.excluded
    )


NAMED = [
    ((), ()),
    (("eth0",), ()),
    (("eth*", "cali?"), ()),
    (("eth2",), ("eth2",)),
    (("nosuch*", "eth0", "eth"), ("nosuch*", "eth")),
    (("lo",), ()),
]


@pytest.mark.parametrize(("patterns", "missing"), NAMED, ids=str)
def test_patterns_that_match_no_device_are_found(patterns: tuple[str, ...], missing: tuple[str, ...]):
    listing = devices((LO, ETH0, Row("cali1", "veth/pod", POD)))
    assert find_unmatched(listing, patterns) == missing


def test_a_port_with_an_unlisted_master_is_skipped():
    assert assign_roles([Device(7, "eth0", master=9)]) == {7: SKIPPED}


def test_every_role_has_a_reason():
    listing = devices((LO, ETH0, Row("br0", "bridge", HOST), Row("eth1", "", SKIPPED, "br0")))
    assert {d.name: decide_roles(listing)[d.ifindex].reason for d in listing} == {
        "lo": "loopback",
        "eth0": "hardware",
        "br0": "bridge with the uplink eth1",
        "eth1": "port of br0",
    }


def test_devices_beyond_the_limit_are_left_out() -> None:
    """The newest of pods. Devices without programs do not count."""
    pods = [Device(index, f"cali{index}", "veth", peer_netns=1) for index in range(3, 5000)]
    uplink, loopback = Device(6000, "eth0"), Device(1, "lo", loopback=True)
    choices = decide_roles([loopback, *pods, uplink])
    served = [index for index, choice in choices.items() if choice.role is not SKIPPED]
    assert served == [*range(3, 2 + MAX_DEVICES), 6000]
    assert count_left_out(choices) == 5000 - (2 + MAX_DEVICES)
    assert count_left_out(decide_roles([*pods, uplink], excluded=("cali*",))) == 0
    line = describe_left_out(902)
    assert line.startswith("902 devices have no packet programs: 4,096 others have programs")
