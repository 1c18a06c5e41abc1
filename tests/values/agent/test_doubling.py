# SPDX-License-Identifier: Apache-2.0
"""The cost of one object grows no faster than its size.

Each size that an object controls is doubled twice, and the executed lines of Python are counted, each
iteration of a loop separately.
"""

from collections.abc import Callable, Iterable
from math import log2
from typing import Any

import pytest
from msgspec.structs import replace

from kbpf.agent.problem_book import Lines
from kbpf.dataplane.bpf.maps.ids import IdAllocator
from kbpf.dataplane.bpf.maps.layout import Meta
from kbpf.dataplane.bpf.state.plan import WritePlan, compute_change
from kbpf.dataplane.bpf.state.quotas import TableLimits
from kbpf.model.address import Addr, parse_addr
from kbpf.model.config import Config
from kbpf.model.objects import Algorithm, Cidr, Endpoint, EndpointSlice, Node, Protocol, Service, ServicePort, SlicePort
from kbpf.policy.compute import DesiredStateBuilder
from kbpf.policy.store import ObjectStore
from kbpf.source.decode.annotations import parse_weights
from tests.support.runtime.lines import lines_run
from tests.support.table import each_case
from tests.values.policy.services import up

SMALL, LARGE = 256, 1024
SLOPE = 1.1
TCP = Protocol.TCP


def address(number: int, net: int = 10) -> Addr:
    return parse_addr(f"{net}.{number >> 16}.{number >> 8 & 255}.{number & 255}")


def service(**more: Any) -> Service:
    given = {"ports": (ServicePort("p0", TCP, 80, 30080),), "lb_vips": (address(1, 192),), **more}
    return Service("ns", "web", "LoadBalancer", (address(1, 11),), **given)


def piece(ends: int, ports: int = 1, number: int = 0) -> EndpointSlice:
    return EndpointSlice(
        "ns",
        f"web-{number}",
        "web",
        4,
        tuple(Endpoint(address(number * 1000 + n)) for n in range(ends)),
        tuple(SlicePort(f"p{n}", TCP, 1000 + n) for n in range(ports)),
    )


def of_ends(ends: Iterable[Endpoint]) -> EndpointSlice:
    return EndpointSlice("ns", "web-0", "web", 4, tuple(ends), (SlicePort("p0", TCP, 1000),))


def many_ports(count: int) -> tuple[ServicePort, ...]:
    return tuple(ServicePort(f"p{n}", TCP, 1 + n) for n in range(count))


Objects = tuple[Service, tuple[EndpointSlice, ...]]


def web(*slices: EndpointSlice, **more: Any) -> Objects:
    """A Service with these fields and slices, by default one of three endpoints."""
    return service(**more), slices or (piece(3),)


def many_addresses(count: int) -> tuple[Addr, ...]:
    return tuple(address(at, 20) for at in range(count))


GROWING: dict[str, Callable[[int], Objects]] = {
    "ports": lambda n: web(piece(3, n), ports=many_ports(n)),
    "ports that no slice has": lambda n: web(ports=many_ports(n)),
    "endpoints": lambda n: web(piece(n)),
    "slices": lambda n: web(*(piece(3, number=at) for at in range(n))),
    "ports of a slice": lambda n: web(piece(3, n)),
    "endpoints with Maglev": lambda n: web(piece(n), algorithm=Algorithm.MAGLEV),
    "endpoints that are not ready": lambda n: web(of_ends(Endpoint(address(at), ready=False) for at in range(n))),
    "endpoints with the same address": lambda n: web(
        of_ends(Endpoint(address(7), ready=at % 2 > 0) for at in range(n))
    ),
    "hints": lambda n: web(of_ends(Endpoint(address(at), zone_hints=("a", "b", "c")) for at in range(n))),
    "hints of one endpoint": lambda n: web(of_ends([Endpoint(address(1), zone_hints=tuple(map(str, range(n))))])),
    "source ranges": lambda n: web(source_ranges=tuple(Cidr(address(at), 128) for at in range(n))),
    "externalIPs": lambda n: web(external_ips=many_addresses(n)),
    "load balancers' addresses": lambda n: web(lb_vips=many_addresses(n)),
    "weights": lambda n: web(
        piece(n), weights=parse_weights(",".join(f"10.0.{at >> 8}.{at & 255}={at % 9 + 1}" for at in range(n)), [])
    ),
}


def program(objects: Callable[[int], Objects], size: int) -> None:
    """All the agent's work for a Service and its slices except the system calls."""
    made, slices = objects(size)
    world, desired, config = ObjectStore("me"), DesiredStateBuilder(), Config("me")
    touched = world.apply([up(each) for each in (made, *slices)])
    keys = desired.update(world, touched, (), config)
    states = desired.state.services
    limits, ids = TableLimits(), IdAllocator(Meta(1, 1, 1))
    limits.update(states, keys)
    planner = WritePlan(ids)
    programmed = {
        key: planner.add(compute_change(key, None, limits.effective_state(states[key]))) for key in sorted(keys)
    }
    for key in keys:
        planner.add(compute_change(key, programmed[key], None))


def slope(cost: Callable[[int], int]) -> float:
    """The exponent of the growth: the slope of log(cost) over log(size)."""
    return log2(cost(LARGE) / cost(SMALL)) / log2(LARGE / SMALL)


@each_case("objects", GROWING)
def test_service_of_twice_the_size_costs_twice_as_much(objects):
    def cost(size: int) -> int:
        return lines_run(lambda: program(objects, size))

    assert slope(cost) <= SLOPE


NODES: dict[str, Callable[[int], Node]] = {
    "podCIDRs": lambda n: Node("me", pod_cidrs=tuple(Cidr(address(at), 120) for at in range(n))),
    "addresses": lambda n: Node("me", tuple(address(at) for at in range(n))),
}


@each_case("made", NODES)
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "another"])
def test_node_of_twice_the_size_costs_twice_as_much(made, ours):
    """With Services whose external addresses are compared with the node's."""

    def cost(size: int) -> int:
        world, desired, config = ObjectStore("me"), DesiredStateBuilder(), Config("me")
        services = [service(external_ips=(address(at, 20),)) for at in range(10)]
        services = [replace(one, name=f"s{at}") for at, one in enumerate(services)]
        node = made(size)
        node = node if ours else replace(node, name="other")
        events = [up(one) for one in services]
        desired.update(world, world.apply(events), (), config)
        return lines_run(lambda: desired.update(world, world.apply([up(node)]), (), config))

    assert slope(cost) <= SLOPE


@pytest.mark.parametrize("vips", [(), (address(1, 192),)], ids=["", "that want one address"])
def test_twice_as_many_services_cost_twice_as_much(vips: tuple[Addr, ...]):
    """Services that claim one address conflict, and all but the first lose. The agent computes them
    in the arbitrary order of a set; here they are sorted by name, so that each run is the same.
    """

    def cost(size: int) -> int:
        world, desired, config = ObjectStore("me"), DesiredStateBuilder(), Config("me")
        services = [
            replace(
                service(lb_vips=vips, ports=(ServicePort("p0", TCP, 80),)),
                name=f"s{at:04}",
                cluster_ips=(address(at, 11),),
            )
            for at in range(size)
        ]
        events = [up(one) for one in services]

        def run() -> None:
            for name in sorted(desired.begin_update(world, world.apply(events), (), config)):
                for _ in desired.update_service_in_steps(name, world, config):
                    pass

        return lines_run(run)

    assert slope(cost) <= SLOPE


@pytest.mark.parametrize("text", ["web-{}=1", "10.0.0.{}=x", "=", "node:a{}=2", ",", "a" * 20])
def test_annotation_of_twice_the_length_costs_twice_as_much(text):
    def cost(size: int) -> int:
        annotation = ",".join(text.format(n) for n in range(size))
        return lines_run(lambda: parse_weights(annotation, []))

    assert slope(cost) <= SLOPE


def test_cost_of_a_problem_line_does_not_depend_on_other_lines():
    def cost(size: int) -> int:
        problems = Lines()
        for number in range(size):
            problems.replace(f"ns{number % 4}", number, [f"{number}: bad"])

        def step() -> None:
            problems.replace("", "new", ["new: bad"])
            problems.replace("", "new", [])
            problems.first(50)
            len(problems)

        return lines_run(step)

    assert cost(SMALL) == cost(LARGE)
