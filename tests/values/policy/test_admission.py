# SPDX-License-Identifier: Apache-2.0
"""Reserved addresses: which of them a Service may use.

The tables cross the kind of address, the kind of frontend (ExternalIP, LoadBalancer, ClusterIP) and
the setting `--external-ips`, and say whether the frontend is served or with which words it is
refused. A change of the reserved addresses must recompute exactly the Services it affects.
"""

from collections.abc import Collection
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kbpf.agent.host_thread import (
    DEVICE_POLL_INTERVAL_S,
    LISTENER_POLL_INTERVAL_S,
    MAX_SELECTED_PORTS,
    RELEASE_GRACE_S,
    Listeners,
)
from kbpf.agent.problem_book import AT_THIS_NODE, DOCS_HINT, ProblemBook
from kbpf.config import load
from kbpf.model.address import NodeAddresses, format_addr, parse_addr
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState, FrontendAddress, FrontendKind, ServiceState
from kbpf.model.events import Kind, Synced
from kbpf.model.objects import (
    Endpoint,
    EndpointSlice,
    Node,
    Protocol,
    Service,
    ServiceName,
    ServicePort,
    SlicePort,
    pack_names,
)
from kbpf.policy.admission import ApiServerAddress, InUse, ReservedAddresses, compute_reserved
from kbpf.policy.compute import DesiredStateBuilder
from kbpf.policy.store import ChangeSet, ObjectStore
from kbpf.serve.events import EventRecorder
from kbpf.source.decode.fields import parse_cidr
from tests.support.faults.event_server import EventServer
from tests.support.lab.lab import PATIENCE
from tests.support.plane import at
from tests.support.table import each_cells, each_row, table
from tests.values.policy.services import addrs, gone, service, state_of_all, up

TCP = Protocol.TCP
NODE = Node("me", addrs("192.0.2.10", "2001:db8::10"), pod_cidrs=(parse_cidr("10.244.0.0/24", ""),))
OTHER_NODE = Node("other", addrs("192.0.2.11", "2001:db8::11"))
LOCAL = NodeAddresses(addrs("127.0.0.1", "192.0.2.10", "2001:db8::10", "192.0.2.200", "172.17.0.1"))
LOCAL.networks = (parse_cidr("198.18.7.0/24", ""), parse_cidr("10.244.0.128/25", ""))
LOCAL.subnet_ends = frozenset(addrs("192.0.2.0", "192.0.2.255", "172.17.255.255"))
"""The Node's addresses, a VIP that keepalived or kube-vip has put on a device, and a bridge. Local
routes of whole networks, one of them a part of the Pods' network.
"""
SERVERS: tuple[ApiServerAddress, ...] = ((parse_addr("198.51.100.7"), 6443),)
LISTENING = frozenset(map(at, ("[::]:22", "0.0.0.0:22", "0.0.0.0:10250")))
API_SLICE = EndpointSlice(
    "default",
    "kubernetes",
    "kubernetes",
    4,
    tuple(map(Endpoint, addrs("192.0.2.1", "192.0.2.10"))),
    (SlicePort("https", TCP, 6443),),
)
PODS = EndpointSlice(
    "shop",
    "shop-1",
    "shop",
    4,
    tuple(map(Endpoint, addrs("10.9.9.9", "7.7.7.7"))),
    (SlicePort("http", TCP, 8080),),
    packed_pods=pack_names(("shop-1", "")),
)
SHOP = service("shop/shop NodePort ip=10.96.0.50 node-port=30050")
KUBERNETES = service("default/kubernetes ClusterIP ip=10.96.0.1 port=443")

OFF, OUTSIDE = "is off", "not in a network of"
REFUSALS = {
    "served": "",
    "api": "an address of the API server",
    "own": "an address of this node",
    "others": "an address of another node",
    "link-local": "link-local",
    "pod": "address of a Pod",
    "listens": "a process on this node listens",
    "taken": "belongs to shop/shop",
    "cluster-ip": "ClusterIP of another Service",
    "edge": "network or broadcast address",
    "reserved": "in a reserved network",
}


class Row(NamedTuple):
    """An address, and whether it is served or why not: as an ExternalIP with `--external-ips all`, as one
    with the network of the address in that list, and as a LoadBalancer address. With `off`, or with another network in
    the list, no ExternalIP is served. The words are those of REFUSALS.
    """

    name: str
    place: str
    external: str
    listed: str
    balancer: str


ROWS = table(
    Row,
    """
an unused address                              | 203.0.113.5:80     | served     | served     | served
an unused address, IPv6                        | [2001:db8:9::5]:80 | served     | served     | served
the API server                                 | 192.0.2.1:6443     | api        | api        | api
the API server, another port                   | 192.0.2.1:443      | served     | served     | served
an API server on this node                     | 192.0.2.10:6443    | api        | api        | api
an API server that the agent connected to      | 198.51.100.7:6443  | api        | api        | api
this node                                      | 192.0.2.10:80      | own        | served     | served
this node, IPv6                                | [2001:db8::10]:80  | own        | served     | served
this node, where sshd listens                  | 192.0.2.10:22      | own        | listens    | listens
this node, where kubelet listens               | 192.0.2.10:10250   | own        | listens    | listens
this node, the Service's own NodePort          | 192.0.2.10:30099   | served     | served     | served
another node                                   | 192.0.2.11:80      | others     | served     | served
another node, IPv6                             | [2001:db8::11]:80  | others     | served     | served
another node, where its kubelet listens        | 192.0.2.11:10250   | others     | served     | served
another node, the Service's own NodePort       | 192.0.2.11:30099   | served     | served     | served
this node, another Service's NodePort          | 192.0.2.10:30050   | own        | taken      | taken
a VIP on a device                              | 192.0.2.200:80     | served     | served     | served
a VIP on a device, where sshd listens          | 192.0.2.200:22     | listens    | served     | served
a bridge, where sshd listens                   | 172.17.0.1:22      | listens    | served     | served
in a local network                             | 198.18.7.9:80      | served     | served     | served
in a local network, where sshd listens         | 198.18.7.9:22      | listens    | served     | served
in a local network of Pods                     | 10.244.0.177:80    | pod        | served     | pod
in a local network of Pods, where sshd listens | 10.244.0.177:22    | listens    | served     | pod
in this node's Pod network                     | 10.244.0.77:80     | pod        | served     | pod
a Pod on another node                          | 10.9.9.9:80        | pod        | served     | served
an endpoint that is not a Pod                  | 7.7.7.7:80         | served     | served     | served
metadata                                       | 169.254.169.254:80 | link-local | link-local | link-local
link-local                                     | 169.254.7.7:80     | link-local | link-local | link-local
link-local, IPv6                               | [fe80::7]:80       | link-local | link-local | link-local
metadata, IPv6                                 | [fd00:ec2::254]:80 | link-local | link-local | link-local
metadata of Alibaba                            | 100.100.100.200:80 | link-local | link-local | link-local
another Service's ClusterIP                    | 10.96.0.50:80      | cluster-ip | cluster-ip | taken
another's ClusterIP, at a port it lacks        | 10.96.0.50:22      | cluster-ip | cluster-ip | served
the node's broadcast address                   | 192.0.2.255:80     | edge       | edge       | served
the node's network address                     | 192.0.2.0:80       | edge       | edge       | served
a bridge's broadcast address                   | 172.17.255.255:80  | edge       | edge       | served
another network's address                      | 198.51.100.0:80    | served     | served     | served
240/4                                          | 240.0.0.1:80       | reserved   | served     | served
0/8                                            | 0.1.2.3:80         | reserved   | served     | served
IPv4-compatible                                | [::127.0.0.1]:80   | reserved   | served     | served
site-local                                     | [fec0::1]:80       | reserved   | served     | served
""",
)
SETTINGS = ("all", "off", "listed", "another listed")


def setting(word: str, place: str) -> Config:
    address = format_addr(at(place).address)
    bits = 128 if ":" in address else 32
    text = {"listed": f"{address}/{bits}", "another listed": "203.0.113.254/32"}.get(word, word)
    return load.load({"--external-ips": text}, {}).config


def web(kind: FrontendKind, place: str) -> Service:
    address, _, port = place.rpartition(":")
    own = "fd00:96::2" if ":" in address else "10.96.0.2"
    words = {FrontendKind.EXTERNAL_IP: f"ip={own} external=", FrontendKind.LOAD_BALANCER: f"ip={own} vip="}
    return service(f"web NodePort port={port} node-port=30099 {words.get(kind, 'ip=')}{address.strip('[]')}")


def state_of_web(state: DesiredState) -> ServiceState:
    (found,) = (each for each in state.services.values() if each.key.name == "web")
    return found


def outcome(state: DesiredState, at: FrontendAddress) -> str:
    """ "" if the Service has the frontend, else the reasons why it does not."""
    service_state = state_of_web(state)
    words = [f"belongs to {winner}" for lost, winner in service_state.lost if lost == at]
    words += [reason for refused, reason in service_state.refused if refused == at]
    served = at in {frontend.at for frontend in service_state.frontends}
    assert served == (not words)
    return " ".join(words)


def state_of(service: Service, config: Config, device_listeners: Collection[FrontendAddress] = ()) -> DesiredState:
    return state_of_all(
        (service, SHOP, KUBERNETES, PODS, API_SLICE, NODE, OTHER_NODE),
        LOCAL,
        config,
        InUse(SERVERS, LISTENING, device_listeners),
    )


@pytest.mark.parametrize("how", SETTINGS)
@each_row(ROWS)
def test_an_external_ip(row: Row, how):
    wanted = {"off": OFF, "another listed": OUTSIDE}.get(how) or REFUSALS[row.external if how == "all" else row.listed]
    state = state_of(web(FrontendKind.EXTERNAL_IP, row.place), setting(how, row.place))
    words = outcome(state, at(row.place))
    assert wanted in words
    assert bool(wanted) == bool(words)
    kinds = {frontend.kind for frontend in state_of_web(state).frontends}
    assert {FrontendKind.CLUSTER_IP, FrontendKind.NODE_PORT} <= kinds, "the rest is served"


@pytest.mark.parametrize("how", SETTINGS)
@each_row(ROWS)
def test_a_load_balancer_address(row: Row, how):
    """The setting `--external-ips` applies to ExternalIPs only."""
    state = state_of(web(FrontendKind.LOAD_BALANCER, row.place), setting(how, row.place))
    words = outcome(state, at(row.place))
    assert REFUSALS[row.balancer] in words
    assert (row.balancer == "served") is not bool(words)


@each_row(ROWS)
@pytest.mark.parametrize("is_listening", [True, False], ids=["listener", "no listener"])
def test_a_cluster_ip_is_never_refused(row: Row, is_listening):
    """But one that a device of this node has is left to the node if a process listens there."""
    asked, where = web(FrontendKind.CLUSTER_IP, row.place), at(row.place)
    for how in SETTINGS:
        found = state_of_web(state_of(asked, setting(how, row.place), {where} if is_listening else ()))
        assert (found.refused, found.lost) == ((), ())
        is_on_device = where.address in LOCAL
        is_left = is_on_device and is_listening
        served = [frontend for frontend in found.frontends if frontend.at == where]
        assert [frontend.on_device for frontend in served] == ([] if is_left else [is_on_device])
        assert found.left_to_node == ((where,) if is_left else ())
        assert FrontendKind.NODE_PORT in {frontend.kind for frontend in found.frontends}


def test_cluster_ip_is_left_to_the_node_while_a_process_serves_it(caplog):
    """A node-local DNS cache: its address appears, it listens, it is killed, and starts again; then
    the address is removed. Ports at which it does not listen, and other addresses, stay served.
    """
    dns = service("kube-system/kube-dns ip=10.96.0.10,fd00:96::a port=53 protocol=UDP vip=203.0.113.5")
    dns = replace(dns, ports=(*dns.ports, ServicePort("metrics", TCP, 9153)))
    store, builder = ObjectStore("me"), DesiredStateBuilder()
    book = ProblemBook(EventRecorder(None, "me"))
    touched = store.apply([up(NODE), up(dns), *(Synced(kind) for kind in Kind)])
    served: list[list[str]] = []
    dns_at = at("10.96.0.10:53", Protocol.UDP)
    steps = [(False, False), (True, False), (True, True), (True, False), (True, True), (False, True), (False, False)]
    with caplog.at_level("INFO"):
        for has_address, is_listening in steps:
            touched.all_services = has_address != bool(builder.device_frontends)
            local = (*LOCAL, dns_at.address) if has_address else LOCAL
            listeners = {dns_at} if is_listening else set()
            keys = builder.update(store, touched, local, Config(), InUse(device_listeners=listeners))
            touched = ChangeSet()
            book.report_addresses(keys, builder.state.services, builder.reserved)
            states = builder.state.services.values()
            served.append(sorted(str(f.at) for state in states for f in state.frontends))
    assert [set(served[0]) - set(each) for each in served] == [
        {str(dns_at)} if has_address and is_listening else set() for has_address, is_listening in steps
    ]
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "left to this node" in line] == 2 * [
        "left to this node, on which a device has the address and a process listens: "
        f"{dns_at} of Service kube-system/kube-dns"
    ]
    assert sum("served at its ClusterIP again" in line for line in lines) == 2


def test_service_kubernetes_may_use_api_server_addresses():
    own = service("default/kubernetes port=6443 external=192.0.2.1")
    state = state_of_all((own, API_SLICE, NODE), LOCAL, Config())
    (service_state,) = state.services.values()
    assert not service_state.refused
    assert len(service_state.frontends) == 2


def test_api_server_port_of_another_protocol_is_not_reserved():
    udp = service("web protocol=UDP port=6443 external=192.0.2.1")
    assert outcome(state_of(udp, Config()), at("192.0.2.1:6443", Protocol.UDP)) == ""


# ---- over time -----------------------------------------------------------------------------------


STEPS = ("shop", "kubernetes", "web", "vip", "pods", "api", "node", "servers", "listening")


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(STEPS), max_size=12), st.sampled_from([row.place for row in ROWS]))
def test_incremental_updates_equal_a_full_computation(steps: list[str], place: str):
    """Each step adds an object, or deletes it if it exists."""
    objects = {
        "shop": SHOP,
        "kubernetes": KUBERNETES,
        "web": web(FrontendKind.EXTERNAL_IP, place),
        "vip": replace(web(FrontendKind.LOAD_BALANCER, "192.0.2.10:30050"), name="vip"),
        "pods": PODS,
        "api": API_SLICE,
        "node": OTHER_NODE,
    }
    there: dict[str, Service | EndpointSlice | Node] = {}
    world, desired, told = (ObjectStore("me"), DesiredStateBuilder(), {"servers": False, "listening": False})
    world.apply([up(NODE), *(Synced(kind) for kind in Kind)])
    config = load.load({"--external-ips": "all"}, {}).config
    for step in steps:
        touched = world.apply([])
        if step in told:
            told[step] = not told[step]
        elif step in there:
            touched = world.apply([gone(there.pop(step))])
        else:
            there[step] = objects[step]
            touched = world.apply([up(objects[step])])
        in_use = InUse(SERVERS if told["servers"] else (), LISTENING if told["listening"] else frozenset())
        if world.slices(ServiceName("default", "kubernetes")) and step == "api":
            there["api"] = API_SLICE  # the API server's own Service keeps its last endpoints
        desired.update(world, touched, LOCAL, config, in_use)
        assert desired.state.services == state_of_all((NODE, *there.values()), LOCAL, config, in_use).services


# ---- listeners and reports -----------------------------------------------------------------------


def test_port_stays_reserved_for_a_grace_period_after_its_listener_ended():
    sshd = at("0.0.0.0:22")
    there = {sshd}
    listeners = Listeners(lambda: frozenset(there))
    listeners.read_first(0.0)
    assert listeners.ports == {sshd}
    there.clear()
    listeners.refresh(LISTENER_POLL_INTERVAL_S - 1)
    listeners.refresh(LISTENER_POLL_INTERVAL_S)
    assert listeners.ports == {sshd}, "a restart of sshd hands nothing over"
    listeners.refresh(RELEASE_GRACE_S - 1)
    assert listeners.ports == {sshd}
    listeners.refresh(RELEASE_GRACE_S + LISTENER_POLL_INTERVAL_S)
    assert listeners.ports == frozenset()


DNS, DNS6 = at("10.96.0.10:53"), at("[fd00:96::a]:53")
LISTENERS = {
    # what listens, and the frontends of DNS and DNS6 that it serves
    "10.96.0.10:53": "10.96.0.10:53",
    "0.0.0.0:53": "10.96.0.10:53",
    "[::]:53": "[fd00:96::a]:53",
    "0.0.0.0:53 [::]:53": "10.96.0.10:53 [fd00:96::a]:53",
    "10.96.0.10:54": "",
    "10.96.0.10:53/UDP": "",
    "0.0.0.1:53": "",
}


def frontends_at(text: str) -> set[FrontendAddress]:
    places = [word.partition("/") for word in text.split()]
    return {at(place, Protocol[protocol or "TCP"]) for place, _, protocol in places}


@pytest.mark.parametrize("what", LISTENERS)
def test_listener_at_an_address_of_a_device(what):
    """It is found at once after there was no such address, and then four times a second; its end
    has no grace period, because the Service takes over.
    """
    there, expected = frontends_at(what), frontends_at(LISTENERS[what])
    found = set(there)
    listeners = Listeners(lambda *_: frozenset(found))
    frontends = [frozenset({DNS, DNS6})]
    listeners.refresh_device_ports(0.0, frontends)
    assert listeners.device_ports == expected
    found.clear()
    listeners.refresh_device_ports(DEVICE_POLL_INTERVAL_S / 2, frontends)
    assert listeners.device_ports == expected, "not due yet"
    listeners.refresh_device_ports(listeners.device_due, frontends)
    assert listeners.device_ports == frozenset()
    found |= there
    listeners.refresh_device_ports(listeners.device_due, frontends)
    assert listeners.device_ports == expected
    listeners.refresh_device_ports(listeners.device_due, [])
    assert listeners.device_ports == frozenset()
    listeners.refresh_device_ports(1.0, frontends)
    assert listeners.device_ports == expected, "at once"


@pytest.mark.parametrize(
    ("count", "selected"), [(1, True), (MAX_SELECTED_PORTS, True), (MAX_SELECTED_PORTS + 1, False)]
)
def test_only_sockets_at_the_ports_are_read(count, selected):
    """A node may have tens of thousands of UDP sockets, and they are read four times a second."""
    asked = []
    listeners = Listeners(lambda *ports: asked.append(ports) or frozenset())
    frontends = [frozenset(DNS._replace(port=port) for port in range(1, count + 1))]
    listeners.refresh_device_ports(0.0, frontends)
    assert asked == [({(TCP, port) for port in range(1, count + 1)},) if selected else ()]


def test_refusal_is_one_log_line_one_problem_and_one_event_per_change(caplog):
    server = EventServer()
    events_ = EventRecorder(server, "me")
    book = ProblemBook(events_)
    states = state_of(web(FrontendKind.EXTERNAL_IP, "192.0.2.1:6443"), Config()).services
    line = "192.0.2.1:6443/TCP is not served: it is an address of the API server"
    with caplog.at_level("WARNING"):
        for _ in range(2):
            book.report_addresses(states, states, ReservedAddresses())
    (key,) = (key for key in states if key.name == "web")
    assert book.problems.first(9) == [f"{key}: {line}"]
    assert [each.getMessage() for each in caplog.records] == [f"Service ns/web: {line}; {DOCS_HINT}"]
    events_.flush(PATIENCE)
    events_.stop()
    (event,) = server.events
    assert (event["reason"], event["note"], event["type"]) == ("AddressRefused", line, "Warning")
    regarding = {"apiVersion": "v1", "kind": "Service", "name": "web", "namespace": "ns"}
    assert event["regarding"] == regarding
    book.report_addresses([key], {}, ReservedAddresses())
    assert book.problems.first(9) == []


@each_cells(
    "kind, place, is_named",
    """
this node, listed              | EXTERNAL_IP   | 192.0.2.10:80     | yes
a VIP on a device              | EXTERNAL_IP   | 192.0.2.200:80    | yes
this node, IPv6                | LOAD_BALANCER | [2001:db8::10]:80 | yes
a LoadBalancer VIP on a device | LOAD_BALANCER | 192.0.2.200:80    | no
the Service's own NodePort     | EXTERNAL_IP   | 192.0.2.10:30099  | no
another node                   | EXTERNAL_IP   | 192.0.2.11:80     | no
a ClusterIP                    | CLUSTER_IP    | 10.96.0.2:80      | no
""",
    kind=FrontendKind,
    is_named=bool,
)
def test_served_address_of_this_node_is_logged_once(kind, place, is_named, caplog):
    """A frontend that is served, and whether a log line names it. The log line warns, since connections to the node now
    reach the Service. The address is served, so `problems` does not list it.
    """
    config = setting("listed", place)
    states = state_of(web(kind, place), config).services
    kept = compute_reserved(NODE, LOCAL, InUse(SERVERS, LISTENING), (API_SLICE,), config)
    book = ProblemBook(EventRecorder(None, "me"))
    with caplog.at_level("WARNING"):
        for _ in range(2):
            book.report_addresses(states, states, kept)
    line = f"{AT_THIS_NODE}: {place}/TCP of Service ns/web"
    assert [each.getMessage() for each in caplog.records] == [line] * is_named
    assert not len(book.problems)


def test_node_port_source_ranges_apply_per_family():
    balanced = service("web ip=10.96.0.2,fd00:96::2 node-port=30080 vip=203.0.113.5")
    for text, families in {
        "": (),
        "10.0.0.0/8": (4,),
        "10.0.0.0/8,fd00::/8": (4, 6),
        "0.0.0.0/0,fd00::/8": (6,),
    }.items():
        config = load.load({"--nodeport-source-ranges": text}, {}).config
        state = state_of_all((balanced, NODE), LOCAL, config)
        for key, found in state.services.items():
            limited = {f.kind for f in found.frontends if f.restricted}
            wanted = {FrontendKind.NODE_PORT} if key.family in families else set()
            assert limited == wanted
            assert bool(found.node_port_ranges) == bool(wanted)
            assert found.source_ranges == (), "those are the VIP's"
