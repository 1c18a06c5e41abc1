# SPDX-License-Identifier: Apache-2.0
"""An operator's mistakes in a folder of objects, one of each form: the lines of the agent's log and of its status.

Another Service in the folder must stay served in every row. Other mistakes are rows of test_documents.py (the file),
decode/ (fields) and tests/values/policy/test_admission.py (addresses).
"""

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.agent.agent import Agent
from kbpf.agent.host_thread import Listeners
from kbpf.agent.problem_book import AT_THIS_NODE, DOCS_HINT
from kbpf.dataplane.base import Report
from kbpf.errors import escape_unprintable
from kbpf.model.address import ANY4, parse_addr
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState, FrontendAddress, ServicePortKey
from kbpf.model.objects import Protocol
from kbpf.source.folder.folder import FolderSource
from tests.support.faults.fake_plane import FakePlane
from tests.support.table import each_row

FINE = """\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop, creationTimestamp: 2024-01-01T00:00:00Z}
spec:
  type: NodePort
  clusterIP: 10.96.0.10
  ports: [{name: http, port: 80, nodePort: 30080}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [10.244.1.1]}]
ports: [{name: http, port: 8080}]
"""
OWN = "192.0.2.10"
SSH = FrontendAddress(ANY4, 22, Protocol.TCP)


class Plane(FakePlane):
    """A data plane that accepts every state and records the frontends of the last one."""

    name = "bpf"
    served: frozenset[str] = frozenset()

    def apply(self, state: DesiredState, _: Collection[ServicePortKey] | None, authoritative: bool = True) -> Report:
        self.served = frozenset(
            f"{key.namespace}/{key.name} {frontend.at}"
            for key, service in state.services.items()
            for frontend in service.frontends
        )
        return Report()


class Mistake(NamedTuple):
    """A folder with FINE as all.yaml and `text` as zz.yaml.

    `lines` are the expected problem lines of the status. The log has each of them in the form
    `log`. `served` are the expected frontends other than those of FINE.
    """

    name: str
    text: str
    log: str
    lines: tuple[str, ...]
    served: tuple[str, ...] = ()


SOURCE = "problem in the folder of objects error={!r}"
LEFT_OUT = "left out: {}"
ODD = "unusual: {}"
REFUSED = "Service bad/x: {}; " + DOCS_HINT
IP, X_IP = "clusterIP: 10.96.0.11", "10.96.0.11"
PORT = "ports: [{port: 80}]"
X = f"bad/x {X_IP}:80/TCP"
X_SAYS = "Service bad/x: "


def service(spec: str, meta: str = "name: x, namespace: bad") -> str:
    return f"apiVersion: v1\nkind: Service\nmetadata: {{{meta}}}\nspec: {{{spec}}}\n"


def source(name: str, text: str, line: str, *served: str) -> Mistake:
    """A row with a problem of the file, reported by the folder source."""
    return Mistake(name, text, SOURCE, (line,), served)


MISTAKES = [
    source(
        "malformed YAML",
        "kind: Service\nmetadata: {name: x\nspec: [\n",
        "not YAML: did not find expected ',' or '}' (zz.yaml:3)",
    ),
    source(
        "a field that is misspelt",
        service(f"{IP}, ports: [{{port: 80, targetport: 8080}}]"),
        f"{X_SAYS}spec.ports[0].targetport is not a field of a Service (zz.yaml:4); is targetPort meant?",
        X,
    ),
    Mistake(
        "leading zeros",
        service(f"clusterIP: 010.096.000.011, {PORT}"),
        ODD,
        (f"{X_SAYS}spec.clusterIP: '010.096.000.011' has leading zeros; it is read as {X_IP}",),
        (X,),
    ),
    Mistake(
        "an ExternalIP where a process listens",
        service(f"{IP}, ports: [{{port: 22}}], externalIPs: [{OWN}]"),
        REFUSED,
        (f"bad/x TCP IPv4: {OWN}:22/TCP is not served: a process on this node listens on it",),
        (f"bad/x {X_IP}:22/TCP",),
    ),
    Mistake(
        "special addresses",
        service(
            "clusterIPs: [10.96.0.11, 'fd00::11'], ports: [{port: 80}], "
            "externalIPs: [127.0.0.1, 0.0.0.0, 224.0.0.1, '::1']"
        ),
        LEFT_OUT,
        (
            f"{X_SAYS}spec.externalIPs[0]: 127.0.0.1 is a loopback address",
            f"{X_SAYS}spec.externalIPs[1]: 0.0.0.0 is the unspecified address",
            f"{X_SAYS}spec.externalIPs[2]: 224.0.0.1 is not a unicast address",
            f"{X_SAYS}spec.externalIPs[3]: ::1 is a loopback address",
        ),
        (X, "bad/x [fd00::11]:80/TCP"),
    ),
    Mistake(
        "escape codes",
        service(f"{IP}, {PORT}", r'name: "we\e[31mird\nname", namespace: bad'),
        LEFT_OUT,
        (
            r"Service bad/we\x1b[31mird\nname: metadata.name: 'we\x1b[31mird\nname' is "
            "not a DNS label (a-z, 0-9 and - inside, at most 63 characters) (zz.yaml:3)",
        ),
    ),
]


class Node:
    """An agent with a fake data plane, one listening socket (sshd) and one node address."""

    def __init__(self, folder: Path, text: str) -> None:
        (folder / "all.yaml").write_text(FINE)
        (folder / "zz.yaml").write_text(text)
        self.plane = Plane()
        config = Config("op-node", source=folder)
        self.agent = Agent(config, self.plane, lambda put: [FolderSource(folder, put, "op-node")])
        self.agent.reconciler.listeners = Listeners(lambda: frozenset({SSH}))
        self.agent.reconciler.node_addresses = (parse_addr(OWN),)
        for _ in range(2):
            self.agent._sources[0].poll()
            self.agent.step(self.agent._inbox.get_batch(0.0))


@pytest.fixture
def told(caplog) -> Callable[[], list[str]]:
    """Returns the log's messages without those of every start."""
    caplog.set_level(logging.INFO, "kbpf")
    return lambda: [line for line in caplog.messages if not line.startswith("source synced")]


def served(*more: str) -> frozenset[str]:
    return frozenset(("shop/web 0.0.0.0:30080/TCP", "shop/web 10.96.0.10:80/TCP", *more))


@each_row(MISTAKES)
def test_mistake_is_one_log_line_and_one_problem(row: Mistake, tmp_path, told: Callable[[], list[str]]):
    node = Node(tmp_path, row.text)
    assert node.agent.status().problems == row.lines
    short = [escape_unprintable(line.removeprefix("bad/x TCP IPv4: ")) for line in row.lines]
    assert [escape_unprintable(line) for line in told()] == [row.log.format(line) for line in short]
    assert node.plane.served == served(*row.served)


def test_external_ip_of_this_node_is_logged_and_served(tmp_path, told: Callable[[], list[str]]):
    node = Node(tmp_path, service(f"{IP}, ports: [{{port: 10256}}], externalIPs: [{OWN}]"))
    assert told() == [f"{AT_THIS_NODE}: {OWN}:10256/TCP of Service bad/x"]
    assert node.agent.status().problems == ()
    assert node.plane.served == served(f"bad/x {X_IP}:10256/TCP", f"bad/x {OWN}:10256/TCP")
