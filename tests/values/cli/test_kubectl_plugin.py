# SPDX-License-Identifier: Apache-2.0
"""`kubectl kbpf` with a fake kubectl, which answers from the rows of a test.

tests/lab/cluster/test_kubectl_plugin.py has a real kubectl and a real API server,
tests/conformance/plugin.py real kubelets too.
"""

import ast
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from kbpf import __version__
from kbpf.views.failures import FailureRow
from kbpf.views.latency import LatencyRow
from kbpf.views.page import API_VERSION
from kbpf.views.status import StatusView
from kbpf.views.top import TopRow
from tests.support.lab.lab import until
from tests.support.runtime import docs
from tests.support.runtime.command import pipe_without_reader
from tests.support.table import each_line, pairs

PLUGIN = docs.ROOT / "kubectl" / "kubectl-kbpf"
FAKE_KUBECTL = """\
#!{python} -IS
import json, os, re, sys, time
words = " ".join(sys.argv[1:])
with open({calls!r}, "a") as calls:
    calls.write(words + "\\n")
for pattern, output, errors, code in json.load(open({answers!r})):
    if re.search(pattern, words):
        if output == "HANGS":
            os.close(1), os.close(2) if errors else None
            time.sleep(600)
        if output == "FLOODS":
            while True:
                os.write(1, b"x" * 65536)
        sys.stdout.buffer.write(output.encode("utf-8", "surrogateescape"))
        sys.stdout.flush()
        sys.stderr.write(errors)
        sys.exit(code)
sys.exit(words + ": no row of this test")
"""
Row = tuple[str, str, str, int]


class Done(NamedTuple):
    code: int
    out: str
    err: str
    calls: list[str]


class Operator:
    """A shell with the plugin and the fake kubectl."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._calls, self._answers = folder / "calls", folder / "answers"
        kubectl = folder / "kubectl"
        kubectl.write_text(
            FAKE_KUBECTL.format(python=sys.executable, calls=str(self._calls), answers=str(self._answers))
        )
        kubectl.chmod(0o755)

    def __call__(self, line: str, *rows: Row) -> Done:
        """Runs the plugin, with these answers before those of a cluster."""
        self._answers.write_text(json.dumps([*rows, *CLUSTER]))
        self._calls.write_text("")
        done = subprocess.run(
            [sys.executable, str(PLUGIN), *line.split()],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            timeout=120,
            env={"PATH": str(self.folder), "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"},
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Done(done.returncode, done.stdout, done.stderr, self._calls.read_text().splitlines())


@pytest.fixture
def operator(tmp_path) -> Operator:
    return Operator(tmp_path)


# ---- what the fake answers -----------------------------------------------------------------------


def answer(pattern: str, document: object = "", errors: str = "", code: int = 0) -> Row:
    return pattern, document if isinstance(document, str) else json.dumps(document), errors, code


def listed(*objects: object) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": list(objects)}


def node(name: str, zone: str = "") -> dict[str, Any]:
    labels = {"topology.kubernetes.io/zone": zone} if zone else {}
    return {"metadata": {"name": name, "labels": labels}}


def pod(
    name: str,
    node: str,
    *,
    image: str = "registry/kbpf:0.1.0",
    command: str = "kbpf",
    ready: bool = True,
    phase: str = "Running",
    waiting: str = "",
    created: str = "2026-01-01",
) -> dict[str, Any]:
    state = {"waiting": {"reason": waiting}} if waiting else {"running": {}}
    return {
        "metadata": {"name": name, "namespace": "kube-system", "creationTimestamp": created},
        "spec": {"nodeName": node, "containers": [{"name": "kube-proxy", "image": image, "command": [command, "run"]}]},
        "status": {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"name": "kube-proxy", "state": state}] if phase else [],
        },
    }


def document(kind: str, *items: object, **fields: object) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, **fields, "items": list(items)}


HEALTHY = """{"ok": true, "running": true, "synced": true, "mode": "bpf", "version": "0.1.0", "services": 12,
"problem_count": 0, "kube_proxy": "", "error": "", "refused": 0, "hooks_missing": []}"""
"""The fields that the plugin reads, and no others."""
FAILURE = """{"first_seconds": 900.0, "count": 3, "kind": "pod", "address": "", "service": "shop/web:80",
"frontend": "10.96.0.9:80/TCP", "backend": "10.244.1.5:8080/TCP", "backend_pod": "shop/web-7", "backend_node": "node9",
"reason": "backend_refused", "words": "refused", "client_saw": "ECONNREFUSED"}"""
TOP_ROW = """{"pod": "", "no_backend": 0.0, "failed": null, "bytes_in": null, "bytes_out": null, "latency": null}"""


def status(**fields: object) -> dict[str, Any]:
    made = {**json.loads(HEALTHY), **fields}
    assert {*made} <= {*StatusView.__struct_fields__}
    return {"apiVersion": API_VERSION, "kind": "Status", **made}


def failure(client: str, seconds: float, **fields: object) -> dict[str, Any]:
    made = {**json.loads(FAILURE), "last_seconds": seconds, "client": client, **fields}
    assert {*made} == {*FailureRow.__struct_fields__}
    return made


def top_row(name: str, new: float | None, open_: int | None, **fields: object) -> dict[str, Any]:
    made = {**json.loads(TOP_ROW), "service": name, "name": name, "new": new, "open": open_, **fields}
    assert {*made} == {*TopRow.__struct_fields__}
    return made


PODS = listed(pod("agent-a", "node1"), pod("agent-b", "node2"), pod("agent-c", "node10"))
CLUSTER = (
    answer("get pods ", PODS),
    answer("get nodes ", listed(*map(node, ("node1", "node10", "node2")))),
    answer("get pod .*", pod("client", "node2")),
    answer("inspect status", status()),
    answer("inspect failures", document("FailureList")),
)
"""Three nodes that are well."""

FORBIDDEN = (
    'Error from server (Forbidden): pods "agent-a" is forbidden: User "dev" cannot create resource '
    '"pods/exec" in API group "" in the namespace "kube-system"\n'
)
NO_EXECUTABLE = (
    "error: Internal error occurred: error executing command in container: failed to exec in "
    "container: failed to start exec: OCI runtime exec failed: exec failed: unable to start "
    'container process: exec: "kbpf": executable file not found in $PATH\n'
)
NO_COMMAND = (
    "Usage: kbpf [OPTIONS] COMMAND [ARGS]...\nTry 'kbpf -h' for help.\n\n"
    "Error: No such command 'top'.\ncommand terminated with exit code 2\n"
)
MAY_NOT = "user dev may not create pods/exec in kube-system: ask an administrator of the cluster for this right"


# ---- status --------------------------------------------------------------------------------------


def on_b(document: object = "", errors: str = "", code: int = 0) -> Row:
    """What `kbpf inspect status` answers on node2."""
    return answer("agent-b.*inspect status", document, errors, code)


def pods(**of_b: Any) -> Row:
    return answer("get pods", listed(pod("agent-b", "node2", **of_b)))


NO_STATE = "no state in /sys/fs/bpf/kbpf: run the agent"
DOWN = "the agent does not report; traffic continues as programmed"
NO_POD = "no Pod with k8s-app in (kbpf, kube-proxy) in kube-system"
OTHER_PROGRAM = "its container has no kbpf: another program serves this node, perhaps kube-proxy"
OTHER_VERSION = "its answer is kbpf.io/v2, not kbpf.io/v1alpha1: use its version of this"
SEE = "see `kubectl kbpf exec node2 -- inspect status`"
OF_STATUS = pairs(f"""\
{{}} → ok: -
{{ok: false, error: the kernel refuses}} → not ok: the kernel refuses
{{ok: false, hooks_missing: [connect4]}} → not ok: hooks are missing: connect4
{{ok: false, refused: 3}} → not ok: 3 Service ports are not programmed
{{ok: false, synced: false}} → not ok: not synced: a watch has not answered yet, or a device has no programs yet
{{ok: false}} → not ok: {SEE}
""")
OF_PODS = pairs("""\
{ready: false} → not ok: its Pod is not ready
{waiting: ImagePullBackOff} → unreachable: its container does not run: ImagePullBackOff
{phase: Pending, waiting: x} → unreachable: its container does not run: x
""")
"""Fields of the status of node2, and of its Pod → what the row of node2 says."""
STATES = [
    *((on_b(status(**yaml.safe_load(fields))), *says.split(": ", 1)) for fields, says in OF_STATUS),
    *((pods(**yaml.safe_load(fields)), *says.split(": ", 1)) for fields, says in OF_PODS),
    (on_b(status(ok=False, running=False), "", 1), "down", DOWN),
    (answer("get pods", listed(pod("agent-a", "node1"))), "none", NO_POD),
    (on_b("", FORBIDDEN, 1), "unreachable", MAY_NOT),
    (on_b("", NO_EXECUTABLE, 126), "unreachable", OTHER_PROGRAM),
    (on_b("", f"kbpf: {NO_STATE}\ncommand terminated with exit code 1\n", 1), "unreachable", NO_STATE),
    (on_b("", "", 1), "unreachable", "kubectl ended with exit code 1 and no message"),
    (on_b("nonsense"), "unreachable", "its answer is not JSON"),
    (on_b("[" * 100_000), "unreachable", "its answer is not JSON"),
    (on_b({**status(), "apiVersion": "kbpf.io/v2"}), "unreachable", OTHER_VERSION),
    (on_b("HANGS"), "unreachable", "no answer within 1 s"),
    (on_b("HANGS", "closed"), "unreachable", "no answer within 1 s"),
    (on_b("FLOODS"), "unreachable", "the answer is larger than 16MiB"),
]
"""An answer of the cluster, and what the row of node2 says."""


@pytest.mark.parametrize(("row", "word", "why"), STATES, ids=range(len(STATES)))
def test_state_of_a_node(operator: Operator, row: Row, word, why):
    timeout = 1 if "within 1 s" in why else 60
    done = operator(f"status -o json --timeout {timeout}", row)
    made = {row["node"]: (row["agent"], row["why"]) for row in json.loads(done.out)["items"]}
    assert made["node2"] == (word, why.removeprefix("-"))
    assert done.code == any(agent != "ok" for agent, _ in made.values())
    assert list(made) == ["node1", "node2", "node10"]


def cells(table: str) -> list[str]:
    """The rows of a table, with one separator between the cells."""
    return [re.sub(r" {3,}", " | ", line) for line in table.splitlines()]


TABLE = f"""\
NODE | POD | AGENT | MODE | VERSION | SERVICES | PROBLEMS | FAILURES-1H | KUBE-PROXY | WHY
node1 | agent-a | ok | bpf | 0.1.0 | 12 | 2 | 1 | rules of it\\x1b[2J exist | -
node2 | agent-b | not ok | - | - | - | - | - | - | {SEE}
node10 | agent-c | ok | bpf | 0.1.0 | 12 | 0 | - | - | -""".splitlines()


def test_status_table(operator: Operator):
    """Values of other types and sizes are as if they were not measured; control characters are
    escaped; a node of mode ipvs has no failures.
    """
    rows = (
        answer("agent-a.*failures", document("FailureList", failure("shop/client", 3))),
        answer("agent-a.*status", status(kube_proxy="rules of it\x1b[2J exist", problem_count=2)),
        answer("agent-b.*status", status(ok=False, services=10**400, problem_count=True, mode=None, version=["x"])),
        answer("agent-[bc].*failures", "", "kbpf: mode ipvs has no failures\n", 1),
    )
    done = operator("status", *rows)
    assert cells(done.out) == TABLE
    assert (done.code, done.err) == (1, "")


PLACES = [
    (
        (
            pod("kp", "node2", image="registry.k8s.io/kube-proxy:v1.37.1", command="kube-proxy"),
            pod("agent-b", "node2", ready=False),
        ),
        "agent-b",
    ),
    ((pod("agent-old", "node2", created="2026-01-01"), pod("agent-b", "node2", created="2026-01-02")), "agent-b"),
    ((pod("agent-b", "node2"), pod("agent-new", "node2", ready=False, created="2026-09-09")), "agent-b"),
]


@pytest.mark.parametrize(("agents", "name"), PLACES)
def test_the_pod_of_a_node_with_several(operator: Operator, agents: Any, name):
    done = operator("status --node node2 -o json", answer("get pods", listed(*agents)))
    assert [row["pod"] for row in json.loads(done.out)["items"]] == [name]


def test_without_the_right_to_list_nodes_those_with_pods_are_shown(operator: Operator):
    error = FORBIDDEN.replace("create", "list").replace("pods/exec", "nodes")
    error = error.replace('in the namespace "kube-system"', "at the cluster scope")
    done = operator("status", answer("get nodes", "", error, 1))
    assert done.code == 0
    assert done.out.count("ok") == 3
    assert done.err == (
        "kubectl kbpf: nodes without an agent are not known: user dev may not list nodes: ask an "
        "administrator of the cluster for this right\n"
    )


FLAGS = "--context=c --kubeconfig=k --as=u"


@pytest.mark.parametrize("words", [f"{FLAGS} status", f"status {FLAGS}"])
def test_flags_of_kubectl_are_passed_on(operator: Operator, words):
    done = operator(f"{words} -n agents -l app=x")
    start = "--kubeconfig=k --context=c --as=u"
    assert done.calls[0] == f"{start} get pods -n agents -l app=x -o json"
    assert all(call.startswith(start) for call in done.calls)
    assert f"{start} -n kube-system exec pod/agent-a -c kube-proxy -- kbpf inspect status -o json" in done.calls


# ---- failures and top ----------------------------------------------------------------------------

FAILED = (
    answer("agent-a.*failures", document("FailureList", failure("shop/old", 4000), failure("shop/new", 2))),
    answer("agent-b.*failures", "", FORBIDDEN, 1),
    answer("agent-c.*failures", document("FailureList", "x", failure("shop/a\nb", 65, count="1"))),
)


def test_failures_of_all_nodes_are_in_one_list(operator: Operator):
    done = operator("failures --since 2h --service shop/web", *FAILED)
    ends = "shop/web:80 | 10.96.0.9:80/TCP | 10.244.1.5:8080/TCP | shop/web-7 | node9 | backend refused | ECONNREFUSED"
    assert cells(done.out)[1:] == [
        f"node1 | 2s ago | 3 | shop/new | {ends}",
        f"node10 | 1m05s ago | - | shop/a\\nb | {ends}",
        f"node1 | 1h06m ago | 3 | shop/old | {ends}",
    ]
    assert (done.code, done.err) == (1, f"kubectl kbpf: node2: {MAY_NOT}\n")
    assert any("failures --service=shop/web --since=2h -o json" in call for call in done.calls)


def test_no_failures(operator: Operator):
    done = operator("failures")
    assert (done.code, done.out, done.err) == (0, "", "No resources found.\n")


def test_failures_as_json(operator: Operator):
    done = operator("failures -o json --limit 1", *FAILED)
    assert json.loads(done.out) == {
        "apiVersion": API_VERSION,
        "kind": "NodeFailureList",
        "errors": [{"node": "node2", "error": MAY_NOT}],
        "items": [{"node": "node1", **failure("shop/new", 2)}],
    }
    assert any("failures --limit=1 -o json" in call for call in done.calls)


def latency(connect_p99_ms: float | None) -> dict[str, float | None]:
    return dict.fromkeys(LatencyRow.__struct_fields__) | {"connect_p99_ms": connect_p99_ms}


TOP = (
    answer(
        "agent-a.* top ",
        document(
            "TopList",
            top_row("shop/web:80", 2.0, 5, latency=latency(1000.0)),
            top_row("shop/rare:80", 0.5, None, latency=latency(None)),
        ),
    ),
    answer(
        "agent-b.* top ", document("TopList", top_row("shop/web:80", 40.0, 7, bytes_in=2048, latency=latency(0.488)))
    ),
    answer("agent-c.* top ", document("TopList")),
)


def test_top_adds_up_what_nodes_measure(operator: Operator):
    done = operator("top", *TOP)
    assert cells(done.out) == [
        "SERVICE | NODES | NEW/S | NO-BACKEND/S | FAILED/S | OPEN | IN/S | OUT/S | WORST-P99",
        "shop/web:80 | 2 | 42.0 | 0 | - | 12 | 2.0KiB | - | 1s",
        "shop/rare:80 | 1 | 0.5 | 0 | - | - | - | - | -",
    ]
    assert (done.code, done.err) == (0, "")


def test_top_by_zones_is_a_matrix(operator: Operator):
    """Nodes 1 and 2 are in zone a, node 10 in none."""
    nodes = answer("get nodes ", listed(node("node1", "a"), node("node2", "a"), node("node10")))

    def to(zone: str, new: float) -> dict[str, Any]:
        return top_row("shop/web:80", new, 1) | {"name": zone}

    rows = (
        answer("agent-a.* top --once --by=zones", document("TopList", to("a", 2.0), to("b", 1.0))),
        answer("agent-b.* top --once --by=zones", document("TopList", to("b", 4.0))),
        answer("agent-c.* top --once --by=zones", document("TopList", to("a", 3.0))),
    )
    done = operator("top --by zones", nodes, *rows)
    assert [line.split(" | ")[:5] for line in cells(done.out)] == [
        line.split(" | ")
        for line in (
            "SERVICE | FROM-ZONE | ZONE | NODES | NEW/S",
            "shop/web:80 | a | b | 2 | 5.0",
            "shop/web:80 | - | a | 1 | 3.0",
            "shop/web:80 | a | a | 1 | 2.0",
        )
    ]


def test_top_of_agents_without_it(operator: Operator):
    done = operator("top", answer(" top ", "", NO_COMMAND, 2))
    assert done.err == ("kubectl kbpf: node1, node2, node10: its version of kbpf has no command top\n")
    assert (done.code, done.out) == (1, "")


# ---- trace and exec ------------------------------------------------------------------------------

RELAYED = answer(" trace ", "10.96.0.9:80 \x1b]0;title\x07 → b\n", "a note\n")


@each_line(
    "words, agent, source",
    """\
shop/client | agent-b | shop/client
host:node10 | agent-c | host
outside --node node1 | agent-a | outside
fd00::7 --node node1 | agent-a | fd00::7
""",
)
def test_trace_runs_on_the_clients_node(operator: Operator, words, agent, source):
    done = operator(f"trace {words} shop/web", RELAYED)
    assert done.out == "10.96.0.9:80 \\x1b]0;title\\x07 → b\n"
    assert (done.code, done.err) == (0, "a note\n")
    assert done.calls[-1].endswith(f"exec pod/{agent} -c kube-proxy -- kbpf trace -o table -- {source} shop/web")


def test_options_of_trace_are_passed_on(operator: Operator):
    done = operator("trace host:node1 x --confirm --connect -o json", RELAYED)
    assert done.calls[-1].endswith(" kbpf trace -o json --confirm --connect -- host x")


NOT_FOUND = 'Error from server (NotFound): pods "x" not found\n'
REFUSED = "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host?\n"
ENDED = "Pod shop/client has ended (Succeeded), so that it opens no connections"
TRACE = "trace shop/client y"
ON_NO_NODE = "Pod shop/client is on no node yet (Pending)"
NOT_THERE = "no Pod x in namespace shop; `kubectl get pods -n shop` lists them"
LINES = [
    ("trace shop/x y", [answer("get pod ", "", NOT_FOUND, 1)], NOT_THERE),
    (TRACE, [answer("get pod ", pod("client", "", phase="Pending"))], ON_NO_NODE),
    (TRACE, [answer("get pod ", pod("c", "node1", phase="Succeeded"))], ENDED),
    (TRACE, [answer("get pods", listed(pod("agent-a", "node1")))], f"node2: {NO_POD}"),
    (TRACE, [answer(" trace ", "", FORBIDDEN, 1)], f"node2: {MAY_NOT}"),
    (f"{TRACE} --timeout 1", [answer(" trace ", "HANGS")], "node2: no answer within 1 s"),
    ("status", [answer("get pods", "", REFUSED, 1)], REFUSED.strip()),
    ("status", [answer("get pods", listed()), answer("get nodes", listed())], f"{NO_POD}; see -n and -l"),
    *(
        (words, [], line)
        for words, line in pairs("""\
trace shop/client y --node node1 → shop/client is on node node2, not on node1
trace outside y → outside can be on any node: choose one with --node NODE
trace client y → client is no NAMESPACE/NAME of a Pod, host:NODE, outside, or IP
trace ../x y → ../x is no NAMESPACE/NAME of a Pod
trace host:nodes1 y → no node nodes1; similar: node1, node10, node2
exec moon -- check → no node moon
exec node1 → no arguments for kbpf: write them after --, as in `-- inspect services`
status --node node3 → no node node3; similar: node2, node1, node10
sysdump --output /nowhere/x.tar → cannot create /nowhere/x.tar: No such file or directory
sysdump --output kubectl → cannot create kubectl: File exists
""")
    ),
]
"""A command, answers of the cluster, and the one line of the error."""


@pytest.mark.parametrize(("words", "rows", "line"), LINES, ids=range(len(LINES)))
def test_an_error_is_one_line(operator: Operator, words, rows: list[Row], line):
    done = operator(words, *rows)
    assert (done.code, done.out, done.err) == (1, "", f"kubectl kbpf: {line}\n")


def test_without_kubectl(operator: Operator):
    (operator.folder / "kubectl").unlink()
    done = operator("status")
    assert done.code == 1
    assert done.err == ("kubectl kbpf: cannot run kubectl: No such file or directory; install it in PATH\n")


@pytest.mark.parametrize(("place", "agent"), [("node1", "agent-a"), ("shop/client", "agent-b")])
def test_exec_returns_the_exit_code_of_kbpf(operator: Operator, place, agent):
    errors = "kbpf: not well\ncommand terminated with exit code 7\n"
    done = operator(f"exec {place} -- check -o json", answer("kbpf check", "text\n", errors, 7))
    assert (done.code, done.out, done.err) == (7, "text\n", "kbpf: not well\n")
    assert done.calls[-1].endswith(f"exec pod/{agent} -c kube-proxy -- kbpf check -o json")


def start(operator: Operator, stdout: Any) -> "subprocess.Popen[str]":
    """`kubectl kbpf status`, with this as its output."""
    command, environ = [sys.executable, str(PLUGIN), "status"], {"PATH": str(operator.folder)}
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environ)


def test_an_interrupt_ends_it(operator: Operator):
    operator._answers.write_text(json.dumps([answer("inspect", "HANGS"), *CLUSTER]))
    operator._calls.write_text("")
    process = start(operator, subprocess.PIPE)
    until("all nodes are asked", lambda: operator._calls.read_text().count("inspect") == 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")


def test_a_reader_that_has_exited_ends_it_quietly(operator: Operator):
    operator._answers.write_text(json.dumps(CLUSTER))
    with pipe_without_reader() as gone, start(operator, gone) as process:
        assert process.communicate()[1] == ""
    assert process.returncode == -signal.SIGPIPE


def test_a_full_disk_is_one_line(operator: Operator):
    operator._answers.write_text(json.dumps(CLUSTER))
    with open("/dev/full", "w") as full, start(operator, full) as process:
        assert process.communicate()[1] == "kubectl kbpf: cannot write the output: No space left on device\n"
    assert process.returncode == 1


# ---- sysdump -------------------------------------------------------------------------------------


def test_sysdump_has_each_node_and_says_which_failed(operator: Operator):
    archive = gzip.compress(b"dump").decode("utf-8", "surrogateescape")
    rows = (
        answer("agent-a.* sysdump --time-limit=120s -$", archive, "31 of 31 parts are complete\n"),
        answer("agent-b.* sysdump ", archive, "error: the connection was lost\n", 1),
        answer("agent-c.* sysdump ", "no archive\n"),
    )
    done = operator("sysdump --output dump.tar", *rows)
    assert (done.code, done.out) == (1, "1 of 3 nodes are complete: dump.tar\n")
    assert done.err == (
        "kubectl kbpf: look through it before you send it: it has names and addresses\n"
        "kubectl kbpf: node2: the connection was lost\n"
        "kubectl kbpf: node10: its answer is no archive\n"
    )
    path = operator.folder / "dump.tar"
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as tar:
        files = {name.partition("/")[2]: tar.extractfile(name).read() for name in tar.getnames()}
    index = json.loads(files.pop("index.json"))
    assert [(row["node"], row["file"], row["error"]) for row in index["items"]] == [
        ("node1", "node1.tar.gz", ""),
        ("node2", "node2.incomplete.tar.gz", "the connection was lost"),
        ("node10", "", "its answer is no archive"),
    ]
    assert {name: gzip.decompress(data) for name, data in files.items()} == {
        "node1.tar.gz": b"dump",
        "node2.incomplete.tar.gz": b"dump",
    }


# ---- the file itself -----------------------------------------------------------------------------


def test_it_needs_only_python_3_9():
    """An operator's machine has neither kbpf nor its packages."""
    tree = ast.parse(PLUGIN.read_text(), feature_version=(3, 9))
    names = {
        name.partition(".")[0]
        for each in ast.walk(tree)
        if isinstance(each, (ast.Import, ast.ImportFrom))
        for name in ([each.module] if isinstance(each, ast.ImportFrom) else [alias.name for alias in each.names])
    }
    assert names <= sys.stdlib_module_names
    assert os.access(PLUGIN, os.X_OK)
    assert f'API_VERSION = "{API_VERSION}"' in PLUGIN.read_text()


def test_krew_manifest_names_the_file():
    manifest = yaml.safe_load((PLUGIN.parent / "kbpf.yaml").read_text())
    assert manifest["spec"]["version"] == f"v{__version__}"
    for platform in manifest["spec"]["platforms"]:
        assert platform["bin"] == PLUGIN.name
