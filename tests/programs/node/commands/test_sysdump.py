# SPDX-License-Identifier: Apache-2.0
"""`kbpf sysdump`: the archive of a node that an agent serves, of one whose agent is down, without
rights, and of one where nothing works. No secret gets into any of them. Mode ipvs:
tests/lab/agent/test_ipvs_commands.py.
"""

import base64
import json
import stat
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import pytest

from kbpf.cli import app
from kbpf.cli.dump import collect
from kbpf.cli.dump.collect import Limit
from kbpf.cli.dump.parts import NETWORK_MODULE, RULES_MODULE
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.kernel.system import children
from tests.support import plane
from tests.support.lab.lab import Agent, Lab, inside, run
from tests.support.lab.namespace import Namespace
from tests.support.plane import Site
from tests.support.runtime.command import kbpf
from tests.support.table import pairs

TOKEN, PASSWORD, VARIABLE = "tok-4711-secret-value", "pass-4711-secret-value", "env-4711-value"
KEY = base64.b64encode(b"key-4711-secret-value").decode()
KUBECONFIG = f"""\
apiVersion: v1
kind: Config
current-context: c
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: "https://127.0.0.1:1"}}}}]
users: [{{name: u, user: {{token: {TOKEN}}}}}, {{name: v, user: {{client-key-data: {KEY}}}}}]
"""
CONFIG = """\
apiVersion: kbpf.io/v1alpha1
kind: KbpfConfiguration
pinDir: PINS
master: "https://admin:PASSWORD@127.0.0.1:1"
"""


class Dump(NamedTuple):
    """The files of an archive, without its folder, and its index by path."""

    files: dict[str, bytes]
    index: dict[str, Any]
    summary: dict[str, Any]

    def error(self, path: str) -> str:
        return str(self.index[path]["error"])


def read(path: Path) -> Dump:
    files = {}
    with tarfile.open(path, "r:gz") as tar:
        for member in tar:
            folder, _, name = member.name.partition("/")
            assert folder.startswith("kbpf-sysdump-")
            assert member.isfile()
            assert member.mode == 0o600
            file = tar.extractfile(member)
            files[name] = file.read()
    document = json.loads(files["index.json"])
    assert (document["apiVersion"], document["kind"]) == ("kbpf.io/v1alpha1", "SysdumpPartList")
    index = {item["path"]: item for item in document.pop("items")}
    for name, item in index.items():
        assert item["bytes"] == len(files.get(name, b"")), name
    assert files.keys() - {"index.json"} <= index.keys()
    assert document["failed"] == sum(bool(item["error"]) for item in index.values())
    return Dump(files, index, document)


def check_no_secret(dump: Dump) -> None:
    for name, data in dump.files.items():
        for value in (TOKEN, PASSWORD, KEY, VARIABLE, "key-4711-secret-value"):
            assert value.encode() not in data, name
            assert base64.b64encode(value.encode()) not in data, name


@pytest.fixture
def secrets(tmp_path, monkeypatch) -> Path:
    """A kubeconfig with secrets; more are in the environment."""
    monkeypatch.setenv("KBPF_TEST_TOKEN", VARIABLE)
    monkeypatch.setenv("https_proxy", f"http://proxy:{PASSWORD}@127.0.0.1:1")
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG)
    return path


def dump_of(tmp_path: Path, *arguments: str) -> Dump:
    path = tmp_path / "dump.tar.gz"
    assert app.call(["sysdump", str(path), *arguments]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return read(path)


def write_config(folder: Path, site: Site, more: str = "") -> Path:
    """A configuration with a password."""
    file = folder / "config.yaml"
    file.write_text(CONFIG.replace("PINS", str(site.pins)).replace("PASSWORD", PASSWORD) + more)
    return file


def test_everything_that_is_pinned_is_dumped_without_an_agent(
    written: BpfPlane, site: Site, secrets: Path, tmp_path, capsys
):
    log = tmp_path / "agent.log"
    log.write_text(f"started\nproblem: Authorization: Bearer {TOKEN}\n")
    config = write_config(tmp_path, site)
    dump = dump_of(tmp_path, "--config", str(config), "--kubeconfig", str(secrets), "--log", str(log))
    out, err = capsys.readouterr()
    assert "inspect/services.json" in out
    assert f"parts are complete: {tmp_path}/dump.tar.gz" in err
    check_no_secret(dump)
    assert dump.summary["node"] == "n1"  # of the agent that has pinned a status
    services = json.loads(dump.files["inspect/services.json"])
    assert {item["name"] for item in services["items"]} >= {"web", "dns", "guarded"}
    for view in ("backends", "maps", "programs", "affinity", "failures"):
        assert json.loads(dump.files[f"inspect/{view}.json"])["apiVersion"]
        assert dump.error(f"inspect/{view}.json") == ""
    assert dump.files["logs/" + "_".join(log.parts[-3:])].startswith(b"started\nproblem: ")
    assert json.loads(dump.files["check.json"])["items"]
    assert "Failed connections" in dump.files["page.html"].decode()
    assert b"net.ipv4.ip_forward = " in dump.files["node/sysctls.txt"]
    assert b"stable_secret" not in dump.files["node/sysctls.txt"]
    assert b"lo" in dump.files["network/links.txt"]
    assert dump.error("rules/nft.txt") == ""
    assert b"KBPF_TEST_TOKEN=REDACTED\n" in dump.files["config/environment.txt"]
    assert b"https://REDACTED@127.0.0.1:1" in dump.files["config/settings.yaml"]
    # The API server and the agent cannot be reached: these parts say so, and no other is lost.
    assert "127.0.0.1:1" in dump.error("objects/cluster.yaml")
    assert "127.0.0.1:1" in dump.error("simulate.json")
    assert "127.0.0.1:1" in dump.error("verify.json")
    assert dump.error("http/metrics.txt")


def test_a_mistake_in_the_configuration_loses_only_the_settings(written: BpfPlane, site: Site, tmp_path, monkeypatch):
    write_config(tmp_path, site, "nonsense: 1\n")
    monkeypatch.chdir(tmp_path)
    dump = dump_of(tmp_path, "--config", "config.yaml")
    check_no_secret(dump)
    assert b'master: "https://REDACTED@127.0.0.1:1"' in dump.files["config/file.yaml"]
    assert "nonsense" in dump.error("config")
    assert "nonsense" in dump.error("config/settings.yaml")
    assert dump.error("inspect/services.json") == ""  # at the pinDir of the file


def test_a_node_where_nothing_is_pinned(tmp_path):
    dump = dump_of(tmp_path, "--pin-dir", "/nowhere/kbpf", "--hostname-override", "n9")
    assert dump.summary["node"] == "n9"
    for view in ("services", "status", "devices"):
        assert "/nowhere/kbpf" in dump.error(f"inspect/{view}.json")
    assert dump.files["node/uname.txt"]


def test_time_and_size_are_limited(tmp_path):
    late = dump_of(tmp_path, "--time-limit", "0s", "--pin-dir", "/nowhere")
    assert set(late.files) == {"index.json"}
    assert {item["error"] for item in late.index.values()} >= {"not collected: --time-limit is over"}
    (tmp_path / "dump.tar.gz").unlink()
    big = tmp_path / "big.log"
    big.write_bytes(b"0123456789abcde\n" * (3 << 16))
    small = dump_of(tmp_path, "--max-bytes", str(1 << 20), "--log", str(big), "--pin-dir", "/nowhere")
    assert sum(map(len, small.files.values())) < (1 << 20) + 100_000
    name = "logs/" + "_".join(big.parts[-3:])
    assert small.error(name).startswith("only the end of")
    assert b"0123456789abcde\n" in small.files[name]
    assert "not collected: --max-bytes is reached" in {i["error"] for i in small.index.values()}


def test_the_archive_can_go_to_a_pipe_and_never_replaces_a_file(tmp_path, capfd):
    path = tmp_path / "dump.tar.gz"
    done = kbpf("sysdump", "-", "--time-limit", "1s", shell=f"| cat >{path}")
    assert done.code == 0
    assert "parts are complete" in done.err
    assert "index.json" in read(path).files
    before = path.read_bytes()
    assert app.call(["sysdump", str(path)]) == 1
    assert "File exists" in capfd.readouterr().err
    assert path.read_bytes() == before


def test_without_rights_parts_fail_and_the_archive_is_made(written: BpfPlane, site: Site, tmp_path):
    path = tmp_path / "dump.tar.gz"
    done = kbpf("sysdump", "-", "--pin-dir", str(site.pins), shell=f">{path}", nobody=True)
    assert done.code == 0, done.err
    dump = read(path)
    assert dump.error("inspect/services.json")
    assert "Traceback" not in json.dumps(dump.index)
    assert b"net.ipv4.ip_forward = " in dump.files["node/sysctls.txt"]
    assert dump.files["network/routes-4.txt"] is not None


# ---- a running agent -----------------------------------------------------------------------------

OBJECTS = """\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop, annotations: {applied: PASSWORD}}
spec: {clusterIP: 10.96.0.20, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.244.1.2], nodeName: sd1}]
---
apiVersion: v1
kind: Secret
metadata: {name: web, namespace: shop}
stringData: {any: PASSWORD}
""".replace("PASSWORD", PASSWORD)


@pytest.fixture
def agent(tmp_path) -> Iterator[Agent]:
    folder = tmp_path / "objects"
    folder.mkdir()
    (folder / "web.yaml").write_text(OBJECTS)
    with Lab(1, "sd", apart=True) as lab:
        made = Agent(lab.nodes[0], "--source", str(folder))
        made.start()
        yield made
        made.close()


def test_a_running_agent(agent: Agent, secrets: Path, tmp_path):
    path = tmp_path / "dump.tar.gz"
    config = tmp_path / "config.yaml"
    config.write_text(
        "apiVersion: kbpf.io/v1alpha1\nkind: KbpfConfiguration\n"
        f"source: {tmp_path}/objects\npinDir: {agent.pin_dir}\n"
        f"ipvs: {{stateDir: {agent.state_dir}}}\n"
    )
    run(*inside(agent.node.netns, None, sys.executable, "-m", "kbpf", "sysdump", str(path), "--config", str(config)))
    dump = read(path)
    check_no_secret(dump)
    assert dump.summary["node"] == agent.node.name
    assert json.loads(dump.files["inspect/status.json"])["mode"] == agent.mode
    assert dump.error("inspect/status.json") == ""
    (item,) = json.loads(dump.files["inspect/services.json"])["items"]
    assert (item["namespace"], item["name"]) == ("shop", "web")
    assert dump.files["http/readyz.txt"].strip() == b"ok" or dump.error("http/readyz.txt") == ""
    assert b"kbpf_build_info" in dump.files["http/metrics.txt"]
    assert dump.files["http/proxyMode.txt"] == agent.mode.encode()
    assert b"--source" in dump.files["http/flagz.txt"] or b"source" in dump.files["http/flagz.txt"]
    assert f"Pid:\t{agent.pid}".encode() in dump.files["node/agent.txt"]
    assert dump.error("objects/cluster.yaml") == ""
    (share,) = json.loads(dump.files["simulate.json"])["items"]
    assert (share["name"], share["share_after"]) == ("10.244.1.2:8080", 1.0)
    assert json.loads(dump.files["inspect/maps.json"])["items"]

    with tarfile.open(path) as tar:
        tar.extractall(tmp_path)
    (objects,) = map(str, tmp_path.glob("kbpf-sysdump-*/objects"))
    assert app.call(["diff", f"{tmp_path}/objects", objects]) == 0
    programmed = frontends(agent)
    assert programmed
    agent.stop()
    agent.start(extra=("--source", objects))
    assert frontends(agent) == programmed


def frontends(agent: Agent) -> object:
    return plane.dump(agent.entries)["frontends"]


# ---- without iproute2 and nft --------------------------------------------------------------------

LISTS = pairs("""\
links → "IFLA_IFNAME": "lo"
addresses → "IFA_ADDRESS": "127.0.0.1"
rules 4 → "FRA_TABLE": 255
rules 6 → "FRA_TABLE": 254
routes 4 → "RTA_DST": "127.0.0.1"
routes 6 → "RTA_TABLE": 255
neighbours →
qdiscs → "TCA_KIND": "noqueue"
filters →""")


@pytest.mark.parametrize(("arguments", "part"), LISTS)
def test_the_kernel_is_listed_without_programs(arguments: str, part: str):
    """The image has neither `ip` nor `tc`."""
    command = children.python_command(NETWORK_MODULE, *arguments.split())
    collected = collect.run_command(command)(Limit(1 << 24, monotonic() + 60))
    assert collected.error == ""
    for line in collected.data.splitlines():
        assert isinstance(json.loads(line), dict)
    assert part.encode() in collected.data


def test_filters_of_devices_are_listed(namespace: Namespace):
    namespace.run("tc qdisc add dev lo clsact")
    namespace.run("tc filter add dev lo ingress protocol ip prio 7 u32 match u32 0 0")
    listed = namespace.run(f"{sys.executable} -m {NETWORK_MODULE} filters")
    rows = [json.loads(line) for line in listed.splitlines()]
    assert {(row["TCA_KIND"], row["info"] >> 16) for row in rows} == {("u32", 7)}


def test_nftables_are_listed_as_by_nft(namespace: Namespace):
    namespace.run("nft add table inet kbpf-dump { chain c { tcp dport 4711 accept ; } ; }")
    ours = namespace.run(f"{sys.executable} -m {RULES_MODULE}")
    assert "dport 4711" in ours
    assert ours == namespace.run("nft list ruleset")
