# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshoot.md: each symptom is produced on purpose, and the commands that the page names
show its cause.
"""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import yaml

from kbpf.model.reasons import Reason
from tests.support.lab.dial import DROPPED as AT_ONCE
from tests.support.lab.dial import REFUSED, Dial
from tests.support.lab.dial import check as check_at_once
from tests.support.lab.field import DROPPED, NODES4, OUT4, Field, at, check
from tests.support.lab.lab import Agent, until
from tests.support.runtime import docs

PAGE = (docs.ROOT / "docs" / "troubleshoot.md").read_text()
LABEL = "service.kubernetes.io/service-proxy-name"


class Symptom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`words` are a text of the page. The Service has these endpoints and options; the client dials
    this kind of address (0: port 80) with this outcome. `shows` is then part of the output of
    `kbpf inspect COMMAND`, or, for `status`, the name of a counter that has grown.
    """

    words: str
    endpoints: str
    client: str
    kind: str
    outcome: str
    shows: str
    command: str = "service default/web-71"
    options: dict[str, Any] = {}
    port: int = 0


OUTCOMES = {"refused": REFUSED, "dropped": DROPPED, "dropped at once": AT_ONCE}
SYMPTOMS = msgspec.convert(
    yaml.safe_load(f"""
- words: "no endpoint that is ready: READY `0/3`, and a line `cluster set: empty`"
  endpoints: a1/unready
  client: a2
  kind: ClusterIP
  outcome: refused
  shows: "cluster set: empty"
- words: the Service has no such port, which a ClusterIP refuses too
  endpoints: a1
  client: a2
  kind: ClusterIP
  port: 81
  outcome: refused
  command: status
  shows: "refused: a ClusterIP, but no Service has this port; check the port that the client uses"
- words: "and no endpoint on the client's node: a line `local set: empty`"
  endpoints: b1
  options: {{internal_policy: Local}}
  client: a2
  kind: ClusterIP
  outcome: dropped at once
  shows: "local set: empty"
- words: "`externalTrafficPolicy: Local` on a node without endpoint"
  endpoints: b1
  options: {{external_policy: Local}}
  client: outside
  kind: NodePort
  outcome: dropped
  command: status
  shows: "dropped: policy Local, and no endpoint on this node; use policy Cluster, or a node that has one"
- words: the client is not in `loadBalancerSourceRanges`
  endpoints: a1
  options: {{source_ranges: [198.51.100.0/24]}}
  client: outside
  kind: VIP
  outcome: dropped
  command: status
  shows: "dropped: the client is not in the Service's source ranges; add it to them if it should be served"
- words: "`inspect connections`, the column BACKEND-SEES"
  endpoints: b1
  client: outside
  kind: NodePort
  outcome: b1
  command: connections --client {OUT4}
  shows: "{NODES4[0]}:"
"""),
    list[Symptom],
)


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    with Field("--forwarding", "stack", name="tr", pods=(2, 1), agents=1) as made:
        yield made


def counted(agent: Agent, words: str) -> int:
    """The counter that `kbpf inspect status` shows with this description."""
    (reason,) = (reason for reason in Reason if reason.words == words)
    counters = json.loads(agent.kbpf("inspect", "status", "-o", "json").stdout)["counters"]
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
        row = Dial(symptom.words, symptom.client, to, OUTCOMES.get(symptom.outcome, symptom.outcome), "tcp", NODES4[0])
        (check if symptom.client == "outside" else check_at_once)(field, row)
        if symptom.command == "status":  # a packet without an answer may be counted later
            until("it is counted", lambda: counted(field.agent, symptom.shows) > before)
        shown = field.agent.kbpf("inspect", *symptom.command.split()).stdout
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
    done = field.agent.kbpf("inspect", "service", "default/web-72")
    assert (done.returncode, done.stdout) == (1, "")
    assert "web-72" in done.stderr
    field.delete(*made)
    field.settle()
