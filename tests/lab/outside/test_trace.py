# SPDX-License-Identifier: Apache-2.0
"""`kbpf trace --confirm` and `--connect`: what is predicted is tried, as the client, and compared.

The rows of tests/rows are compared with their predictions where they run (lab/prediction.py).
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kbpf.cli import trace as trace_command
from kbpf.cli.trace import Caller
from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.kernel.system import netns
from kbpf.kernel.system.pods import PodProcess
from kbpf.views import trace
from kbpf.views.trace_page import Confirmation, Origin, Trace
from tests.rows.outside import objects
from tests.support.build import artifacts
from tests.support.cluster.kube_objects import node, slice_port
from tests.support.cluster.static_api import StaticApi
from tests.support.lab.dial import Dial
from tests.support.lab.field import OUT4, Field
from tests.support.lab.lab import inside, until
from tests.support.lab.paper import target
from tests.support.lab.prediction import client_of, own_cgroup
from tests.support.table import table


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    with Field("--verify-period", "0s", name="tr", agents=1) as made:  # whose probes are counted
        made.create(*objects(made))
        deaf = made.web(40, "")
        made.create(deaf[0], made.slice("web-40", "a1", slice_port(8099)))
        made.settle()
        yield made


class Row(NamedTuple):
    """A client and what it dials. `by`: which part of kbpf handles it. `outcome`: the verdict."""

    client: str
    to: str
    outcome: str
    by: str
    protocol: str = "tcp"


ROWS = table(
    Row,
    """
outside | [fd00:198:18::1]:30013 | translate | packet
outside | 192.0.2.23:80          | translate | packet | udp
outside | 198.18.0.1:30015       | drop      | packet
outside | 203.0.113.26:80        | refuse    | packet | udp
outside | 198.18.0.1:30017       | translate | packet
outside | 192.0.2.33:80          | drop      | packet
outside | 10.96.0.11:81          | refuse    | packet
outside | 198.18.0.1:22          | pass      | packet
a2!     | 10.96.0.13:80          | translate | packet
a1!     | 10.96.0.11:80          | translate | packet
a2      | [fd00:10:96::13]:80    | translate | socket
a2      | 10.96.0.23:80          | translate | socket | udp
a2      | 10.96.0.16:80          | refuse    | socket
a2      | 198.18.0.1:30015       | translate | socket
a2      | 192.0.2.35:80          | translate | packet
a2      | 10.244.1.2:8080        | pass      | socket
host-1  | 127.0.0.1:30013        | translate | socket
a-net   | 10.96.0.12:80          | translate | socket
a2!     | 10.96.0.40:80          | translate | packet
""",
)
"""Of the Services of tests/rows/outside.py."""


class Tracer:
    """The command's parts, in the network namespace of node-1."""

    def __init__(self, field: Field, row: Row) -> None:
        self._node = field.lab.nodes[0]
        place = field[row.client]
        client = client_of(field, Dial("", row.client, row.to, "", row.protocol))
        process: PodProcess | None = PodProcess(place._process.pid, place.cgroup or own_cgroup())
        if client.origin is Origin.OUTSIDE:
            process = None
        self.caller = Caller(client, process)
        self.to = target(Dial("", "", row.to, "", row.protocol))
        self.inspection = snapshot.read(field.agent.pin_dir, trace.NEEDS)

    def _inside(self, action: Any, *arguments: Any, **options: Any) -> Any:
        where = Path("/run/netns") / self._node.netns
        return netns.run_in(where, lambda: action(*arguments, **options))

    def trace(self, pin_dir: Path) -> Trace:
        facts = self._inside(trace_command.read_facts, self.caller, pin_dir)
        return self._inside(trace.build_trace, self.inspection, self.caller.client, self.to, facts)

    def confirm(self, seen: Trace, pin_dir: Path) -> Confirmation:
        return self._inside(
            trace_command.confirm_trace, self.inspection, self.caller, self.to, seen, pin_dir, artifacts.compiled()
        )

    def connect(self, seen: Trace) -> Confirmation:
        return self._inside(trace_command.try_socket, self.inspection, self.caller, self.to, seen, sends=True)


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_a_prediction_is_confirmed(field: Field, row: Row):
    pin_dir = field.agent.pin_dir
    tracer = Tracer(field, row)
    seen = tracer.trace(pin_dir)
    assert (seen.seen_by, seen.verdict) == (row.by, row.outcome), seen
    before, flows = field.agent.reasons(), field.agent.entries("flows").keys()
    confirmation = tracer.confirm(seen, pin_dir)
    assert confirmation.matches is True, (seen, confirmation)
    if row.by == "packet":
        assert field.agent.reasons() == before
        assert field.agent.entries("flows").keys() <= flows  # the agent deletes ended ones
    if row.client != "outside" and row.outcome == "translate" and "40" not in row.to:
        confirmation = tracer.connect(seen)
        assert confirmation.matches is True, (seen, confirmation)


def run(field: Field, *arguments: str) -> tuple[int, Any, str]:
    """`kbpf trace ... -o json` on node-1, as one of its own processes."""
    node = field.lab.nodes[0]
    command = (
        *(sys.executable, "-m", "kbpf", "trace", *arguments, "--pin-dir", str(field.agent.pin_dir)),
        *("-o", "json", "--cache-dir", str(artifacts.compiled())),
    )
    place = inside(node.netns, node.cgroup / "hostpod0", *command)
    done = subprocess.run(place, capture_output=True, text=True, check=False)
    document = json.loads(done.stdout or "{}")
    return done.returncode, document.get("items"), done.stderr


def matches(traces: Any) -> list[bool | None]:
    return [one["matches"] for trace in traces for one in trace["confirmations"]]


def test_the_command_tries_it(field: Field):
    code, traces, err = run(field, "host", "default/web-13", "--confirm", "--connect")
    assert (code, matches(traces)) == (0, [True, True] * 2), (traces, err)
    hops = {c["backend"]: c["next_hop"] for c in traces[0]["candidates"]}
    assert set(hops) == {"10.244.1.2:8080", "10.244.2.2:8080"}
    assert hops["10.244.2.2:8080"] == "eth0 via 198.18.0.2"
    code, traces, err = run(field, OUT4, "198.18.0.1:30013", "--confirm")  # it needs a route
    assert (code, matches(traces)) == (0, [True]), (traces, err)


def test_an_outcome_that_differs_is_an_error(field: Field):
    """The backend does not listen: kbpf does what is predicted, and the connection fails."""
    code, traces, err = run(field, "host", "10.96.0.40:80", "--confirm", "--connect")
    assert (code, matches(traces)) == (1, [True, False]), (traces, err)
    assert "ECONNREFUSED" in traces[0]["confirmations"][1]["outcome"]


def test_what_cannot_be_tried_is_an_error(field: Field):
    code, traces, _ = run(field, "outside", "198.18.0.1:30013", "--connect")
    assert (code, matches(traces)) == (1, [None])


def test_a_change_since_the_prediction_is_noticed(field: Field):
    """What is tried is what is programmed now."""
    rows = (Row("outside", "198.18.0.1:30013", "", "packet"), Row("a2", "10.96.0.13:80", "", "socket"))
    tracers = [Tracer(field, row) for row in rows]
    seen = [tracer.trace(field.agent.pin_dir) for tracer in tracers]
    own = field.all_ways(13, "a1 b1")
    field.change(*field.all_ways(13, ""))
    try:
        for tracer, one in zip(tracers, seen, strict=True):
            assert tracer.confirm(one, field.agent.pin_dir).matches is False
    finally:
        field.change(*own)


# ---- what only the API server knows --------------------------------------------------------------

POD = {"kind": "Pod", "metadata": {"name": "cart", "namespace": "shop"}, "spec": {"nodeName": "node-2"}}


@pytest.fixture
def kubeconfig(field: Field, tmp_path) -> Iterator[str]:
    own = [
        *field.web(41, "a1 a2/unready b1/draining b2@zone-2", external_policy="Local"),
        *(node(n.name, n.ip, n.ip6, zone=f"zone-{n.number}") for n in field.lab.nodes),
        POD,
    ]
    local = field.web(42, "a1 b1", internal_policy="Local")
    field.change(*own[:2], *local)
    with StaticApi(own, field.lab.nodes[0].ip, field.lab.nodes[0].netns) as api:
        yield str(api.kubeconfig(tmp_path / "kubeconfig"))
    field.delete(*own[:2], *local)


def test_the_endpoints_have_reasons(field: Field, kubeconfig: str):
    code, traces, err = run(field, "host", "default/web-41", "--kubeconfig", kubeconfig)
    assert (code, err) == (0, ""), err
    (seen,) = traces
    assert [candidate["backend"] for candidate in seen["candidates"]] == ["10.244.1.2:8080", "10.244.2.3:8080"]
    assert {end["address"]: (end["cluster"], end["reason"]) for end in seen["endpoints"]} == {
        "10.244.1.2": (True, "Ready"),
        "10.244.1.3": (False, "NotReady"),
        "10.244.2.2": (False, "Draining"),
        "10.244.2.3": (True, "Ready"),
    }


def test_without_an_api_server_they_are_the_pinned_ones(field: Field, kubeconfig: str):
    """The maps have the conditions, and not what hints, policies and weights decided."""
    seen, err = expect_endpoints(
        field,
        "10.96.0.41:80",
        ("10.244.1.2", True, "used: ready"),
        ("10.244.1.3", False, "not used: not ready, serving"),
        ("10.244.2.2", False, "not used: terminating, serving"),
        ("10.244.2.3", True, "used: ready"),
    )
    assert {c["node"] for c in seen["candidates"]} == {"node-1", "node-2"}
    assert err == ""
    seen, err = expect_endpoints(
        field,
        "10.96.0.42:80",
        ("10.244.1.2", False, "used by policy Local: ready"),
        ("10.244.2.2", False, trace.UNKNOWN),
    )
    assert "--kubeconfig" in err


def expect_endpoints(field: Field, to: str, *expected: tuple[str, bool, str]) -> tuple[Any, str]:
    """Waits until a trace shows these endpoints: the agent writes their conditions after it has
    programmed everything. Returns the trace and the command's errors.
    """
    shown: list[Any] = []

    def is_shown() -> bool:
        _, (seen,), err = run(field, "host", to)
        shown[:] = seen, err
        found = [(end["address"], end["cluster"], end["why"]) for end in seen["endpoints"]]
        return found == [*expected]

    until(f"{expected} are shown", is_shown, state=lambda: shown)
    return shown[0], shown[1]


def test_an_api_server_that_does_not_answer_costs_only_the_endpoints(field: Field, kubeconfig: str, tmp_path):
    path = tmp_path / "other"
    path.write_text(re.sub(r"(198[.]18[.]0[.]1):[0-9]+", r"\1:9", Path(kubeconfig).read_text()))
    code, (seen,), err = run(field, "host", "10.96.0.13:80", "--kubeconfig", str(path))
    assert (code, len(seen["endpoints"]), len(seen["candidates"])) == (0, 2, 2)
    assert "the API server does not say why endpoints are used: " in err


def test_a_pod_of_another_node_is_named_with_its_node(field: Field, kubeconfig: str):
    code, _, err = run(field, "shop/cart", "10.96.0.13:80", "--kubeconfig", kubeconfig)
    assert code == 1
    assert "it is on node node-2: run this there" in err
