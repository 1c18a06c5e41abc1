# SPDX-License-Identifier: Apache-2.0
"""`kbpf record` and `kbpf run --source FILE`: what is recorded of a real API server or of a folder,
masked or not, gives the desired state of the agent that read the original. And `kbpf diff` and
`simulate` on that API server.
"""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kbpf.cli import app, origin
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState
from kbpf.model.events import Event
from kbpf.policy.compute import DesiredStateBuilder
from kbpf.policy.store import ChangeSet, ObjectStore
from kbpf.source.base import wait_until_listed
from kbpf.source.decode.decode import decode_object
from kbpf.source.recording.format import RecordingReader
from kbpf.source.recording.replay import read_events
from tests.support.cluster import scenario
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import Kube
from tests.support.cluster.kube_objects import (
    endpoint,
    endpoint_slice,
    node,
    port,
    service,
    slice_port,
)
from tests.support.lab.lab import Agent, Lab, until

NODE = "here"
HTTP = [slice_port(8080, "http")]
WEIGHTS = {"kbpf.io/weights": "10.1.0.1=3", "kbpf.io/algorithm": "maglev", "team": "hidden-team"}


@pytest.fixture(scope="module")
def cluster(apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Objects in the API server; the path of a kubeconfig."""
    path = apiserver.kubeconfig(tmp_path_factory.mktemp("recording") / "kubeconfig")
    with apiserver.kube() as kube:
        kube.clear()
        kube.create(node(NODE, "198.18.0.1", zone="a"))
        kube.create(node("there", "198.18.0.2", zone="b"))
        kube.create(service("web", port(80, "http"), annotations=WEIGHTS))
        kube.create(endpoint_slice(
            "web", endpoint("10.1.0.1", node=NODE, zone="a"),
            endpoint("10.1.0.2", node="there", zone="b"), ports=HTTP,
        ))  # fmt: skip
        kube.create(service("near", port(80, "http", node_port=30080), type="NodePort",
                            external_policy="Local", affinity_seconds=60))  # fmt: skip
        kube.create(endpoint_slice("near", endpoint("10.1.0.3", node="there"), ports=HTTP))
        yield path
        kube.clear()


def compute(events: Sequence[Event], name: str = NODE) -> DesiredState:
    """The desired state as the agent computes it from these events."""
    store, builder = ObjectStore(name), DesiredStateBuilder()
    store.apply(events)
    builder.update(store, ChangeSet(all_services=True), store.node.addresses, Config())
    return builder.state


def live(kubeconfig: Path) -> DesiredState:
    """What the sources of an agent deliver now."""
    events: list[Event] = []
    config = Config(node_name=NODE, kubeconfig=kubeconfig)
    with origin.watch(config, lambda: (events.append, decode_object)) as sources:
        wait_until_listed(sources)
    return compute(events)


def replayed(path: Path, name: str = NODE) -> DesiredState:
    reader = RecordingReader(path)
    events = [event for _, event in read_events(reader)]
    assert reader.problems == []
    return compute(events, name)


def record(kubeconfig: Path, file: Path, *more: str) -> None:
    command = ["record", str(file), "--kubeconfig", str(kubeconfig), "--hostname-override", NODE]
    assert app.call([*command, *more]) == 0


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_a_recording_of_an_api_server_has_its_desired_state(
    cluster: Path, name: str, tmp_path: Path
) -> None:
    record(cluster, tmp_path / name)
    state = replayed(tmp_path / name)
    assert len(state.services) == 3  # with default/kubernetes
    assert state == live(cluster)
    assert RecordingReader(tmp_path / name).header.node == NODE
    assert b"hidden-team" not in (tmp_path / name).read_bytes()


def test_a_masked_recording_has_the_same_structure(cluster: Path, tmp_path: Path) -> None:
    file = tmp_path / "masked"
    record(cluster, file, "--mask")
    header = RecordingReader(file).header
    assert header.masked
    masked, plain = replayed(file, header.node), live(cluster)
    assert sorted(
        (len(s.frontends), len(s.cluster), len(s.local), s.cluster_weights, s.algorithm)
        for s in masked.services.values()
    ) == sorted(
        (len(s.frontends), len(s.cluster), len(s.local), s.cluster_weights, s.algorithm)
        for s in plain.services.values()
    )
    text = file.read_text()
    for word in ("web", "near", NODE, "there", "10.1.0.", "198.18.0"):
        assert f'"{word}' not in text
    assert {key.name for key in masked.services} >= {"kubernetes"}


def test_changes_are_recorded_until_the_command_is_ended(
    cluster: Path, apiserver: ApiServer, tmp_path: Path
) -> None:
    file = tmp_path / "r"
    command = [sys.executable, "-m", "kbpf", "record", str(file), "--for", "10m",
               "--kubeconfig", str(cluster), "--hostname-override", NODE]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process, apiserver.kube() as kube:
        try:
            until("all is listed", lambda: file.exists() and file.read_text().count("SYNCED") >= 4)
            kube.create(service("later", port(80, "http")))
            until("it is recorded", lambda: '"later"' in file.read_text())
            change_endpoints(kube)
            until("it is recorded", lambda: '"10.1.0.77"' in file.read_text())
            kube.delete("Service", "later")
            until("it is recorded", lambda: '"DELETED"' in file.read_text())
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
            with contextlib.suppress(Exception):
                kube.delete("Service", "later")
    assert replayed(file) == live(cluster)
    types = [json.loads(line).get("type") for line in file.read_text().splitlines()]
    assert types[-1] == "END"
    assert types.count("MODIFIED") >= 1
    # cut off anywhere, it is replayed up to its last whole line
    cut = tmp_path / "cut"
    cut.write_bytes(file.read_bytes()[:-30])
    reader = RecordingReader(cut)
    assert compute([event for _, event in read_events(reader)]) == live(cluster)
    assert len(reader.problems) == 1


def change_endpoints(kube: Kube) -> None:
    slices = kube.list("EndpointSlice")["items"]
    (slice_,) = [s for s in slices if s["metadata"]["name"].startswith("near")]
    slice_["endpoints"][0]["addresses"] = ["10.1.0.77"]
    kube.replace({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", **slice_})


def test_an_api_server_that_is_down_is_one_line_and_no_file(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(cluster.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    down = tmp_path / "kubeconfig"
    down.write_text(json.dumps(config))
    file = tmp_path / "r"
    assert app.call(["record", str(file), "--kubeconfig", str(down)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "127.0.0.1:1" in err
    assert not file.exists()


def test_diff_and_simulate_read_the_api_server(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r"
    record(cluster, file)
    at = ("--kubeconfig", str(cluster), "--hostname-override")[:2]
    assert app.call(["diff", str(file), "cluster", *at]) == 0
    capsys.readouterr()
    command = ["simulate", "cluster", "--node-down", "there", "-o", "json", *at]
    assert app.call(command) == 0
    rows = json.loads(capsys.readouterr().out)["items"]
    found = {
        (row["service"], row["name"]): (row["share_before"], row["share_after"], row["reason"])
        for row in rows
        if row["what"] == "backend"
    }
    web = found["default/web", "10.1.0.1:8080"]
    assert web[1:] == (1.0, "")
    assert web[0] == pytest.approx(0.75, abs=0.02)  # a table of Maglev is exact to a slot
    gone = found["default/web", "10.1.0.2:8080"]
    assert gone[1:] == (None, "node there is down")


@pytest.mark.parametrize("name", ["shop", "policies", "conflicts"])
def test_an_agent_programs_a_recording_as_it_would_the_folder(name: str, tmp_path: Path) -> None:
    file = tmp_path / "r.gz"
    folder = str(scenario.HERE / name)
    arguments = ["record", str(file), "--source", folder, "--hostname-override", "node-1"]
    assert app.call(arguments) == 0
    with Lab(1, f"rc{name[0]}", apart=True) as lab:
        agent = Agent(lab.nodes[0], "--source", str(file), "--source-speed", "0")
        try:
            agent.start(extra=("--hostname-override", "node-1"))
            assert scenario.lines(agent) == scenario.expected(name)
        finally:
            agent.close()
