# SPDX-License-Identifier: Apache-2.0
"""What is written for the packet path's programs about each device and the node, and in what
order.
"""

from dataclasses import replace

import pytest

from kbpf.dataplane.bpf.maps.layout import (
    CACHED_DEVICE,
    DEVICE,
    NODE,
    SOURCE_KEY,
    U32,
    DeviceFlag,
    NodeFlag,
    unpack_network,
    unpack_source_range,
)
from kbpf.dataplane.bpf.maps.layout import Role as Told
from kbpf.dataplane.bpf.packet_path.device_roles import DeviceRole, RoleChoice
from kbpf.dataplane.bpf.packet_path.node_maps import DeviceMap, NodeMap, pack_device, pack_devices, pack_sources
from kbpf.kernel.net.devices import Device
from kbpf.model.address import Addr, parse_addr
from kbpf.model.config import Config, LocalMode, MapSizes
from kbpf.model.desired import DesiredState
from kbpf.model.objects import Cidr
from kbpf.source.decode.fields import parse_cidr
from tests.support.table import each_cells, each_named_pair, each_pair
from tests.values.dataplane.device_texts import devices

HOST, POD, SKIPPED = DeviceRole.HOST, DeviceRole.POD, DeviceRole.SKIPPED
MAC = bytes.fromhex("02aabbccddee")

ETH0 = Device(2, "eth0", mac=MAC)
CNI0 = Device(4, "cni0", "bridge", mac=MAC)
CALI1 = Device(5, "cali1", "veth", peer_netns=1, mac=MAC)

BRIDGE = Config(detect_local_mode=LocalMode.BRIDGE_INTERFACE, pod_bridge_interface="cni0")
PREFIX = Config(detect_local_mode=LocalMode.INTERFACE_NAME_PREFIX, pod_interface_name_prefix="cali")
NETWORKS = Config(detect_local_mode=LocalMode.CLUSTER_CIDR)


CONFIGS = {"": Config(), "bridge": BRIDGE, "prefix": PREFIX, "networks": NETWORKS}
CONFIGS |= {"masquerade all": Config(masquerade_all=True), "direct": Config(forwarding="direct")}


@each_cells(
    "device_text, flags_text, config",
    """\
hardware is an uplink | eth0 hardware host |
an overlay is an uplink | wg0 wireguard host type=none |
a tunnel without a remote address | tunl0 ipip host type=tunnel | TUNNEL NBMA IPIP
a tunnel to one remote address | tun-1080 ipip/p2p host type=tunnel | TUNNEL
a gre tunnel | gre1 gre host type=gre | TUNNEL NBMA
a sit tunnel | sit0 sit host type=sit | TUNNEL NBMA
a tunnel over IPv6 | ip6tnl1 ip6tnl host type=tunnel6 | TUNNEL NBMA
a gre tunnel to one remote address | gre2 gre/p2p host type=gre | TUNNEL
a gre tunnel over IPv6 | ip6gre1 ip6gre host type=ip6gre | TUNNEL NBMA
a tunnel of Ethernet frames is none of IP in IP | gretap1 gretap host |
neither is VXLAN | vxlan.calico vxlan host |
a bridge of pods has no peer | cni0 bridge pod | LOCAL
a veth into a pod | cali1 veth/pod pod | LOCAL PEER
a netkit into a pod | lxc1 netkit/pod pod | LOCAL PEER
a veth that is the node's uplink | eth1 veth/pod/net host |
an uplink with a strict reverse path filter | eth2 hardware/strict host | STRICT
where Cilium's routes to all pods lead | cilium_host veth host peer=21 | PODS
a veth whose peer is on the node | cali2 veth pod peer=9 | LOCAL
by bridge: the bridge itself | cni0 bridge pod | LOCAL | bridge
by bridge: also a bridge with an uplink | cni0 bridge host | LOCAL | bridge
by bridge: not a pod's own device | cali1 veth/pod pod | PEER | bridge
by bridge: not hardware | eth0 hardware host |  | bridge
by prefix: a device with the prefix | cali1 veth/pod pod | LOCAL PEER | prefix
by prefix: in any role | cali2 veth host peer=9 | LOCAL | prefix
by prefix: not a bridge of pods | cni0 bridge pod |  | prefix
by networks: by device while none is known | cali1 veth/pod pod | LOCAL PEER | networks
""",
)
def test_the_flags_of_a_device(device_text, flags_text, config):
    """A device with its role, as in device_texts.py, its flags in the map, and how local pods are recognised."""
    _, (found, role) = devices(device_text)[0].items()
    device, told = replace(found, mac=MAC), DeviceRole(role)
    packed_role, length, flags, mac, *_ = DEVICE.unpack(pack_device(device, told, CONFIGS[config]))
    assert packed_role == (Told.HOST if role == "host" else Told.POD)
    assert {flag.name for flag in DeviceFlag if flag & flags} == set(flags_text.split())
    assert length == (0 if device.kind == "wireguard" or "TUNNEL" in flags_text else 14)
    assert mac == MAC


def addrs(text: str) -> tuple[Addr, ...]:
    return tuple(map(parse_addr, text.split()))


@each_named_pair(
    "given, gets",
    """\
no addresses: → :: ::
the kernel's first choice: 10.0.0.1 10.0.0.2 fd00::1 → 10.0.0.1 fd00::1
""",
)
def test_the_masquerading_source_of_a_device(given, gets):
    """A device's addresses → the masquerading source of each family, if no network says otherwise."""
    fields = DEVICE.unpack(pack_device(replace(ETH0, sources=addrs(given)), HOST, Config()))
    assert fields[-3:-1] == tuple(map(bytes, addrs(gets)))


@each_named_pair(
    "given, gets",
    """\
one address of each family: 10.0.0.1/24 fd00::1/64 →
two subnets: 10.0.0.1/24 10.1.0.1/16 → 10.0.0.0/24=10.0.0.1 10.1.0.0/16=10.1.0.1
the first of two that overlap: 10.0.0.1/8 10.1.0.1/16 → 10.0.0.0/8=10.0.0.1
a later one that is larger: 10.1.0.1/16 10.0.0.1/8 → 10.1.0.0/16=10.1.0.1 10.0.0.0/8=10.0.0.1
two of one IPv6 network: fd00::1/64 fd00::2/64 →
where IPv6 prefixes part: fd00::1/64 2001:db8::1/64 fd00:1::1/64 → ::/1=2001:db8::1 fd00:1::/32=fd00:1::1
a longer IPv6 prefix: fd00::1/64 fd00::8000:0:0:1/128 → fd00:0:0:0:8000::/65=fd00::8000:0:0:1
""",
)
def test_which_networks_get_another_source_than_the_first(given, gets):
    """The addresses of a device, in the kernel's order → network=source."""
    sources = tuple(parse_addr(each.split("/")[0]) for each in given.split())
    device = replace(ETH0, sources=sources, subnets=tuple(parse_cidr(each, "") for each in given.split()))
    found = pack_sources([device], {2: RoleChoice(HOST, "")})
    wanted = (each.split("=") for each in gets.split())
    assert {unpack_source_range(key): Addr(value) for key, value in found.items()} == {
        (2, parse_cidr(network, "")): parse_addr(source) for network, source in wanted
    }
    assert pack_sources([device], {2: RoleChoice(SKIPPED, "")}) == {}


def test_the_programs_know_each_address_of_the_node():
    """Also of devices without programs, and those that are no source."""
    own = addrs("10.0.0.1 10.0.0.2 fd00::1")
    lo, eth0 = Device(1, "lo", addresses=own[:1]), replace(ETH0, addresses=own[1:], sources=own[2:])
    found = pack_sources([lo, eth0], {1: RoleChoice(SKIPPED, ""), 2: RoleChoice(HOST, "")})
    assert found == {SOURCE_KEY.pack(160, 0, address): address for address in own}


class Table:
    """A fake map that records its writes under its name."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name, self.done = name, done
        self.entries: dict[bytes, bytes] = {}

    def update(self, key: bytes, value: bytes) -> None:
        self.done.append(f"put {self.name}")
        self.entries[key] = value

    def delete(self, key: bytes) -> bool:
        self.done.append(f"drop {self.name}")
        return self.entries.pop(key, None) is not None

    def items(self) -> list[tuple[bytes, bytes]]:
        return list(self.entries.items())


class Maps:
    """Fake maps, with properties for what the programs would read."""

    def __init__(self) -> None:
        self.done: list[str] = []
        names = ("node", "local_networks", "devices", "device_cache", "device_sources")
        self.maps = {name: Table(name, self.done) for name in names}

    @property
    def networks(self) -> set[Cidr]:
        return {unpack_network(key) for key in self.maps["local_networks"].entries}

    @property
    def node(self) -> tuple[bytes, bytes, NodeFlag, int, int, int]:
        (value,) = self.maps["node"].entries.values()
        four, six, flags, low, high, mark, room = NODE.unpack(value)
        assert room == MapSizes().connections
        return four, six, NodeFlag(flags), low, high, mark

    @property
    def cached(self) -> dict[int, int]:
        """The contents of `device_cache`: slot → ifindex."""
        entries = self.maps["device_cache"].entries
        numbers = {U32.unpack(k)[0]: CACHED_DEVICE.unpack(v)[0] for k, v in entries.items()}
        return {place: number for place, number in numbers.items() if number}

    def take(self) -> list[str]:
        """The writes since the last call."""
        done, self.done[:] = [*self.done], []
        return done


def state(*networks: str, own: str = "") -> DesiredState:
    """A desired state with only the node's part."""
    return DesiredState(
        {},
        masquerade_addresses=addrs(own),
        local_networks=tuple(parse_cidr(text, "") for text in networks),
    )


def nets(*texts: str) -> set[Cidr]:
    return {parse_cidr(text, "") for text in texts}


@each_pair(
    "given, flags",
    """\
 → 0
masquerade all → MASQUERADE_ALL
direct → DIRECT
bridge → DETECTS_LOCAL
prefix → DETECTS_LOCAL
networks → 0
networks: 10.1.0.0/24 → DETECTS_LOCAL|LOCAL_NETWORKS
""",
)
def test_the_flags_of_the_node(given, flags):
    """A name of CONFIGS and the known pod networks → the node's flags."""
    told = Maps()
    config, _, networks = given.partition(": ")
    NodeMap(CONFIGS[config], told.maps).write(state(*networks.split(), own="192.0.2.1 2001:db8::1"))
    four, six, found, *numbers = told.node
    assert (four, six, found.name or "0") == (parse_addr("192.0.2.1"), parse_addr("2001:db8::1"), flags)
    assert numbers == [1024, 29_999, 1 << 14]
    assert told.networks == nets(*networks.split())


YIELDS, FOLLOWS = NodeFlag.PASSIVE, NodeFlag.COEXISTING


@each_named_pair(
    "stance, wanted",
    """\
no other data plane: alone →
no other data plane any more: alone PASSIVE →
another one, no flags yet: followed → PASSIVE
another one, an earlier agent was passive: followed PASSIVE → PASSIVE
another one, an earlier agent served: followed DIRECT → COEXISTING
another one, an earlier agent coexisted: followed COEXISTING → COEXISTING
""",
)
def test_the_node_flags_for_another_data_plane(stance, wanted):
    """Whether another data plane is on the node, the flags of an earlier agent → the flags that are written."""
    followed, *earlier = stance.split()
    told = Maps()
    for before in earlier:
        facts = NodeMap(Config(), told.maps)
        facts.write(state(own="192.0.2.1"))
        facts.set_mode(NodeFlag[before])
        told.take()
    facts = NodeMap(Config(), told.maps, followed == "followed")
    facts.write(state(own="192.0.2.1"))
    assert (told.node[2].name or "") == wanted


def test_a_mode_change_writes_only_the_node_flags():
    told = Maps()
    facts = NodeMap(Config(masquerade_all=True), told.maps, True)
    facts.set_mode(YIELDS)
    assert told.take() == [], "the node's entry does not exist yet"
    facts.write(state(own="192.0.2.1"))
    before = told.node
    assert before[2] == NodeFlag.MASQUERADE_ALL | YIELDS
    told.take()
    facts.set_mode(FOLLOWS)
    assert told.take() == ["put node"]
    assert told.node == (*before[:2], NodeFlag.MASQUERADE_ALL | FOLLOWS, *before[3:])
    facts.write(state(own="192.0.2.1"))
    assert told.take() == []


def test_networks_are_never_missing_during_a_change():
    told = Maps()
    facts = NodeMap(NETWORKS, told.maps)
    facts.write(state("10.1.0.0/24"))
    assert told.take() == ["put local_networks", "put node"], "networks are written before the flag"
    facts.write(state("10.2.0.0/24"))
    assert told.take() == ["put local_networks", "drop local_networks"], (
        "new networks are written before old ones are deleted"
    )
    assert told.networks == nets("10.2.0.0/24")
    facts.write(state("10.2.0.0/24", "fd00::/64"))
    assert told.take() == ["put local_networks"]
    facts.write(state())
    drops = ["drop local_networks"] * 2
    assert told.take() == ["put node", *drops], "the flag is removed before the networks"
    assert told.networks == set()
    assert told.node[2] == NodeFlag(0)


def test_the_next_agent_removes_old_networks():
    told = Maps()
    NodeMap(NETWORKS, told.maps).write(state("10.1.0.0/24", "fd00::/64"))
    told.take()
    NodeMap(NETWORKS, told.maps).write(state("10.1.0.0/24"))
    assert told.take() == ["put node", "drop local_networks"]
    assert told.networks == nets("10.1.0.0/24")


def test_only_changed_devices_are_written():
    told = Maps()
    facts = DeviceMap(Config(), told.maps)
    choices = {2: RoleChoice(HOST, ""), 4: RoleChoice(SKIPPED, ""), 5: RoleChoice(POD, "")}
    facts.write((ETH0, CNI0, CALI1), choices)
    assert told.take() == ["put devices"] * 2 + ["put device_cache"] * 4
    assert set(told.maps["devices"].entries) == {U32.pack(2), U32.pack(5)}
    facts.write((ETH0, CNI0, CALI1), choices)
    assert told.take() == []
    facts.write((ETH0, CNI0), choices)
    assert told.take() == ["put device_cache", "drop devices"]


def test_a_port_has_the_values_of_its_bridge():
    told = Maps()
    facts = DeviceMap(BRIDGE, told.maps)  # cni0 by its name
    bridge = replace(CNI0, bridge_netfilter=True, sources=(parse_addr("10.0.0.1"),))
    port = Device(9, "veth9", "veth", mac=MAC[::-1], master=bridge.ifindex, peer_netns=3)
    choices = {bridge.ifindex: RoleChoice(POD, ""), 9: RoleChoice(DeviceRole.PORT, "")}
    facts.write((port, bridge), choices)
    value = pack_device(bridge, POD, BRIDGE)
    assert DEVICE.unpack(value)[-1] == bridge.ifindex
    entries = told.maps["devices"].entries
    assert entries == {U32.pack(index): value for index in (9, bridge.ifindex)}
    facts.write((port, CNI0), {CNI0.ifindex: RoleChoice(POD, ""), 9: RoleChoice(SKIPPED, "")})
    assert entries == {U32.pack(CNI0.ifindex): pack_device(CNI0, POD, BRIDGE)}


def test_devices_of_an_earlier_agent_are_adopted():
    told = Maps()
    choices = {2: RoleChoice(HOST, ""), 5: RoleChoice(POD, "")}
    DeviceMap(Config(), told.maps).write((ETH0, CALI1), choices)
    told.take()
    DeviceMap(Config(), told.maps).write((ETH0,), choices)
    assert told.take() == ["put device_cache", "drop devices"]
    assert told.cached == {2: 2}


def test_a_device_cache_slot_is_changed_in_safe_steps():
    """A program may still read a slot while it is changed, so the ifindex is cleared first, then
    the value is written, then the new ifindex.
    """
    told = Maps()
    facts, seen = DeviceMap(Config(), told.maps), []
    cache = told.maps["device_cache"]
    write = cache.update
    cache.update = lambda key, value: (seen.append(value), write(key, value))[1]  # type: ignore
    moved, other = Device(2, "eth0", mac=MAC[::-1]), Device(1026, "eth1", mac=MAC)
    for device in (ETH0, moved, other, other):
        facts.write((device,), {device.ifindex: RoleChoice(HOST, "")})
    old, new, last = (pack_device(each, HOST, Config()) for each in (ETH0, moved, Device(1026, "eth1", mac=MAC)))
    assert seen == [
        CACHED_DEVICE.pack(number, value)
        for number, value in (
            *((0, old), (2, old)),
            *((0, old), (0, new), (2, new)),
            *((0, new),),  # a slot for another device is free until the next write
            *((0, last), (1026, last)),
        )
    ]


@each_pair(
    "earlier, later",
    """\
one slot for each: → 2 5 1023 → 2=2 5=5 1023=1023
high numbers: → 1024 70001 → 0=1024 369=70001
of several, the lowest ifindex: → 5 1029 2053 → 5=5
a new device does not evict: 5 → 5 1029 → 5=5
the first device is deleted: 5 1029 → 1029 → 5=1029
all are deleted: 5 6 → →
""",
)
def test_which_device_has_a_cache_slot(earlier, later):
    """Devices by ifindex, before → now → the resulting cache: slot=ifindex."""
    given, expected = later.split("→")
    before, now = (tuple(map(int, text.split())) for text in (earlier.partition(":")[2], given))
    told = Maps()
    facts = DeviceMap(Config(), told.maps)
    for numbers in (before, now, now):  # a slot that becomes free is used by the next write only
        there = [Device(number, f"eth{number}", mac=MAC) for number in numbers]
        facts.write(there, {number: RoleChoice(HOST, "") for number in numbers})
    assert " ".join(f"{place}={number}" for place, number in sorted(told.cached.items())) == expected.strip()
    for place, number in told.cached.items():
        value = told.maps["device_cache"].entries[U32.pack(place)]
        assert value == U32.pack(number) + told.maps["devices"].entries[U32.pack(number)]


@pytest.mark.parametrize(("kind", "spans"), [("veth", False), ("vxlan", True)])
def test_a_bridge_with_an_overlay_has_pods_of_other_nodes_behind_it(kind, spans):
    """As Weave's: they may also come by an uplink."""
    devices = (CNI0, Device(30, "port", kind, master=CNI0.ifindex))
    choices = {2: RoleChoice(HOST, ""), CNI0.ifindex: RoleChoice(POD, ""), 30: RoleChoice(SKIPPED, "")}
    packed = pack_devices(devices, choices, Config())[U32.pack(CNI0.ifindex)]
    assert bool(DeviceFlag(DEVICE.unpack(packed)[2]) & DeviceFlag.SPANS) == spans
