# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshoot.md: each symptom is produced on purpose, and the commands that the page names
show its cause.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from kbpf.model.reasons import Reason
from tests.support.lab.dial import DROPPED as AT_ONCE
from tests.support.lab.dial import REFUSED, Dial
from tests.support.lab.dial import check as check_at_once
from tests.support.lab.field import DROPPED, NODES4, OUT4, Field, at, check
from tests.support.lab.lab import Agent, inside, until
from tests.support.runtime import docs

PAGE = (docs.ROOT / "docs" / "troubleshoot.md").read_text()
LABEL = "service.kubernetes.io/service-proxy-name"


class Symptom(NamedTuple):
    """`words` are a text of the page. The Service has these endpoints and options; the client dials
    this kind of address (0: port 80) with this outcome. `shows` is then part of the output of
    `kbpf inspect COMMAND`, or, for `status`, the name of a counter that has grown.
    """

    words: str
    endpoints: str
    options: dict[str, Any]
    client: str
    kind: str
    outcome: str
    command: str
    shows: str
    port: int = 0


SERVICE = "service default/web-71"
SYMPTOMS = [
    Symptom(
        "no endpoint that is ready: READY `0/3`, and a line `cluster set: empty`",
        "a1/unready",
        {},
        "a2",
        "ClusterIP",
        REFUSED,
        SERVICE,
        "cluster set: empty",
    ),
    Symptom(
        "the Service has no such port, which a ClusterIP refuses too",
        "a1",
        {},
        "a2",
        "ClusterIP",
        REFUSED,
        "status",
        "refused: a ClusterIP, but no Service has this port; check the port that the client uses",
        81,
    ),
    Symptom(
        "and no endpoint on the client's node: a line `local set: empty`",
        "b1",
        {"internal_policy": "Local"},
        "a2",
        "ClusterIP",
        AT_ONCE,
        SERVICE,
        "local set: empty",
    ),
    Symptom(
        "`externalTrafficPolicy: Local` on a node without endpoint",
        "b1",
        {"external_policy": "Local"},
        "outside",
        "NodePort",
        DROPPED,
        "status",
        "dropped: policy Local, and no endpoint on this node; use policy Cluster, or a node that has one",
    ),
    Symptom(
        "the client is not in `loadBalancerSourceRanges`",
        "a1",
        {"source_ranges": ["198.51.100.0/24"]},
        "outside",
        "VIP",
        DROPPED,
        "status",
        "dropped: the client is not in the Service's source ranges; add it to them if it should be served",
    ),
    Symptom(
        "`inspect connections`, the column BACKEND-SEES",
        "b1",
        {},
        "outside",
        "NodePort",
        "b1",
        f"connections --client {OUT4}",
        f"{NODES4[0]}:",
    ),
]


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    with Field("--forwarding", "stack", name="tr", pods=(2, 1)) as made:
        yield made


def inspect(agent: Agent, command: str) -> "subprocess.CompletedProcess[str]":
    """Runs `kbpf inspect` on the agent's node."""
    words = (sys.executable, "-m", "kbpf", "inspect", *command.split(), "--pin-dir", str(agent.pin_dir))
    where = inside(agent.node.netns, None, *words)
    return subprocess.run(where, capture_output=True, text=True, check=False)


def counted(agent: Agent, words: str) -> int:
    """The counter that `kbpf inspect status` shows with this description."""
    (reason,) = (reason for reason in Reason if reason.words == words)
    counters = json.loads(inspect(agent, "status -o json").stdout)["counters"]
    return int(counters[reason.name.lower()])


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda one: one.words)
def test_a_symptom_and_the_command_that_shows_its_cause(field: Field, symptom: Symptom):
    assert symptom.words in PAGE.replace("\n", " ")
    made = field.all_ways(71, symptom.endpoints, **symptom.options)
    field.create(*made)
    field.settle()
    try:
        to = at(symptom.kind, 71)
        if symptom.port:
            to = f"{to.rpartition(':')[0]}:{symptom.port}"
        before = counted(field.agent, symptom.shows) if symptom.command == "status" else 0
        row = Dial(symptom.words, symptom.client, to, symptom.outcome, "tcp", NODES4[0])
        (check if symptom.client == "outside" else check_at_once)(field, row)
        if symptom.command == "status":  # a packet without an answer may be counted later
            until("it is counted", lambda: counted(field.agent, symptom.shows) > before)
        shown = inspect(field.agent, symptom.command).stdout
        assert symptom.shows in shown
    finally:
        field.delete(*made)
        field.settle()


def test_a_service_with_another_proxys_label_is_not_found(field: Field):
    """`inspect service` finds no frontend of it."""
    assert f"the Service has the label `{LABEL}`" in PAGE.replace("\n", " ")
    made = field.all_ways(72, "a1", labels={LABEL: "another"})
    field.create(*made)
    field.settle()
    done = inspect(field.agent, "service default/web-72")
    assert (done.returncode, done.stdout) == (1, "")
    assert "web-72" in done.stderr
    field.delete(*made)
    field.settle()
