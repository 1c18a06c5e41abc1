# SPDX-License-Identifier: Apache-2.0
"""The IPVS data plane under failures: requests that the kernel refuses, state that others destroy,
and agents that are killed between any two calls. IPVS is a fake
(tests/support/faults/fake_ipvs.py); nftables, netlink and addresses are real.
"""

import contextlib
import errno
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
from msgspec.structs import replace as replace_fields

from kbpf.dataplane.ipvs import ipvs_cleanup as cleanup
from kbpf.dataplane.ipvs import ruleset
from kbpf.dataplane.ipvs.executor import KernelState
from kbpf.dataplane.ipvs.plan import SetName
from kbpf.dataplane.ipvs.virtual_services import VirtualServices
from kbpf.errors import KernelError
from kbpf.kernel.net import dummy
from kbpf.kernel.net.ipvs import IpvsCommand, IpvsRequest
from kbpf.kernel.netfilter import forward_rules
from kbpf.model.address import format_addr
from kbpf.model.config import IPVS_DEVICE
from kbpf.model.desired import ServiceState
from kbpf.model.objects import Algorithm
from tests.support.faults.fake_ipvs import Node, tcp
from tests.support.plane import desired, service, services
from tests.support.table import each_row

A, B = "10.244.1.2:80", "10.244.1.3:80"
OWN = "198.18.0.1"
FOREVER = float("inf")
NAMES = {"A": A, "B": B}
WEB, OTHER = services("web 10.96.0.1:80 -> A; other 10.96.0.2:80 -> B", NAMES)


def elements(node: Node, *names: SetName) -> set[str]:
    """Addresses (and ports) in these sets."""
    read = node.do(lambda: ruleset.parse_elements(forward_rules.run_transaction(ruleset.LIST_TABLE)))
    return {
        ":".join(format_addr(one) if isinstance(one, bytes) else str(one) for one in parts[:3:2])
        for name, parts in read
        if name in names
    }


def refused(node: Node, *services: ServiceState, **more: Any) -> dict[str, str]:
    """Applies the Services; returns the kernel's error for each refused Service port."""
    report = node.apply(*services, **more)
    return {key.name: words for key, words in report.refused.items()}


# ---- refused by the kernel -----------------------------------------------------------------------


def test_refused_address_does_not_stop_other_services(node: Node):
    """Its repetition makes no transaction."""
    bad = service("bad", "[fd00:96::1]:80 ExternalIP=[ff0e::1]:80", "[fd00:244::2]:80")
    words = refused(node, WEB, bad)
    assert words.keys() == {"bad"}
    assert "ff0e::1" in words["bad"]
    assert "EADDRNOTAVAIL" in words["bad"]
    made = node.plane._kernel.nft_transactions
    assert refused(node, WEB, bad, touched=()) == words
    assert node.plane._kernel.nft_transactions == made
    assert refused(node, WEB, bad, OTHER, touched=[OTHER.key]).keys() == {"bad"}
    assert node.addresses() == {"10.96.0.1", "10.96.0.2", "fd00:96::1"}
    assert node.ipvs.shown().keys() == {"10.96.0.1:80/6", "10.96.0.2:80/6", "[fd00:96::1]:80/6"}
    assert "ff0e::1" not in elements(node, SetName.VIRTUAL_IPS)
    assert "default/bad TCP IPv6" in "".join(node.plane.status().problems)
    assert refused(node, WEB, OTHER, touched=[bad.key]) == {}
    assert node.addresses() == {"10.96.0.1", "10.96.0.2"}


def test_node_with_ipv6_disabled_serves_ipv4(node: Node):
    v6 = service("web6", "[fd00:96::1]:80", "[fd00:244::2]:80")
    node.run("sysctl -q -w net.ipv6.conf.all.disable_ipv6=1")
    assert refused(node, WEB, v6) == {}
    assert (node.addresses(), set(node.ipvs.shown())) == ({"10.96.0.1"}, {"10.96.0.1:80/6"})
    assert "IPv6 is disabled" in "".join(node.plane.status().problems)
    node.run("sysctl -q -w net.ipv6.conf.all.disable_ipv6=0")
    assert refused(node, WEB, v6) == {}
    assert node.addresses() == {"10.96.0.1", "fd00:96::1"}
    assert set(node.ipvs.shown()) == {"10.96.0.1:80/6", "[fd00:96::1]:80/6"}
    assert node.plane.status().problems == tuple(x for x in node.plane.status().problems if "IPv6 is" not in x)


class Refusal(NamedTuple):
    """A request that IPVS refuses for a while; the real servers that exist meanwhile, and the
    frontends that are served.
    """

    name: str
    what: Callable[[IpvsRequest], bool]
    servers: dict[str, dict[str, int]]
    served: set[str]


GOOD = {"10.96.0.2:80/6": {B: 1}}
REFUSALS = [
    Refusal(
        "a virtual service",
        lambda c: c.command is IpvsCommand.IPVS_CMD_NEW_SERVICE and c.service == tcp("10.96.0.1", 80),
        GOOD,
        {"10.96.0.2:80"},
    ),
    Refusal(
        "one of its real servers",
        lambda c: str(c.server) == A,
        GOOD | {"10.96.0.1:80/6": {B: 1}},
        {"10.96.0.1:80", "10.96.0.2:80"},
    ),
]


@each_row(REFUSALS)
def test_refused_ipvs_request_is_retried_and_stops_no_other(node: Node, row: Refusal):
    both = service("web", "10.96.0.1:80", f"{A} {B}")
    node.ipvs.refuse = lambda change: errno.EINVAL if row.what(change) else 0
    for touched in (None, ()):
        words = refused(node, both, OTHER, touched=touched)
        assert words.keys() == {"web"}
        assert "EINVAL" in words["web"]
        assert node.ipvs.shown() == row.servers
        assert elements(node, SetName.SERVED) == row.served
    node.ipvs.refuse = lambda _: 0
    assert refused(node, both, OTHER, touched=()) == {}
    assert node.ipvs.shown() == GOOD | {"10.96.0.1:80/6": {A: 1, B: 1}}
    assert elements(node, SetName.SERVED) == {"10.96.0.1:80", "10.96.0.2:80"}
    assert refused(node) == {}
    assert (node.ipvs.shown(), node.addresses()) == ({}, set())


def test_recreated_service_does_not_remember_drained_servers(node: Node):
    """Its real server was draining when the Service was deleted, and is added again later."""
    both, only_b = (service("web", "10.96.0.1:80", to) for to in (f"{A} {B}", B))
    for states in ([both], [only_b], [], [only_b], [both]):
        assert refused(node, *states) == {}
    assert node.ipvs.shown() == {"10.96.0.1:80/6": {A: 1, B: 1}}


LACKS = [
    ("lblc", "", "lblc", "wrr"),
    ("lblc", "", "lblc wrr", "rr"),
    ("mh", "", "mh wrr", "rr"),
    ("", "MAGLEV", "mh", "wrr"),
]


@pytest.mark.parametrize(("asked", "algorithm", "missing", "gets"), LACKS)
def test_missing_schedulers_fall_back_to_simpler_ones(
    fake_node: Node, asked: str, algorithm: str, missing: str, gets: str
):
    """Each is reported once; the scheduler in use then counts as the configured one."""
    node, lacks = fake_node, missing.split()
    web, other = (replace_fields(one, algorithm=Algorithm[algorithm or "RANDOM"]) for one in (WEB, OTHER))
    node.start(replace(node.config, ipvs_scheduler=asked or node.config.ipvs_scheduler))
    node.ipvs.refuse = lambda c: errno.ENOENT if c.settings and c.settings.scheduler in lacks else 0
    assert refused(node, web) == {}
    assert refused(node, web, other, touched=[other.key]) == {}
    assert {settings.scheduler for settings, _ in node.ipvs.held.values()} == {gets}
    said = [line for line in node.plane.status().problems if "scheduler" in line]
    assert len(said) == len(lacks)
    assert gets in said[-1]
    node.plane.invalidate()
    assert node.apply(web, other).writes == {}, "nothing has changed"
    assert [line for line in node.plane.status().problems if "scheduler" in line] == said


def test_kernel_without_any_scheduler_refuses_all_services(node: Node):
    node.ipvs.refuse = lambda c: errno.ENOENT if c.settings else 0
    words = refused(node, WEB, OTHER)
    assert words.keys() == {"web", "other"}
    assert "ENOENT" in words["web"]


# ---- addresses of the node -----------------------------------------------------------------------


def test_virtual_address_follows_the_nodes_addresses(fake_node: Node):
    node = fake_node
    vip = service("vip", "10.96.0.1:80 LoadBalancer=192.0.2.1:80", A)
    node.run("ip addr add 192.0.2.1/32 dev lo")
    node.start()
    node.apply(vip)
    here, elsewhere = {"10.96.0.1"}, {"10.96.0.1", "192.0.2.1"}
    for command, on_device in (("del", elsewhere), ("add", here), ("del", elsewhere)):
        node.run(f"ip addr {command} 192.0.2.1/32 dev lo")
        node.apply(vip)
        assert node.addresses() == on_device
        assert elements(node, SetName.VIRTUAL_IPS) == on_device
        assert "192.0.2.1:80/6" in node.ipvs.shown()
    node.run("ip addr add 192.0.2.1/32 dev lo")
    node.apply(vip, OTHER, touched=[OTHER.key])
    assert node.addresses() == {"10.96.0.1", "10.96.0.2"}, "of an untouched Service, too"


# ---- a start with incomplete knowledge -----------------------------------------------------------


def test_unknown_service_does_not_delay_repairs_or_changes(fake_node: Node):
    node = fake_node
    node.run(
        "nft add table ip filter; add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }"
    )
    lost = service("lost", "10.96.0.9:80", f"{A} {B}")
    node.start()
    node.apply(WEB, lost)
    node.start()
    node.apply(WEB, sound=False)
    assert set(node.ipvs.shown()) == {"10.96.0.1:80/6", "10.96.0.9:80/6"}
    node.tick()
    assert "kbpf: masqueraded" in node.run("nft list ruleset")
    reads = node.ipvs.calls["services"]
    node.apply(WEB, OTHER, touched=[OTHER.key], sound=False)
    node.apply(WEB, touched=[OTHER.key], sound=False)
    assert node.ipvs.calls["services"] == reads, "a change costs only the change"
    node.run("nft flush ruleset")
    node.tick()
    assert elements(node, SetName.SERVED) >= {"10.96.0.1:80"}


def test_state_of_an_earlier_agent_is_updated_once_known(fake_node: Node):
    node = fake_node
    lost, more = service("lost", "10.96.0.9:80", f"{A} {B}"), service("more", "10.96.0.8:80", A)
    node.start()
    node.apply(WEB, lost, more)
    node.start()
    node.apply(WEB, sound=False)
    found = service("lost", "10.96.0.9:80", A)
    node.apply(WEB, found, touched=[found.key], sound=False)
    node.tick()
    assert node.ipvs.shown()["10.96.0.9:80/6"] == {A: 1}
    assert node.addresses() == {"10.96.0.1", "10.96.0.8", "10.96.0.9"}
    node.apply(WEB, found, touched=())
    assert node.addresses() == {"10.96.0.1", "10.96.0.9"}
    assert set(node.ipvs.shown()) == {"10.96.0.1:80/6", "10.96.0.9:80/6"}
    assert "10.96.0.8:80" not in elements(node, *SetName)


# ---- state that others destroy -------------------------------------------------------------------


def test_failed_repair_is_retried(node: Node, monkeypatch):
    node.apply(WEB)
    node.tick()
    before = elements(node, *SetName)
    node.run("nft flush ruleset")
    with monkeypatch.context() as patch:
        busy = KernelError("busy", errno=errno.EBUSY)
        patch.setattr(ruleset, "add_elements", Mock(side_effect=busy))
        with pytest.raises(KernelError, match="busy"):
            node.tick()
    assert node.addresses() == {"10.96.0.1"}, "the failed repair removes nothing"
    node.tick()
    assert elements(node, *SetName) == before


def test_deleted_device_is_recreated(node: Node):
    node.apply(WEB)
    node.run(f"ip link del {IPVS_DEVICE}")
    node.tick()
    assert node.addresses() == {"10.96.0.1"}
    node.run(f"ip link del {IPVS_DEVICE}")
    with pytest.raises(KernelError, match="ENODEV"):
        node.apply(WEB, OTHER, touched=[OTHER.key])
    assert refused(node, WEB, OTHER, touched=[OTHER.key]) == {}
    assert node.addresses() == {"10.96.0.1", "10.96.0.2"}


# ---- an agent that is killed ---------------------------------------------------------------------


class Killed(BaseException):
    """Raised where the agent is killed."""


class FaultClock:
    """Counts calls to the kernel. When the count reaches 0, the call raises Killed, or `error` if
    given; with `error`, reads are counted as well.
    """

    def __init__(self, node: Node, patch: pytest.MonkeyPatch, error: KernelError | None = None) -> None:
        self.left = -1
        self.error = error or Killed()
        node.ipvs.refuse = lambda _: self.count()
        real = forward_rules.run_transaction

        def transaction(*commands: Any, **more: Any) -> Any:
            if "list" not in commands[0]:
                self.count()
            return real(*commands, **more)

        patch.setattr(forward_rules, "run_transaction", transaction)
        for name in ("add_addresses", "delete_addresses"):
            patch.setattr(dummy, name, self.counted(getattr(dummy, name)))
        for name in ("read_elements", "read_node_addresses", "address_families", "read_addresses"):
            if error is not None:
                patch.setattr(KernelState, name, self.counted(getattr(KernelState, name)))
        if error is not None:
            patch.setattr(VirtualServices, "read_pools", self.counted(VirtualServices.read_pools))

    def counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any) -> Any:
            self.count()
            return real(*words)

        return call

    @contextlib.contextmanager
    def stop(self, after: int) -> Iterator[None]:
        """Stops what is done in the block at this call. `stopped`: whether there was such a call."""
        self.left, self.stopped = after, True
        try:
            yield
            self.stopped = False
        except type(self.error):
            pass
        finally:
            self.left = -1

    def count(self) -> int:
        if self.left == 0:
            raise self.error
        self.left -= 1
        return 0


ONE = services(
    """web 10.96.0.1:80 -> A B
    lb 10.96.0.3:80 LoadBalancer=192.0.2.1:80 -> A ranges=10.0.0.0/8
    dns:UDP 10.96.0.10:53 -> A""",
    NAMES,
)
TWO = services(
    """web 10.96.0.1:80 -> A
    lb 10.96.0.3:80 LoadBalancer=192.0.2.1:80 -> ranges=10.1.0.0/16
    new 10.96.0.4:80 NodePort=0.0.0.0:30080 ExternalIP=198.18.0.1:80 -> B external=Local""",
    NAMES,
)


def restart(node: Node, states: list[ServiceState], sound: bool = True) -> None:
    """The next agent programs these."""
    node.plane.close()
    node.plane.open()
    node.plane.apply(desired(*states, nodes=OWN), None, sound)


def begin(node: Node, states: list[ServiceState]) -> Any:
    """The kernel's state after a first agent has programmed these."""
    node.plane.close()
    cleanup.remove(node.config)
    restart(node, states)
    return held(node)


def after_each_stop(
    node: Node, clock: FaultClock, before: Callable[[], Any], what: Callable[[], Any], then: Callable[[], Any]
) -> Iterator[tuple[int, Any]]:
    """For each call to the kernel that `what` makes: its number, and the kernel's state if `what` is stopped there
    after `before`, and followed by `then`.
    """
    for number in itertools.count():
        node.do(before)
        with clock.stop(number):
            node.do(what)
        if not clock.stopped:
            break
        node.do(then)
        yield number, node.do(partial(held, node))
    assert number > 2


def test_next_agent_repairs_a_kill_between_any_two_calls(fake_node: Node, monkeypatch):
    """Whatever state the next agent finds, and whatever is desired by then, it ends in the state
    that a first agent would program.
    """
    node = fake_node
    node.run(f"ip addr add {OWN}/32 dev lo")
    clock = FaultClock(node, monkeypatch)
    for old, new, goal in ((ONE, TWO, TWO), (ONE, TWO, ONE), (TWO, ONE, ONE)):
        expected = node.do(partial(begin, node, goal))
        what = partial(node.plane.apply, desired(*new, nodes=OWN), None)

        def then(goal: list[ServiceState] = goal) -> None:
            restart(node, goal)
            node.plane.tick(FOREVER)

        for number, found in after_each_stop(node, clock, partial(begin, node, old), what, then):
            assert found == expected, f"killed before call {number}"


def held(node: Node) -> Any:
    """Sets, addresses and virtual services. Values of marks are left out, because they
    may differ.
    """
    listed = ruleset.parse_elements(forward_rules.run_transaction(ruleset.LIST_TABLE))
    marked = (SetName.SHORT_CIRCUITS, SetName.OWN_FWMARKS, SetName.FWMARKS)
    sets = sorted((n, parts[:-1] if n in marked else parts) for n, parts in listed)
    services = sorted(
        (service._replace(fwmark=bool(service.fwmark)), settings, sorted(servers.items()))
        for service, (settings, servers) in node.ipvs.held.items()
    )
    return sets, dummy.addresses_of(IPVS_DEVICE), services


# ---- an apply that fails -------------------------------------------------------------------------


class Change(NamedTuple):
    """What is programmed, what is applied then, and the names of the changed Services. `knows`: the
    Services that a next agent knows, which is started before.
    """

    name: str
    old: list[ServiceState]
    new: list[ServiceState]
    touched: str
    knows: list[ServiceState] | None = None


PORT, EXACT, LONE, LOCAL = services(
    """a 10.96.0.1:80 NodePort=0.0.0.0:30080 -> A
    b 10.96.0.2:30080 ExternalIP=198.18.0.1:30080 -> B
    c 10.96.0.3:80 -> A
    a 10.96.0.1:80 NodePort=0.0.0.0:30080 -> A external=Local""",
    NAMES,
)
WAYS = [
    Change("an exact frontend is added", [PORT], [PORT, EXACT], "b"),
    Change("an exact frontend is deleted", [PORT, EXACT], [PORT], "b"),
    Change("both are replaced", [PORT, EXACT], [LONE], "a b c"),
    Change("next agent learns of it later", [PORT, EXACT], [PORT, EXACT], "b", [PORT]),
    Change("next agent learns of two later", [PORT, EXACT, LONE], [PORT, EXACT, LONE], "b c", [PORT]),
]


@pytest.mark.parametrize(
    ("way", "ticks"),
    [*((way, False) for way in WAYS), (WAYS[2], True), (WAYS[4], True)],
    ids=lambda one: getattr(one, "name", "repaired before" if one else "applied again"),
)
def test_apply_after_a_failed_apply_is_complete(fake_node: Node, monkeypatch, way: Change, ticks: bool):
    """Whichever call fails: neighbours of changed Services are not forgotten, and everything can be
    deleted afterwards.
    """
    node, sound = fake_node, way.knows is None
    node.run(f"ip addr add {OWN}/32 dev lo")
    clock = FaultClock(node, monkeypatch, KernelError("busy", errno=errno.EBUSY))
    rests = [[one for one in way.new if one != gone] for gone in (PORT, EXACT)]
    states = (way.new, rests[0], way.new, rests[1], way.new, [])
    goals = [node.do(partial(begin, node, some)) for some in states]
    touched = [one.key for one in (PORT, EXACT, LONE) if one.key.name in way.touched.split()]
    what = partial(node.plane.apply, desired(*way.new, nodes=OWN), touched, sound)

    def before() -> None:
        begin(node, way.old)
        if way.knows is not None:
            restart(node, way.knows, sound)

    def then() -> None:
        if ticks:
            node.plane.tick(FOREVER)
        what()
        node.plane._kernel.services.remove_drained()

    for number, found in after_each_stop(node, clock, before, what, then):
        assert found == goals[0], f"failed at call {number}"
        for i, (old, new) in enumerate(itertools.pairwise(states), 1):
            changed = {*old} ^ {*new}
            node.apply(*new, nodes=OWN, touched=[one.key for one in changed])
            node.do(node.plane._kernel.services.remove_drained)
            assert node.do(partial(held, node)) == goals[i], f"failed at call {number}, then {i}"


@pytest.mark.parametrize("ends", [False, True], ids=["it fails", "the agent is killed"])
def test_stopped_removal_of_a_short_circuit_is_completed(fake_node: Node, monkeypatch, ends: bool):
    """Whichever call the agent is killed at, or the kernel refuses, in the tick after a change to policy Cluster."""
    node = fake_node
    node.run(f"ip addr add {OWN}/32 dev lo")
    clock = FaultClock(node, monkeypatch, None if ends else KernelError("busy", errno=errno.EBUSY))
    expected = node.do(partial(begin, node, [PORT]))

    def before() -> None:
        begin(node, [LOCAL])
        node.plane.apply(desired(PORT, nodes=OWN), [PORT.key])
        assert any(one.fwmark for one in node.ipvs.held)

    def then() -> None:
        if ends:
            restart(node, [PORT])
        node.plane.tick(FOREVER)

    for number, found in after_each_stop(node, clock, before, lambda: node.plane.tick(1.0), then):
        assert found == expected, f"stopped at call {number}"
