# SPDX-License-Identifier: Apache-2.0
"""Compares kbpf's policy with kube-proxy's own functions: go/apiserver/judge, a process that
answers one JSON line with another.

A question consists of API objects as plain dicts. The results of the judge and of kbpf have the
same form, so that a test compares two dicts.
"""

import json
import re
import subprocess
from collections.abc import Iterable, Sequence
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

from kbpf.model.address import family_of
from kbpf.model.desired import FrontendKind, ServiceState
from kbpf.model.events import Kind
from kbpf.model.objects import Cidr, EndpointSlice, Node, Service
from kbpf.policy.compute import compute_service_states
from kbpf.policy.health_check import compute_health_check
from kbpf.source.decode import decode
from tests.support.build import go_build

Json = dict[str, Any]
JUDGES = ("judge", "judge-1.36")
"""Programs of go_build: the newest kube-proxy, and the previous minor version."""
FAMILIES = (("V4", 4), ("V6", 6))


class Question(NamedTuple):
    """The input of one node's agent. `services` and `slices` are the API's JSON;
    `node_port_addresses` are networks and `interfaces` the node's addresses, in CIDR notation.
    """

    node: str
    zone: str
    services: Sequence[Json]
    slices: Sequence[Json]
    node_port_addresses: Sequence[str] = ()
    interfaces: Sequence[str] = ()


class Judge:
    """A running judge; `program` is one of go_build's."""

    def __init__(self, program: str = "judge") -> None:
        self.program = program
        self._process = subprocess.Popen(
            [go_build.build(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, question: Question, tries: int = 1) -> dict[int, list[Json]]:
        """kube-proxy's results by family: each distinct outcome of `tries` runs."""
        self.send(question, tries)
        return self.receive()

    def send(self, question: Question, tries: int = 1) -> None:
        """Sends a question without waiting; receive() returns the answer."""
        stdin = self._process.stdin
        fields = {name.replace("_", ""): value for name, value in question._asdict().items()}
        stdin.write(json.dumps({**fields, "tries": tries}) + "\n")
        stdin.flush()

    def receive(self) -> dict[int, list[Json]]:
        """The answer to the question of send(), in the form of ask()."""
        answer = self._read()
        return {family: [_theirs(one) for one in answer[name]] for name, family in FAMILIES}

    def node_port_ips(self, networks: Sequence[str], interfaces: Sequence[str]) -> dict[int, set]:
        """The addresses of these interfaces on which NodePorts answer, by family."""
        self.send(Question("", "", [], [], networks, interfaces))
        answer = self._read()
        return {family: set(answer[name][0]["NodeIPs"]) for name, family in FAMILIES}

    def _read(self) -> Json:
        stdout = self._process.stdout
        answer: Json = json.loads(stdout.readline() or '{"Error": "the judge died"}')
        assert "Error" not in answer, answer
        return answer

    def close(self) -> None:
        self._process.communicate()


def _theirs(said: Json) -> Json:
    ports = {f"{port['Name']}/{port['Protocol']}": _their_port(port) for port in said["Ports"]}
    checks = {name: (port, said["LocalReady"].get(name, 0)) for name, port in said["HealthPorts"].items()}
    return {**ports, **{f"health check of {name}": check for name, check in checks.items()}}


def _their_port(port: Json) -> Json:
    own, vips = port["ClusterIP"], set(port["LoadBalancerVIPs"])
    dialled = {("ClusterIP", own)}
    dialled |= {("LoadBalancer", vip) for vip in vips - {own}}
    # kbpf reports an address of two kinds once, as the kind that can have source ranges.
    dialled |= {("ExternalIP", ip) for ip in {*port["ExternalIPs"]} - vips - {own}}
    outside = port["ExternallyAccessible"]
    return {
        "dialled": sorted(dialled),
        "port": port["Port"],
        "node port": port["NodePort"],
        "ranges": _networks(port["SourceRanges"]) if vips - {own} else [],
        "affinity": port["AffinitySeconds"],
        "internal local": port["InternalLocal"],
        "external local": port["ExternalLocal"] and outside,
        "cluster": port["Cluster"] or [],
        "local": port["Local"] or [],
        "any": port["HasAny"],
    }


def _networks(texts: Iterable[str]) -> list[str]:
    return sorted({str(ip_network(text, strict=False)) for text in texts})


def answered(question: Question) -> dict[int, Json]:
    """kbpf's results for the same objects, by family, in the judge's form."""
    node = Node(question.node, zone=question.zone)
    slices: dict[object, list[EndpointSlice]] = {}
    for piece in _read(Kind.SLICE, question.slices):
        assert isinstance(piece, EndpointSlice)
        slices.setdefault(piece.service_name, []).append(piece)
    said: dict[int, Json] = {4: {}, 6: {}}
    for service in _read(Kind.SERVICE, question.services):
        assert isinstance(service, Service)
        own, families = slices.get(service.key, []), set()
        for state in compute_service_states(service, own, node):
            families.add(state.key.family)
            key = f"{service.key}:{state.key.port}".rstrip(":")
            said[state.key.family][f"{key}/{state.key.protocol.name}"] = _our_port(state)
        if (check := compute_health_check(service, own, question.node)) is not None:
            for family, count in ((4, check.v4), (6, check.v6)):
                if family in families:
                    said[family][f"health check of {service.key}"] = (check.port, count)
    return said


def _read(kind: Kind, objects: Iterable[Json]) -> list[Any]:
    items = [decode.convert_object(kind, one) for one in objects]
    assert not any(item.error for item in items), items
    return [item.object for item in items if item.object is not None]


def _our_port(state: ServiceState) -> Json:
    by_kind = {kind: [f.at for f in state.frontends if f.kind is kind] for kind in FrontendKind}
    node_ports = by_kind.pop(FrontendKind.NODE_PORT)
    return {
        "dialled": sorted((kind.value, str(_ip(at.address))) for kind, all_ in by_kind.items() for at in all_),
        "port": by_kind[FrontendKind.CLUSTER_IP][0].port,
        "node port": node_ports[0].port if node_ports else 0,
        "ranges": sorted(f"{_ip(r.address)}/{_bits(r)}" for r in state.source_ranges),
        "affinity": state.affinity_timeout,
        "internal local": state.internal_local,
        "external local": state.external_local,
        "cluster": sorted(str(backend) for backend in state.cluster),
        "local": sorted(str(backend) for backend in state.local),
        "any": state.any_endpoints,
    }


def _ip(packed: bytes) -> Any:
    found = ip_address(bytes(packed))
    return getattr(found, "ipv4_mapped", None) or found


def _bits(cidr: Cidr) -> int:
    return cidr.bits - 96 if family_of(cidr.address) == 4 else cidr.bits


def _distinct(outcomes: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for one in outcomes:
        if one not in found:
            found.append(one)
    return found


def differences(judges: Sequence[Judge], question: Question, tries: int = 64) -> list[str]:
    """Where kbpf's result is none of kube-proxy's in this many tries: a line for each Service port
    and judge. Several tries, since kube-proxy's result may depend on Go's map order.
    """
    for judge in judges:  # they compute while kbpf does
        judge.send(question)
    ours = answered(question)
    theirs = [judge.receive() for judge in judges]
    return [
        line
        for judge, said in zip(judges, theirs, strict=True)
        for line in _differences(judge, question, ours, said, tries)
    ]


def _differences(
    judge: Judge, question: Question, ours: dict[int, Json], theirs: dict[int, list[Json]], tries: int
) -> list[str]:
    suspects = {
        (family, key)
        for family, (outcome,) in theirs.items()
        for key in outcome.keys() | ours[family].keys()
        if outcome.get(key) != ours[family].get(key)
    }
    if not suspects:
        return []
    names = {re.split("[:/]", key.removeprefix("health check of "))[1] for _, key in suspects}
    again = question._replace(
        services=[one for one in question.services if one["metadata"]["name"] in names],
        slices=[one for one in question.slices if one["metadata"]["labels"]["kubernetes.io/service-name"] in names],
    )
    possible = judge.ask(again, tries)
    lines = []
    for family, key in sorted(suspects):
        mine, outcomes = ours[family].get(key), _distinct(one.get(key) for one in possible[family])
        if mine not in outcomes:
            lines.append(f"IPv{family} {key}: kbpf {mine}, {judge.program} {outcomes}")
    return lines
