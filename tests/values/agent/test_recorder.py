# SPDX-License-Identifier: Apache-2.0
"""The Recorder's metrics: each changes when it has become true in the kernel, not before."""

import time
from datetime import UTC, datetime

from msgspec.structs import replace

from kbpf.agent.recorder import Recorder
from kbpf.model.address import Addr, parse_addr
from kbpf.model.config import Config
from kbpf.model.events import Event, Upsert
from kbpf.model.objects import (
    Node,
    ServiceName,
)
from kbpf.policy.compute import DesiredStateBuilder
from kbpf.policy.health_check import HealthCheck
from kbpf.policy.store import ObjectStore
from kbpf.serve.server import AgentServer
from tests.support.prometheus import Family, parse
from tests.support.table import each_named_pair
from tests.values.policy.services import addrs, cidrs, gone, key, piece, service, up

WEB = ServiceName("ns", "web")
HERE, THERE = "n1", "n2"


class RecordingServer(AgentServer):
    """An AgentServer that records the health checks that it is given."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.told: list[tuple[dict[ServiceName, HealthCheck], tuple[Addr, ...] | None]] = []

    def set_health_checks(self, wanted, at) -> None:
        self.told.append((dict(wanted), at))


class Rig:
    """An ObjectStore, policy and Recorder, driven as the agent does.

    With `programmed=False` hear() leaves the changes to be programmed by end().
    """

    def __init__(self, config: Config = Config(node_name=HERE)) -> None:  # noqa: B008
        self.config = config
        self.desk = RecordingServer(config)
        self.tally = Recorder(config, self.desk)
        self.world, self.desired = ObjectStore(HERE), DesiredStateBuilder()

    def hear(self, *events: Event, programmed: bool = True) -> None:
        touched = self.world.apply(events)
        self.tally.taken(events, touched)
        own = (parse_addr("192.0.2.1"),)
        changed = self.desired.update(self.world, touched, own, self.config)
        self.tally.computed(changed, self.desired.state)
        if programmed:
            self.end(changed)

    def end(self, changed=frozenset()) -> None:
        if changed:
            self.tally.applied(changed, 0.5, written=1)
        self.tally.settled(self.world, self.desired.state)

    def page(self) -> dict[str, Family]:
        return parse(self.desk.format_metrics().decode())


def web(policy: str = "external", port: int = 31_999) -> Upsert:
    return up(replace(service(f"web node-port=30080 {policy}-local"), health_check_node_port=port))


def endpoints(*nodes: str, triggered: str = "") -> Upsert:
    slice_ = piece(" ".join(f"{i}@{node}" for i, node in enumerate(nodes, 1)))
    return Upsert(key(slice_), slice_, 1.0, triggered)


WEB_GONE, SLICE_GONE = gone(service("web")), gone(piece(""))


def test_health_check_follows_its_service_and_endpoints():
    rig = Rig()
    rig.hear(web())
    rig.hear(endpoints(HERE, THERE))
    rig.hear(endpoints(HERE, HERE))
    rig.hear(web(port=31_000))
    rig.hear(endpoints(THERE))
    rig.hear(WEB_GONE)
    told = [checks.get(WEB) for checks, _ in rig.desk.told]
    assert told == [
        HealthCheck(31_999, 0, 0),
        HealthCheck(31_999, 1, 1),
        HealthCheck(31_999, 2, 2),
        HealthCheck(31_000, 2, 2),
        HealthCheck(31_000, 0, 0),
        None,
    ]


def test_health_checks_change_only_once_programmed():
    rig = Rig()
    rig.hear(web(), endpoints(HERE), programmed=False)
    assert not rig.desk.told
    rig.end()
    assert [checks for checks, _ in rig.desk.told] == [{WEB: HealthCheck(31_999, 1, 1)}]


@each_named_pair(
    "given, at",
    """\
primary, all addresses without a Node: | → 192.0.2.1
primary: | 192.0.2.7 192.0.2.8 → 192.0.2.7
networks: 192.0.2.0/24 | → 192.0.2.1
all: all | 192.0.2.7 → all
""",
)
def test_health_checks_listen_at_node_port_addresses(given, at):
    """--nodeport-addresses | the addresses of the Node → where the health checks listen."""
    networks, addresses = map(str.strip, given.split("|"))
    everywhere = networks == "all"
    listed = cidrs("" if everywhere else networks)
    rig = Rig(Config(HERE, node_port_addresses=listed, all_node_port_addresses=everywhere))
    rig.hear(up(Node(HERE, addrs(*addresses.split()))))
    assert not rig.desk.told, "there is none"
    rig.hear(web())
    assert rig.desk.told[-1][1] == (None if everywhere else addrs(at))
    rig.hear(WEB_GONE)
    assert rig.desk.told[-1] == ({}, None)


def test_services_that_nothing_serves_are_counted():
    """Those with policy Local and no endpoint of this node, for each traffic policy, and those without any endpoint."""
    rig = Rig()
    name = "kubeproxy_sync_proxy_rules_no_local_endpoints_total"
    for events, external, internal, without in (
        ((web(),), 0, 0, 1),
        ((endpoints(THERE),), 1, 0, 0),
        ((endpoints(HERE),), 0, 0, 0),
        ((web("internal"), endpoints(THERE)), 0, 1, 0),
        ((endpoints(),), 0, 0, 1),  # refused, not dropped
        ((endpoints(THERE),), 0, 1, 0),
        ((SLICE_GONE,), 0, 0, 1),
        ((WEB_GONE,), 0, 0, 0),
    ):
        rig.hear(*events)
        family = rig.page()[name]
        assert family.value(ip_family="IPv4", traffic_policy="external") == external, events
        assert family.value(ip_family="IPv4", traffic_policy="internal") == internal, events
        assert family.value(ip_family="IPv6", traffic_policy="internal") == 0
        assert rig.tally.without_endpoints == without, events


def test_changes_are_pending_until_programmed():
    rig = Rig()
    rig.hear(web(), endpoints(HERE), up(Node(HERE)), programmed=False)
    prefix = "kubeproxy_sync_proxy_rules"
    for kind in ("service", "endpoint"):
        assert rig.page()[f"{prefix}_{kind}_changes_total"].value() == 1
        assert rig.page()[f"{prefix}_{kind}_changes_pending"].value() == 1
    rig.end()
    for kind in ("service", "endpoint"):
        assert rig.page()[f"{prefix}_{kind}_changes_total"].value() == 1
        assert rig.page()[f"{prefix}_{kind}_changes_pending"].value() == 0


def stamp(seconds: float) -> str:
    """The time `seconds` from now, in RFC 3339 format."""
    at = datetime.fromtimestamp(time.time() + seconds, UTC)
    return at.isoformat().replace("+00:00", "Z")


def test_programming_duration_starts_at_the_trigger_time_of_the_slice():
    rig = Rig()

    def timed() -> float:
        name = "kubeproxy_network_programming_duration_seconds"
        found = rig.page()[name].samples
        return found[f"{name}_count", frozenset({("ip_family", "IPv4")})]

    rig.hear(web())
    for nodes, triggered, count in (
        ((HERE,), stamp(-3600), 0),  # before this process started: not its work
        ((THERE,), "", 0),
        ((HERE,), "yesterday", 0),
        ((THERE,), stamp(1), 1),
        ((THERE,), stamp(2), 1),  # no change of the endpoints
        ((HERE,), stamp(2), 2),
    ):
        rig.hear(endpoints(*nodes, triggered=triggered))
        assert timed() == count, triggered
    rig.hear(endpoints(THERE, triggered=stamp(2)), programmed=False)
    assert timed() == 2
    rig.end({next(iter(rig.desired.state.services))})
    assert timed() == 3


def test_node_eligible_is_0_while_the_node_is_being_deleted():
    rig = Rig()

    def is_eligible() -> float:
        return rig.page()["kbpf_node_eligible"].value()

    assert is_eligible()  # no Node object yet
    rig.hear(up(Node(HERE)))
    assert is_eligible()
    rig.hear(up(Node(HERE, being_deleted=True)))
    assert not is_eligible()
    rig.hear(up(Node(HERE)))
    assert is_eligible()
    rig.hear(gone(Node(HERE)))
    assert not is_eligible()
