# SPDX-License-Identifier: Apache-2.0
"""A change takes the same work with ten Services as with 2,000."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kbpf.dataplane.base import Report
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.dataplane.bpf.state.planner import LARGE_ENTRIES
from kbpf.kernel.bpf import syscalls
from kbpf.model.desired import DesiredState, ServicePortKey, ServiceState
from kbpf.model.objects import Protocol
from tests.support.plane import Site, desired, flush, service, sites
from tests.support.runtime.lines import lines_run

FEW, MANY = 10, 2_000
A, B, C = (f"10.244.0.{i}:80" for i in (1, 2, 3))


@dataclass
class Cluster:
    """A plane with a number of Services, TCP and UDP, and its desired state."""

    plane: BpfPlane
    services: dict[ServicePortKey, ServiceState]

    def change(self, *changes: ServiceState | ServicePortKey) -> Report:
        """A Service port becomes like this; one of which only the key is given is deleted."""
        touched = []
        for each in changes:
            if isinstance(each, ServiceState):
                self.services[each.key] = each
                touched.append(each.key)
            else:
                del self.services[each]
                touched.append(each)
        return self.plane.apply(DesiredState(self.services), touched)

    def program(self, change: ServiceState | ServicePortKey) -> None:
        """Makes the change and retires old sets; that is in the report of the next apply, an empty one."""
        assert self.change(change).refused == {}
        flush(self.plane)
        self.plane.apply(DesiredState(self.services), ())


def numbered_service(number: int, to: str = f"{A} {B}", **more: Any) -> ServiceState:
    protocol = Protocol.UDP if number % 2 else Protocol.TCP
    at = f"10.{100 + number // 60_000}.{number // 250 % 240}.{number % 250 + 1}:80"
    return service(f"s{number:05}", at, to, protocol, **more)


@pytest.fixture(scope="module")
def clusters(artifact_cache: Path) -> Iterator[dict[int, Cluster]]:
    with sites(artifact_cache) as make:
        found = {}
        for count in (FEW, MANY):
            plane = make().open()
            services = {(state := numbered_service(i)).key: state for i in range(count)}
            plane.apply(DesiredState(services), None)
            found[count] = Cluster(plane, services)
            for change in CHANGES.values():  # what is computed once, such as a cache, counts for no change
                found[count].program(change)
        yield found


CHANGES: dict[str, ServiceState | ServicePortKey] = {
    "one more endpoint, TCP": numbered_service(2, f"{A} {B} {C}"),
    "one more endpoint, UDP": numbered_service(3, f"{A} {B} {C}"),
    "one endpoint less, TCP": numbered_service(2, A),
    "one endpoint less, UDP": numbered_service(3, A),
    "no endpoints": numbered_service(4, ""),
    "affinity": numbered_service(4, A, affinity_timeout=9),
    "no affinity": numbered_service(4, A),
    "a new Service": numbered_service(50_000),
    "a Service is deleted": numbered_service(50_000).key,
    "nothing": numbered_service(5),
}


def test_change_runs_the_same_lines_in_a_large_cluster(clusters: dict[int, Cluster], monkeypatch):
    """Every kind of change, including its retiring, and so every write, in one slice. With several, the
    machine's load would decide how many lines run before a slice ends.
    """
    monkeypatch.setattr("kbpf.dataplane.bpf.plane.SLICE_BUDGET_S", float("inf"))
    for name, change in CHANGES.items():
        lines = {count: lines_run(partial(c.program, change)) for count, c in clusters.items()}
        assert lines[FEW] == lines[MANY], name


def test_thousand_services_are_written_in_few_calls(clusters: dict[int, Cluster], monkeypatch):
    calls = []
    for command in ("bpf_map_update_elem", "bpf_map_update_batch"):
        real = getattr(syscalls.lib(), command)
        monkeypatch.setattr(syscalls.lib(), command, lambda *args, real=real: calls.append(args) or real(*args))
    report = clusters[FEW].change(*(numbered_service(i) for i in range(20_000, 21_000)))
    assert report.writes["services"] == 1000
    assert len(calls) == 5, "meta, names, slots, frontends, their IPs; the backends exist"


def test_deferred_service_port_does_not_take_back_a_lost_address(site: Site, monkeypatch):
    """Its turn comes after another Service has got the address."""
    monkeypatch.setattr("kbpf.dataplane.bpf.plane.SLICE_BUDGET_S", 0.0)
    crowd = " ".join(f"10.245.{i // 250}.{i % 250 + 1}:80" for i in range(LARGE_ENTRIES))
    before = service("large", "10.96.0.1:80 ExternalIP=192.0.2.1:80", crowd)
    after = service("large", "10.96.0.1:80", f"{crowd} 10.245.9.9:80")
    small = service("small", "10.96.0.2:80 ExternalIP=192.0.2.1:80", "10.0.0.1:80")
    first = service("first", "10.96.0.3:80", crowd)
    state = desired(after, small, first)
    plane = site.start(desired(before))
    report = plane.apply(state, state.services.keys())
    while report.deferred:
        report = plane.apply(state, {after.key})
    shown = site.dump()["frontends"]
    assert shown["192.0.2.1:80/TCP"]["service"] == "default/small"
    assert len(shown["10.96.0.1:80/TCP"]["cluster"]) == LARGE_ENTRIES + 1
